"""The page at /docs: Swagger UI over /openapi.json. All that it loads comes from this server."""

from pathlib import Path

from fastapi import APIRouter
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import FileResponse, Response
from swagger_ui_bundle import swagger_ui_path

PAGE = "/docs"
SCRIPT, STYLE = "swagger-ui-bundle.js", "swagger-ui.css"
NO_ICON = "data:,"


def documentation_router(title: str, schema: str) -> APIRouter:
    """The page and its two files. `schema` is the path of the OpenAPI document."""
    router = APIRouter(include_in_schema=False)
    page = get_swagger_ui_html(
        title=title,
        openapi_url=schema,
        swagger_js_url=f"{PAGE}/{SCRIPT}",
        swagger_css_url=f"{PAGE}/{STYLE}",
        swagger_favicon_url=NO_ICON,
        # Swagger UI would have the schema checked, and badged, by a site of its makers.
        swagger_ui_parameters={"validatorUrl": None},
    )
    files = Path(str(swagger_ui_path))

    @router.get(PAGE)
    async def documentation() -> Response:
        return page

    @router.get(f"{PAGE}/{SCRIPT}")
    async def script() -> Response:
        return FileResponse(files / SCRIPT, media_type="text/javascript")

    @router.get(f"{PAGE}/{STYLE}")
    async def style() -> Response:
        return FileResponse(files / STYLE, media_type="text/css")

    return router

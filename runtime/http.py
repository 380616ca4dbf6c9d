"""The front door's HTTP: its routes, its page, and how what goes wrong is told.

A request's way is in runtime/generation.py; nothing here knows sockets of ours, workers or the scheduler.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, Response

from forebay.runtime.answers import ApiError, cut, find_model, model_object
from forebay.runtime.authorization import Authorization, refuse_bad_values, tenant_of
from forebay.runtime.bodies import BODY_LIMIT, BodyLimit, request_router
from forebay.runtime.desk import Desk, RequestFailed
from forebay.runtime.documentation import documentation_router
from forebay.runtime.generation import generation
from forebay.runtime.keyring import OPERATOR, Keyring
from forebay.runtime.lending_api import ask, lending_router
from forebay.runtime.metrics import CONTENT_TYPE, exposition
from forebay.runtime.openai import ChatRequest, CompletionRequest
from forebay.runtime.text import Texts
from forebay.transport.messages import LendingStatus, ModelStatus, Status


@dataclass(frozen=True)
class ServerInfo:
    """What the server is: `configuration` is the file it runs from (None: coordinator only), `body_limit` the bytes
    that a request may have, `keyring` the tokens of which every request needs one, and `trust_user` says whether
    the `user` counts that a request with the operator's token names."""

    version: str
    configuration: str | None
    body_limit: int = BODY_LIMIT
    keyring: Keyring = field(default_factory=lambda: Keyring({}))
    trust_user: bool = False


async def _status(desk: Desk) -> Status:
    return await ask(desk.status())


def _readiness(desk: Desk) -> tuple[bool, dict[str, Any]]:
    models = {
        model.name: {"state": model.state, **({"reason": model.reason} if model.reason else {})}
        for model in desk.models.values()
    }
    ready = desk.informed and not desk.draining and all(model.state == "ready" for model in desk.models.values())
    return ready, {"ready": ready, "draining": desk.draining, "models": models}


def size(number: int) -> str:
    """Bytes for people: "1.5 GiB"."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if number >= 1 << shift:
            return f"{number / (1 << shift):.1f} {unit}".replace(".0 ", " ")
    return f"{number} B" if number else "0"


def build_app(desk: Desk, texts: Texts, info: ServerInfo) -> FastAPI:
    """The whole front door as an ASGI app. Runs in the desk's event loop."""
    app = FastAPI(
        title="Forebay",
        version=info.version,
        description="Serves several LLMs on shared GPUs, through OpenAI's API.",
        docs_url=None,
        redoc_url=None,
    )
    app.add_middleware(Authorization, keyring=info.keyring, trust_user=info.trust_user)
    app.add_middleware(BodyLimit, limit=info.body_limit)
    refuse_bad_values(app)
    requests = request_router()
    created = int(time.time())
    pages = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    pages.filters["size"] = size
    page = pages.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))

    @requests.post("/v1/completions", tags=["OpenAI"])
    async def completions(body: CompletionRequest) -> Response:
        """Continues one prompt, text or token ids; with `stream` as server-sent events."""
        return await generation(desk, texts, body)

    @requests.post("/v1/chat/completions", tags=["OpenAI"])
    async def chat_completions(body: ChatRequest) -> Response:
        """Answers a conversation; with `stream` as server-sent events."""
        return await generation(desk, texts, body)

    app.include_router(requests)
    app.include_router(lending_router(desk, OPERATOR in info.keyring.digests))
    app.include_router(documentation_router(app.title, "/openapi.json"))

    @app.get("/v1/models", tags=["OpenAI"])
    async def models() -> Response:
        """The models of this server, ready or not."""
        return JSONResponse(
            {"object": "list", "data": [model_object(model, created) for model in desk.models.values()]}
        )

    @app.get("/v1/models/{name:path}", tags=["OpenAI"])
    async def model(name: str) -> Response:
        """One model."""
        return JSONResponse(model_object(find_model(desk.models, name), created))

    @app.get("/healthz", tags=["State"])
    async def healthz() -> Response:
        """200 while this process answers."""
        return JSONResponse({"alive": True})

    @app.get("/readyz", tags=["State"])
    async def readyz() -> Response:
        """200 once every model is ready, else 503 with the state of each."""
        ready, body = _readiness(desk)
        return JSONResponse(body, status_code=200 if ready else 503)

    @app.get("/workers", tags=["State"])
    async def workers() -> Response:
        """Every worker: its id, device, process, state, and the models it has."""
        return JSONResponse([msgspec.structs.asdict(worker) for worker in (await _status(desk)).workers])

    @app.get("/metrics", tags=["State"])
    async def metrics() -> Response:
        """Prometheus' text format: requests, replicas, and the prefix cache's hits by model; memory on loan by GPU."""
        status, lending = await _status(desk), await ask(desk.lending(OPERATOR))
        return Response(exposition(status, lending), media_type=CONTENT_TYPE)

    @app.get("/", include_in_schema=False)
    async def front_page(request: Request) -> Response:
        lending: LendingStatus | None = None
        try:
            status = await _status(desk)
            lending = await ask(desk.lending(tenant_of(request)))
            known: tuple[ModelStatus, ...] = status.models
            trouble = "The server is shutting down." if desk.draining else ""
        except ApiError as error:
            status, known, trouble = None, tuple(desk.models.values()), error.message
        return HTMLResponse(
            page.render(
                info=info,
                models=known,
                workers=status.workers if status else (),
                gpus=lending.gpus if lending else (),
                leases=lending.leases if lending else (),
                mapping=lending.mapping if lending else (),
                trouble=trouble,
            ),
            headers={"Cache-Control": "no-store"},
        )

    def refuse(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
        return JSONResponse(error.body(), error.status, {**error.headers, **(headers or {})})

    @app.exception_handler(ApiError)
    async def on_refusal(request: Request, error: ApiError) -> Response:
        return refuse(error)

    @app.exception_handler(RequestFailed)
    async def on_failure(request: Request, error: RequestFailed) -> Response:
        return refuse(ApiError.of(error))

    @app.exception_handler(HTTPException)
    async def on_no_route(request: Request, error: HTTPException) -> Response:
        path = cut(request.url.path)
        if error.status_code == 405:
            message = f"{cut(request.method)} is not allowed on {path}; allowed: {(error.headers or {}).get('Allow')}"
        elif error.status_code == 404:
            message = f"there is no {path}; /docs lists what there is"
        else:
            message = str(error.detail)
        return refuse(ApiError(error.status_code, message), error.headers)

    @app.exception_handler(Exception)
    async def on_fault(request: Request, error: Exception) -> Response:
        return refuse(ApiError(500, "the server made a mistake; its log has the details", code="internal"))

    return app

"""Who may ask: the check of bearer tokens before any route, and refused values of requests in the house's form."""

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from forebay.runtime.answers import ApiError, shown
from forebay.runtime.keyring import OPERATOR, Keyring

OPEN_PATHS = frozenset({"/healthz"})
"""Answered without a token: whoever watches over the process has none."""


def tenant_of(request: Request) -> str:
    """Whose request it is; OPERATOR where there are no tokens."""
    tenant: str = request.scope.get("tenant", OPERATOR)
    return tenant


class Authorization:
    """ASGI middleware: answers 401 to a request without one of the tokens, and marks every other with its tenant."""

    def __init__(self, app: ASGIApp, keyring: Keyring) -> None:
        self._app = app
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keyring or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        header = Headers(scope=scope).get("authorization", "")
        scheme, _, token = header.partition(" ")
        tenant = self._keyring.tenant(token.strip()) if scheme.lower() == "bearer" else None
        if tenant is not None:
            await self._app({**scope, "tenant": tenant}, receive, send)
            return
        what = "this token is none of this server's" if header else "this server needs a token"
        error = ApiError(401, f"{what}; send one as: Authorization: Bearer TOKEN", code="invalid_api_key")
        await JSONResponse(error.body(), 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)


def refuse_bad_values(app: FastAPI) -> None:
    """What FastAPI finds wrong with a request is told as every other refusal: 422, and 400 for what is no JSON."""

    @app.exception_handler(RequestValidationError)
    async def on_bad_value(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            refusal = ApiError(400, f"the body is not valid JSON: {first['ctx']['error']}")
        else:
            param = ".".join(str(part) for part in first["loc"][1:]) or str(first["loc"][0])
            got = "" if first["type"] == "missing" else f", got {shown(first['input'])}"
            refusal = ApiError(422, f"{param}: {first['msg']}{got}", param=param)
        return JSONResponse(refusal.body(), refusal.status)

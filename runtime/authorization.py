"""Who may ask: the check of bearer tokens before any route, and refused values of requests in the house's form."""

from hashlib import blake2b

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


def account_of(scope: Scope, user: str | None) -> str:
    """On whose account a request runs, so that nobody gets a larger share by inventing users: the tenant's whose token
    it carries (lending.tokens), whatever `user` it names. The `user` counts, else the key that comes with it, where no
    token is needed and where the operator vouches for the users of its own token (http.trust_user). Without that all
    requests with the operator's token are on one account, which no tenant has."""
    tenant = scope.get("tenant")
    if tenant:
        return str(tenant)
    if user and (tenant is None or scope["trust_user"]):
        return user
    # Of the key alone, and not of the header, which can be written in many ways.
    _, key = _bearer(scope)
    return blake2b(key.encode(), digest_size=8).hexdigest() if key else ""


def _bearer(scope: Scope) -> tuple[str, str]:
    """What the request's header says: the scheme, in small letters, and the token; a token alone has no scheme."""
    first, _, rest = Headers(scope=scope).get("authorization", "").strip().partition(" ")
    return (first.lower(), rest.strip()) if rest else ("", first)


class Authorization:
    """ASGI middleware: answers 401 to a request without one of the tokens, and marks every other with its tenant, and
    with whether the `user` counts that it names with the operator's token."""

    def __init__(self, app: ASGIApp, keyring: Keyring, trust_user: bool = False) -> None:
        self._app = app
        self._keyring = keyring
        self._trust_user = trust_user

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keyring or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        scheme, token = _bearer(scope)
        tenant = self._keyring.tenant(token) if scheme == "bearer" else None
        if tenant is not None:
            await self._app({**scope, "tenant": tenant, "trust_user": self._trust_user}, receive, send)
            return
        what = "this token is none of this server's" if token else "this server needs a token"
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

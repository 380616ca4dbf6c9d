"""How the front door takes what clients send: no more bytes than it allows, and read without holding up its event loop.

What a body means is in runtime/openai.py, what becomes of it in runtime/generation.py.
"""

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, get_type_hints

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forebay.runtime.answers import ApiError
from forebay.runtime.openai import ChatRequest, CompletionRequest, read_request

BODY_LIMIT = 4 << 20
"""Bytes of one body, unless the configuration says otherwise."""

INLINE_BYTES = 32_000
"""A body up to this length is parsed at once (about a millisecond); a longer one in a thread."""

LINGER_S = 5.0
"""How long a refused body is still read, and dropped. A connection closed over unread bytes is reset, and a client that
sends everything before it reads would never see why."""

AnyRequest = TypeVar("AnyRequest", CompletionRequest, ChatRequest)


class _TooLarge(Exception):
    """More bytes came than are allowed."""


class BodyLimit:
    """ASGI middleware: a body of more than `limit` bytes is answered 413, by the length that it announces, or else
    once it has sent too much; and HEAD is answered as GET, whose body the server leaves away."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        headers = Headers(scope=scope)
        announced = headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self._limit:
            await self._refuse(scope, receive, send)
            return
        left = self._limit

        async def counted() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise _TooLarge
            return message

        try:
            await self._app(scope, counted, send)
        except _TooLarge:  # nothing reads a body after it began to answer
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = ApiError(
            413,
            f"the body has more than {self._limit} bytes, the limit of this server; send less, or raise "
            "http.body_limit in the server's configuration",
            code="body_too_large",
        )

        async def send_and_linger(message: Message) -> None:
            if message["type"] != "http.response.body":
                await send(message)
                return
            await send({**message, "more_body": True})
            # A client that asked first (Expect: 100-continue) sends nothing after this answer.
            if "expect" not in Headers(scope=scope):
                await _drop(receive)
            await send({"type": "http.response.body", "body": b""})

        await JSONResponse(error.body(), error.status, {"Connection": "close"})(scope, receive, send_and_linger)


async def _drop(receive: Receive) -> None:
    try:
        async with asyncio.timeout(LINGER_S):
            while (await receive()).get("more_body"):
                pass
    except TimeoutError:
        pass


def _read_long(kind: type[AnyRequest], body: bytes, content_type: str) -> AnyRequest:
    # A body may hold a million containers, and no cycle: collecting while they are made would take twice as long as
    # making them.
    gc.disable()
    try:
        return read_request(kind, body, content_type)
    finally:
        gc.enable()


def request_router() -> APIRouter:
    """A router for endpoints that take one request of runtime/openai.py, named `body`. Their bodies are read here
    instead of by FastAPI, which would parse and check them in the event loop."""
    # Parsing holds the interpreter lock for long, and every turn of the loop waits for whoever holds it.
    one_at_a_time = asyncio.Lock()

    async def read(kind: type[AnyRequest], request: Request) -> AnyRequest:
        body = await request.body()
        content_type = request.headers.get("content-type", "")
        if len(body) <= INLINE_BYTES:
            return read_request(kind, body, content_type)
        async with one_at_a_time:
            return await asyncio.to_thread(_read_long, kind, body, content_type)

    class BodyRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            kind = get_type_hints(self.endpoint)["body"]

            async def handle(request: Request) -> Response:
                answer: Response = await self.endpoint(await read(kind, request))
                return answer

            return handle

    return APIRouter(route_class=BodyRoute)

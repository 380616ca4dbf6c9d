"""One streaming completion over HTTP, timed: the load generator's hot path. Speaks to any OpenAI-compatible server."""

import asyncio
import errno
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeAlias

import aiohttp
import msgspec

from forebay.bench.errors import BenchError

FailureKind: TypeAlias = str
"""`connect` (no connection), `descriptors` (none was left for one), `http_<status>`, `server_error` (told in the
stream), `truncated` (the stream ended early), `bad_stream` (not what OpenAI's API says), `wrong_length`, `timeout`,
`interrupted`, `not_sent`."""


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times are seconds of time.perf_counter; `sent` is None if it never was.

    `chunk_times` holds the arrival of each chunk of the completion, which may carry several tokens. `tokens` is the
    server's own count (usage), and `cached_tokens` how many of the prompt it took from its prefix cache, where it says
    so. `ended` is when the request was over, however it went. `failure` is None for a request that finished with
    exactly the tokens asked for. `tenant` travels as the request's `user`."""

    model: str
    prompt_tokens: int
    output_tokens: int
    scheduled: float
    sent: float | None = None
    chunk_times: list[float] = field(default_factory=list)
    ended: float | None = None
    tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    failure: FailureKind | None = None
    message: str = ""
    tenant: str = ""

    @property
    def first_token(self) -> float:
        """When the first token came. Raises IndexError if none did."""
        return self.chunk_times[0]

    @property
    def end(self) -> float:
        """When the last token, or the news that there are no more, came. Raises IndexError as `first_token` does."""
        return self.chunk_times[-1]

    def fail(self, kind: FailureKind, message: str) -> None:
        self.failure, self.message = kind, message


class Completions(Protocol):
    """What a replay needs of a server, or of several."""

    async def complete(self, outcome: Outcome, prompt: Sequence[int]) -> None: ...

    async def is_listening(self) -> bool: ...


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class CompletionClient:
    """Sends completions to one server. `timeout_s` bounds each request as a whole, from sending to its end."""

    def __init__(self, base_url: str, timeout_s: float = 600.0) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        self._decode_chunk = msgspec.json.Decoder(_Chunk).decode

    async def __aenter__(self) -> Self:
        # Idle connections are dropped long before a server would: a request must never meet one that just closed.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=1.0)
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def models(self) -> list[str]:
        """The names that the server offers. Raises BenchError where it does not answer as it should."""
        url = f"{self.base_url}/v1/models"
        try:
            async with asyncio.timeout(30):
                async with self._session.get(url) as response:
                    body = await response.read()
        except TimeoutError as error:
            raise BenchError(f"{url}: no answer within 30 s") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise BenchError(f"{url}: {error or type(error).__name__}; is the server running there?") from error
        if response.status != 200:
            raise BenchError(f"{url}: answered {response.status}: {_error_text(body)}")
        try:
            return sorted(model.id for model in msgspec.json.decode(body, type=_Models).data)
        except msgspec.DecodeError as error:
            raise BenchError(f"{url}: not an OpenAI-compatible list of models: {error}") from error

    async def is_listening(self) -> bool:
        """False only if the server refuses connections: its process is gone."""
        try:
            async with asyncio.timeout(10):
                async with self._session.get(f"{self.base_url}/v1/models"):
                    return True
        except aiohttp.ClientConnectorError as error:
            return _out_of_descriptors(error)
        except (aiohttp.ClientError, TimeoutError):
            return True

    async def complete(self, outcome: Outcome, prompt: Sequence[int]) -> None:
        """Sends the request and fills in `outcome`; whatever goes wrong with it is told there. If this is
        cancelled, the connection is closed, so that the server can end the request too."""
        body = msgspec.json.encode(
            {
                "model": outcome.model,
                "prompt": prompt,
                "max_tokens": outcome.output_tokens,
                "min_tokens": outcome.output_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                **({"user": outcome.tenant} if outcome.tenant else {}),
            }
        )
        outcome.sent = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._exchange(outcome, body)
        except TimeoutError:
            outcome.fail("timeout", f"not finished after {self._timeout_s:g} s")
        finally:
            outcome.ended = time.perf_counter()
        if outcome.failure is None and not outcome.chunk_times:
            outcome.fail("bad_stream", "the stream carried no completion")
        if outcome.failure is None and outcome.tokens != outcome.output_tokens:
            got = "no count" if outcome.tokens is None else f"{outcome.tokens} tokens"
            outcome.fail("wrong_length", f"asked for {outcome.output_tokens} tokens, the server reports {got}")

    async def _exchange(self, outcome: Outcome, body: bytes) -> None:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        stage: Literal["connect", "truncated"] = "connect"
        try:
            async with self._session.post(f"{self.base_url}/v1/completions", data=body, headers=headers) as response:
                if response.status != 200:
                    outcome.fail(f"http_{response.status}", _error_text(await response.read()))
                    return
                stage = "truncated"
                await self._read_stream(outcome, response.content)
        except aiohttp.ClientError as error:
            kind = "descriptors" if _out_of_descriptors(error) else stage
            outcome.fail(kind, str(error) or type(error).__name__)

    async def _read_stream(self, outcome: Outcome, content: aiohttp.StreamReader) -> None:
        """Server-sent events, one `data:` line each; the stream is whole once `[DONE]` has come, and what happens to
        the connection afterwards is no failure of the request."""
        rest = b""
        whole = False
        try:
            async for data in content.iter_any():
                now = time.perf_counter()
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if not line.startswith(b"data:"):
                        continue
                    payload = line[5:].strip()
                    if payload == b"[DONE]":
                        whole = True
                    elif not self._take(outcome, payload, now):
                        return
        except aiohttp.ClientError:
            if not whole:
                raise
        if not whole:
            outcome.fail("truncated", f"the stream ended without [DONE] after {len(outcome.chunk_times)} chunks")

    def _take(self, outcome: Outcome, payload: bytes, now: float) -> bool:
        """Notes one event; False if it ends the request."""
        try:
            chunk = self._decode_chunk(payload)
        except msgspec.DecodeError as error:
            outcome.fail("bad_stream", f"{error}: {payload[:80]!r}")
            return False
        if chunk.error is not None:
            outcome.fail("server_error", _describe(chunk.error))
            return False
        if chunk.choices:
            outcome.chunk_times.append(now)
            outcome.finish_reason = chunk.choices[0].finish_reason
        if chunk.usage is not None:
            outcome.tokens = chunk.usage.completion_tokens
            if chunk.usage.prompt_tokens_details is not None:
                outcome.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens
        return True


def _out_of_descriptors(error: aiohttp.ClientError) -> bool:
    """Whether this process, or the machine, has no descriptor for another connection: no fault of the server's."""
    return isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno in (errno.EMFILE, errno.ENFILE)


def _describe(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _error_text(body: bytes) -> str:
    """The message of an error answer, in OpenAI's shape or as it is."""
    with suppress(msgspec.DecodeError):
        answer = msgspec.json.decode(body)
        if isinstance(answer, dict) and "error" in answer:
            return _describe(answer["error"])
    return " ".join(body[:400].decode(errors="replace").split())


class RoutedClient:
    """Several servers as one: each model's requests go to the server that `urls` names for it."""

    def __init__(self, urls: Mapping[str, str], timeout_s: float = 600.0) -> None:
        by_url = {url: CompletionClient(url, timeout_s) for url in urls.values()}
        self._servers = list(by_url.values())
        self._clients = {model: by_url[url] for model, url in urls.items()}

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as undo:
            for server in self._servers:
                await undo.enter_async_context(server)
            self._undo = undo.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._undo.aclose()

    async def complete(self, outcome: Outcome, prompt: Sequence[int]) -> None:
        """Raises KeyError for a model that no server has."""
        await self._clients[outcome.model].complete(outcome, prompt)

    async def is_listening(self) -> bool:
        """False if one of the servers is gone."""
        return all(await asyncio.gather(*(server.is_listening() for server in self._servers)))

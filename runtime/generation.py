"""One request's way through the front door: from a valid body to the last byte of its answer.

Nothing here knows routes, workers or the scheduler: requests go to the desk, tokens come from it.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from forebay.runtime.answers import Answer, ApiError, error_event, find_model, shown, usage
from forebay.runtime.authorization import account_of
from forebay.runtime.desk import Delivery, Desk, RequestFailed
from forebay.runtime.openai import ChatRequest, CompletionRequest
from forebay.runtime.text import ModelText, OutputText, PromptError, PromptTooLong, Texts
from forebay.transport.messages import ModelStatus, Sampling


async def generation(desk: Desk, texts: Texts, body: CompletionRequest | ChatRequest) -> "Generation":
    """The answer to a request, not started yet: it starts when it is sent.

    Raises ApiError for whatever keeps the request from running that can be known without the scheduler."""
    if not desk.informed:
        raise ApiError(503, "the server is starting and has not heard of its models yet; try again", code="not_ready")
    model = find_model(desk.models, body.model)
    body.refuse_unsupported()
    if desk.draining:
        raise ApiError(503, "the server is shutting down and takes no new requests", code="draining")
    if not model.was_ready:
        because = f": {model.reason}" if model.reason else ""
        raise ApiError(503, f"model {model.name!r} is not ready yet ({model.state}){because}", code="not_ready")
    try:
        text = await texts.get(model.path)
    except ValueError as error:
        raise ApiError(500, f"model {model.name!r} cannot be served: {error}") from error
    if isinstance(body, ChatRequest):
        prompt = await _tokenize(text, model, body.messages, "messages")
        sampling = body.sampling(len(prompt), model.max_context)
        return Generation(desk, body, prompt, sampling, OutputText(text, (), body.stop, sampling.min_tokens))
    if isinstance(body.prompt, str):
        prompt = await _tokenize(text, model, body.prompt, "prompt")
        sampling = body.sampling(len(prompt), model.max_context)
    else:
        prompt = body.prompt
        # First its length: a million ids are refused without a look at each.
        sampling = body.sampling(len(prompt), model.max_context)
        _check_tokens(text, model, prompt)
    return Generation(desk, body, prompt, sampling, OutputText(text, prompt, body.stop, sampling.min_tokens))


async def _tokenize(
    text: ModelText, model: ModelStatus, prompt: str | Sequence[Mapping[str, Any]], param: str
) -> list[int]:
    try:
        tokens = await text.tokenize(prompt, model.max_context)
    except PromptTooLong as error:
        raise ApiError(400, f"{param}: {error}; shorten it", param=param, code="context_length_exceeded") from error
    except PromptError as error:
        raise ApiError(400, f"{param}: model {model.name!r} cannot take it: {error}", param=param) from error
    if not tokens:
        raise ApiError(400, f"{param}: makes no tokens; send some text", param=param)
    return tokens


def _check_tokens(text: ModelText, model: ModelStatus, tokens: list[int]) -> None:
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < text.vocabulary:
            raise ApiError(
                400,
                f"prompt: token id {shown(token)} is not in the vocabulary of {model.name!r}; "
                f"ids are 0 to {text.vocabulary - 1}",
                param="prompt",
            )


class Generation(Response):
    """Runs one request and writes its answer; ends it at once when its client goes.

    Nothing is sent before the first token: a request that is refused while it queues gets its proper status."""

    def __init__(
        self,
        desk: Desk,
        body: CompletionRequest | ChatRequest,
        prompt: list[int],
        sampling: Sampling,
        output: OutputText,
    ) -> None:
        super().__init__()
        self._desk = desk
        self._body = body
        self._prompt = prompt
        self._sampling = sampling
        self._output = output
        self._answer = Answer(
            chat=isinstance(body, ChatRequest),
            model=body.model,
            created=int(time.time()),
            usage_in_stream=body.stream_options is not None and bool(body.stream_options.include_usage),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = account_of(scope, self._body.user)
        delivery = self._desk.open(self._body.model, self._prompt, self._sampling, tenant)
        write = self._write_stream if self._body.stream else self._write_whole
        writing = asyncio.create_task(write(delivery, send))
        leaving = asyncio.create_task(_client_left(receive))
        try:
            await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
            answered = writing.done()
        finally:
            delivery.close()
            writing.cancel()
            leaving.cancel()
            await asyncio.gather(writing, leaving, return_exceptions=True)
        if answered:
            writing.result()

    async def _write_whole(self, delivery: Delivery, send: Send) -> None:
        pieces = []
        while not self._output.stopped and (tokens := await delivery.next()):
            pieces.append(self._output.push(tokens))
        delivery.close()
        pieces.append(self._output.finish())
        content = self._answer.whole("".join(pieces), self._finish_reason(delivery), self._usage(delivery))
        await send(_start("application/json", ("content-length", str(len(content)))))
        await send(_part(content, more=False))

    async def _write_stream(self, delivery: Delivery, send: Send) -> None:
        events = self._answer.opening(self._output.push(await delivery.next()))
        await send(_start("text/event-stream; charset=utf-8", ("cache-control", "no-cache")))
        try:
            while not self._output.stopped:
                if events:
                    await send(_part(events))
                    events = b""
                tokens = await delivery.next()
                if not tokens:
                    break
                if text := self._output.push(tokens):
                    events = self._answer.piece(text)
        except RequestFailed as failure:
            await send(_part(error_event(ApiError.of(failure)), more=False))
            return
        delivery.close()
        reason = self._finish_reason(delivery)
        events += self._answer.closing(self._output.finish(), reason, self._usage(delivery))
        await send(_part(events, more=False))

    def _finish_reason(self, delivery: Delivery) -> str:
        if self._output.stopped or delivery.finish_reason is None:
            return "stop"
        return delivery.finish_reason

    def _usage(self, delivery: Delivery) -> dict[str, Any]:
        return usage(len(self._prompt), self._output.tokens, delivery.cached)


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _start(content_type: str, *headers: tuple[str, str]) -> Message:
    pairs = [("content-type", content_type), *headers]
    return {
        "type": "http.response.start",
        "status": 200,
        "headers": [(name.encode(), value.encode()) for name, value in pairs],
    }


def _part(body: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}

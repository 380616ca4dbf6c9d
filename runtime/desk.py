"""The front door's own record of its requests: what was asked, what was delivered, and how each one ended.

Lives in the front door's event loop, knows neither HTTP nor sockets: messages go in at `Desk.receive` and out through
the `send` it was given. A request is `live` until exactly one of `finished`, `failed` or `closed`; only a live one
takes tokens. When its worker is lost the desk submits the prompt and all delivered tokens again under the next epoch,
and drops whatever still arrives under an older one.
"""

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from forebay.transport.messages import (
    Abort,
    Answered,
    AskLending,
    Catalog,
    Concluded,
    Finished,
    Heartbeat,
    Interrupted,
    LendingStatus,
    LendingWish,
    ModelStatus,
    Opened,
    Query,
    Refused,
    Rejected,
    RejectKind,
    Rejoin,
    Sampling,
    Status,
    Stop,
    Submit,
    ToFrontDoor,
    Tokens,
    ToScheduler,
)


class RequestFailed(Exception):
    """A request ended without its text. `kind` says why, for programs; `reason` says it for people."""

    def __init__(self, kind: RejectKind, reason: str) -> None:
        super().__init__(reason)
        self.kind: RejectKind = kind
        self.reason = reason


class Delivery:
    """One request, as its reader sees it: tokens in order, each exactly once, then one ending."""

    def __init__(self, desk: "Desk", model: str, prompt: Sequence[int], sampling: Sampling, tenant: str = "") -> None:
        self.request = 0
        self.model = model
        self.tenant = tenant
        self.sampling = sampling
        self.prompt_tokens = len(prompt)
        self.epoch = 0
        self.cached = 0
        """Tokens of its prompt that were found in the prefix cache; known once it has finished."""
        self.state: Literal["live", "finished", "failed", "closed"] = "live"
        self.finish_reason: Literal["stop", "length"] | None = None
        self._desk = desk
        self._tokens = array("I", prompt)
        self._read = len(prompt)
        self._failure: RequestFailed | None = None
        self._news: asyncio.Event = asyncio.Event()

    @property
    def generated(self) -> int:
        """Tokens delivered so far, read or not."""
        return len(self._tokens) - self.prompt_tokens

    async def next(self) -> list[int]:
        """All token ids that came since the last call, waiting for at least one; [] once finished.

        Raises RequestFailed, after the last token, if the request failed, and ValueError once it was closed."""
        while self._read == len(self._tokens):
            if self.state == "finished":
                return []
            if self._failure is not None:
                raise self._failure
            if self.state == "closed":
                raise ValueError(f"request {self.request} was closed by its reader; nothing more can be read")
            self._news.clear()
            await self._news.wait()
        fresh = self._tokens[self._read :].tolist()
        self._read = len(self._tokens)
        return fresh

    def close(self) -> None:
        """The reader wants no more. Ends the request at once unless it has ended; safe to call at any time."""
        if self.state == "live":
            self._end("closed")
            self._desk.send(Abort(self.request))

    def submission(self) -> Submit:
        tokens = self._tokens.tobytes()
        return Submit(self.request, self.epoch, self.model, tokens, self.prompt_tokens, self.sampling, self.tenant)

    def _append(self, token: int) -> None:
        self._tokens.append(token)
        self._news.set()

    def _finish(self, reason: Literal["stop", "length"]) -> None:
        self.finish_reason = reason
        self._end("finished")

    def _fail(self, kind: RejectKind, reason: str) -> None:
        self._failure = RequestFailed(kind, reason)
        self._end("failed")

    def _end(self, state: Literal["finished", "failed", "closed"]) -> None:
        assert self.state == "live", f"request {self.request} ended twice: {self.state}, then {state}"
        self.state = state
        self._desk.forget(self)
        self._news.set()


class Desk:
    """All live requests of one front door, and the latest word on its models."""

    def __init__(self, send: Callable[[ToScheduler], None]) -> None:
        self.send = send
        self.draining = False
        self.informed = False
        """Whether a catalog has come: before that nothing is known of any model."""
        self._models: dict[str, ModelStatus] = {}
        self._live: dict[int, Delivery] = {}
        self._next_request: int | None = None
        self._queries: dict[int, asyncio.Future[Any]] = {}
        self._next_query = 0

    @property
    def models(self) -> Mapping[str, ModelStatus]:
        """By name, as of the last catalog."""
        return self._models

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def open(self, model: str, prompt: Sequence[int], sampling: Sampling, tenant: str = "") -> Delivery:
        """Submits a request, on the account of `tenant`. Token ids in `prompt` are below 2**32. Raises RequestFailed
        before the scheduler has answered this front door for the first time; every later failure comes through the
        delivery."""
        if self._next_request is None:
            raise RequestFailed("not_ready", "the server is starting: its scheduler has not answered yet; try again")
        delivery = Delivery(self, model, prompt, sampling, tenant)
        delivery.request = self._take_number(delivery)
        self.send(delivery.submission())
        return delivery

    async def status(self) -> Status:
        """Asks the scheduler what runs where, now."""
        answer: Status = await self._ask(Query)
        return answer

    async def lending(self, tenant: str) -> LendingStatus:
        """Asks the scheduler what is lent, and what is mapped."""
        answer: LendingStatus = await self._ask(lambda query: AskLending(query, tenant))
        return answer

    async def wish(self, make: Callable[[int], LendingWish]) -> Answered:
        """Sends what `make` makes of the number that the answer comes with."""
        answer: Answered = await self._ask(make)
        return answer

    async def _ask(self, make: Callable[[int], Query | LendingWish]) -> Any:
        query = self._next_query
        self._next_query += 1
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queries[query] = answer
        self.send(make(query))
        try:
            return await answer
        finally:
            self._queries.pop(query, None)

    def forget(self, delivery: Delivery) -> None:
        del self._live[delivery.request]

    def receive(self, message: ToFrontDoor) -> None:
        """Takes one message from the scheduler or a worker."""
        match message:
            case Tokens():
                self._tokens(message)
            case Finished():
                self._finished(message)
            case Rejected(request, epoch, kind, reason):
                if (delivery := self._current(request, epoch)) is not None:
                    delivery._fail(kind, reason)
            case Interrupted(request, epoch):
                self._interrupted(request, epoch)
            case Catalog(models, draining):
                self._models = {model.name: model for model in models}
                self.draining = draining
                self.informed = True
            case Opened(first_request=first_request):
                self._opened(first_request)
            case Status(query=query) | Answered(query=query) | LendingStatus(query=query):
                if (answer := self._queries.get(query)) is not None and not answer.done():
                    answer.set_result(message)
            case Stop(reason):
                for delivery in list(self._live.values()):
                    delivery._fail("draining", f"the server is shutting down: {reason}")
            case Rejoin() | Refused() | Heartbeat():
                pass  # the process's business

    def _current(self, request: int, epoch: int) -> Delivery | None:
        delivery = self._live.get(request)
        return delivery if delivery is not None and delivery.epoch == epoch else None

    def _tokens(self, message: Tokens) -> None:
        widths = [len(column) for column in (message.requests, message.epochs, message.tokens)]
        rows = len(message.tokens) // 4
        if widths != [8 * rows, 4 * rows, 4 * rows]:
            raise ValueError(
                f"tokens whose columns do not match: {widths[0]}, {widths[1]} and {widths[2]} bytes of requests, "
                "epochs and token ids; each row has 8, 4 and 4"
            )
        columns = zip(
            memoryview(message.requests).cast("Q"),
            memoryview(message.epochs).cast("I"),
            memoryview(message.tokens).cast("I"),
            strict=True,
        )
        for request, epoch, token in columns:
            if (delivery := self._current(request, epoch)) is not None:
                delivery._append(token)

    def _finished(self, message: Finished) -> None:
        delivery = self._current(message.request, message.epoch)
        if delivery is None:
            return
        delivery.cached = message.cached
        self.send(Concluded(message.request))
        match message.reason:
            case "stop" | "length":
                delivery._finish(message.reason)
            case "failed":
                delivery._fail("failed", message.detail)
            case "aborted":
                delivery._fail("failed", message.detail or "the request was ended by the server")

    def _interrupted(self, request: int, epoch: int) -> None:
        if (delivery := self._current(request, epoch)) is not None:
            delivery.epoch += 1
            self.send(delivery.submission())
        elif request not in self._live:
            # It ended here, and the worker died before it could tell the scheduler so.
            self.send(Abort(request))

    def _opened(self, first_request: int) -> None:
        # What lives already was submitted to a scheduler that has lost us: there it is forgotten, or being ended under
        # its old number, so it begins anew under one of the new numbers.
        orphans = list(self._live.values())
        self._live.clear()
        self._next_request = first_request
        for delivery in orphans:
            delivery.request, delivery.epoch = self._take_number(delivery), 0
            self.send(delivery.submission())

    def _take_number(self, delivery: Delivery) -> int:
        assert self._next_request is not None
        number = self._next_request
        self._next_request += 1
        self._live[number] = delivery
        return number

"""A front door on a loopback port whose scheduler and worker are a script in the same process.

The desk, the app, uvicorn and the sockets are the real ones; the peer answers with the messages that a scheduler and
a worker would send.
"""

import asyncio
import contextlib
import io
import socket
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal

import aiohttp
import uvicorn

from forebay.runtime.bodies import BODY_LIMIT
from forebay.runtime.desk import Desk
from forebay.runtime.http import ServerInfo, build_app
from forebay.runtime.keyring import Keyring
from forebay.runtime.text import Texts
from forebay.sched.lending import LendingCore
from forebay.sched.lending_events import Gpu, LendingEvent, LendingSettings, Tell, Wish
from forebay.transport.messages import (
    Abort,
    Answered,
    AskLending,
    Catalog,
    Concluded,
    Finished,
    Interrupted,
    LendingStatus,
    Map,
    Message,
    ModelStatus,
    Opened,
    Query,
    ReclaimGpu,
    Rejected,
    RejectKind,
    RevokeLease,
    Status,
    Submit,
    Tokens,
    ToScheduler,
    Unmap,
    WorkerStatus,
)

PATIENCE_S = 10.0
TEXTS = Texts()  # each folder is read once for all tests


def ready_model(name: str, path: str, max_context: int = 256) -> ModelStatus:
    return ModelStatus(name, path, "ready", True, max_context, 1, 0, 0)


class Peer:
    """The scripted scheduler and worker behind a desk. `script` answers each submission; None leaves it to the
    test."""

    def __init__(self, models: Sequence[ModelStatus], draining: bool = False, informs: bool = True) -> None:
        self.desk = Desk(self._take)
        self.submitted: asyncio.Queue[Submit] = asyncio.Queue()
        self.aborted: asyncio.Queue[int] = asyncio.Queue()
        self.concluded: asyncio.Queue[int] = asyncio.Queue()
        self.script: Callable[[Submit], None] | None = None
        self.answers_queries = True
        self.lending = LendingCore(LendingSettings(tuple(Gpu(index, f"cpu:{index}") for index in range(4)), secret="s"))
        self.to_parties: list[tuple[str, Message]] = []
        self.told_party = asyncio.Event()
        self.workers: tuple[WorkerStatus, ...] = (
            WorkerStatus("worker-0", "cpu:0", 4711, "ready", tuple(m.name for m in models), 0),
        )
        self.desk.receive(Opened(version=1, session=1, heartbeat_s=1.0, first_request=1))
        if informs:
            self.catalog(models, draining)

    def _take(self, message: ToScheduler) -> None:
        match message:
            case Submit():
                self.submitted.put_nowait(message)
                if self.script is not None:
                    self.script(message)
            case Abort(request):
                self.aborted.put_nowait(request)
            case Concluded(request):
                self.concluded.put_nowait(request)
            case Query(query):
                if self.answers_queries:
                    self._later(lambda: self.desk.receive(Status(query, self.models, self.workers)))
            case Map() | Unmap() | RevokeLease() | ReclaimGpu() | AskLending():
                if self.answers_queries:
                    self.lend(Wish("door", message))
            case _:
                raise AssertionError(f"a front door does not send {message!r}")

    def lend(self, event: LendingEvent) -> None:
        """Through a real lending core, whose parties are the test."""
        for command in self.lending.handle(asyncio.get_running_loop().time(), event):
            if isinstance(command, Tell):
                self._deliver(command.peer, command.message)
        self.lending.check()

    def _deliver(self, peer: str, message: Message) -> None:
        if isinstance(message, Answered | LendingStatus):
            self._later(lambda: self.desk.receive(message))
        else:
            self.to_parties.append((peer, message))
            self.told_party.set()

    def catalog(self, models: Sequence[ModelStatus], draining: bool = False) -> None:
        self.models = tuple(models)
        self.desk.receive(Catalog(self.models, draining))

    def tokens(self, submit: Submit, tokens: Sequence[int], epoch: int | None = None) -> None:
        count = len(tokens)
        self.desk.receive(
            Tokens(
                array("Q", [submit.request] * count).tobytes(),
                array("I", [submit.epoch if epoch is None else epoch] * count).tobytes(),
                array("I", tokens).tobytes(),
            )
        )

    def finish(self, submit: Submit, reason: Literal["stop", "length", "failed"], detail: str = "") -> None:
        self.desk.receive(Finished(submit.request, submit.epoch, reason, detail))

    def reject(self, submit: Submit, kind: RejectKind, reason: str) -> None:
        self.desk.receive(Rejected(submit.request, submit.epoch, kind, reason))

    def interrupt(self, submit: Submit) -> None:
        self.desk.receive(Interrupted(submit.request, submit.epoch, "its worker was lost"))

    def says(self, tokens: Sequence[int], reason: Literal["stop", "length"] = "stop") -> None:
        """Every request gets these tokens, one a loop turn as from decode steps, up to its max_tokens."""

        def script(submit: Submit) -> None:
            def step(index: int) -> None:
                if index < min(len(tokens), submit.sampling.max_tokens):
                    self.tokens(submit, [tokens[index]])
                    self._later(lambda: step(index + 1))
                else:
                    self.finish(submit, reason if index == len(tokens) else "length")

            self._later(lambda: step(0))

        self.script = script

    async def next_submit(self) -> Submit:
        return await asyncio.wait_for(self.submitted.get(), PATIENCE_S)

    async def next_abort(self) -> int:
        return await asyncio.wait_for(self.aborted.get(), PATIENCE_S)

    @staticmethod
    def _later(call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(call)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()
        self.stop = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.stop.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield  # the signals are pytest's


class Front:
    """Where to reach a running front door, and what is behind it."""

    def __init__(self, peer: Peer, port: int, client: aiohttp.ClientSession) -> None:
        self.peer = peer
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.client = client

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.client.get(self.url + path) as response:
            return response.status, await response.json()

    async def post(self, path: str, body: Any, **kinds: Any) -> tuple[int, Any, Any]:
        how = {"data": body} if isinstance(body, str | bytes | io.BytesIO) else {"json": body}
        async with self.client.post(self.url + path, **how, **kinds) as response:
            return response.status, await response.json(), response.headers


@contextlib.asynccontextmanager
async def front_door(
    peer: Peer,
    configuration: str | None = "tests.yaml",
    body_limit: int = BODY_LIMIT,
    keyring: Keyring | None = None,
    trust_user: bool = False,
) -> AsyncIterator[Front]:
    # asyncio sends small writes at once only on sockets made with the protocol's number; else each answer takes 40 ms.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        app = build_app(
            peer.desk, TEXTS, ServerInfo("0.0", configuration, body_limit, keyring or Keyring({}), trust_user)
        )
        server = _Server(uvicorn.Config(app, log_level="warning", lifespan="off", access_log=False))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await asyncio.wait_for(server.up.wait(), PATIENCE_S)
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE_S)) as client:
                yield Front(peer, listener.getsockname()[1], client)
        finally:
            server.stop.set()
            await asyncio.wait_for(serving, PATIENCE_S)
            assert peer.desk.live == 0, "every request must have ended"

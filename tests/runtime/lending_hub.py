"""A hub with the real lending core behind it, in a thread of the test: what parties need of a scheduler, quick to
start, to stop and to look into."""

import asyncio
import contextlib
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from forebay.sched.lending import LendingCore
from forebay.sched.lending_events import (
    Forget,
    FromPartyLink,
    Gpu,
    Keep,
    LendingSettings,
    LendingTick,
    PartyGone,
    Record,
    Restored,
    Tell,
    Wish,
)
from forebay.transport.codec import read_to_scheduler
from forebay.transport.messages import (
    AskLending,
    Complain,
    LendingStatus,
    ReclaimGpu,
    RevokeLease,
    ToScheduler,
)
from forebay.transport.zeromq import ZmqHub
from tests.system.server import short_folder

TICK_S = 0.02
GPUS = tuple(Gpu(index) for index in range(10))


class LendingHub:
    """`records` are what an earlier hub kept, for one that comes after it at the same address."""

    def __init__(
        self,
        folder: Path | None = None,
        ttl_s: float = 2.0,
        records: tuple[Record, ...] = (),
        uids: tuple[int, ...] = (),
        **more: Any,
    ) -> None:
        self.folder = folder or short_folder()
        self._own_folder = folder is None
        self.endpoint = f"ipc://{self.folder}/hub"
        self.epoch = 1 + max((record.epoch for record in records if hasattr(record, "epoch")), default=0)
        self.core = LendingCore(
            LendingSettings(gpus=GPUS, ttl_s=ttl_s, heartbeat_s=ttl_s / 5, secret="s", epoch=self.epoch, **more)
        )
        self.records: dict[str, Record] = {record.id: record for record in records}
        self.received: list[tuple[str, Any]] = []
        self.answers: list[Any] = []
        self._uids = uids
        self.deaf = False
        self._missed: list[tuple[str, Any]] = []
        self._ended = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="hub")
        self._open = threading.Event()
        self._thread.start()
        assert self._open.wait(10)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._hub: ZmqHub[Any, ToScheduler] = ZmqHub(
            self.endpoint, read_to_scheduler(), self._on_messages, print, self._uids
        )
        if self.records:
            self.decide(Restored(tuple(self.records.values())))
        self._open.set()
        while not self._stop.is_set():
            self.decide(LendingTick())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), TICK_S)
        self._hub.close()

    def _on_messages(self, peer: str, messages: list[Any]) -> None:
        for message in messages:
            self.received.append((peer, message))
            if self.deaf:
                self._missed.append((peer, message))
            else:
                self.decide(FromPartyLink(peer, message))

    def decide(self, event: Any) -> None:
        for command in self.core.handle(time.monotonic(), event):
            match command:
                case Tell(peer, message) if peer == "test":
                    self.answers.append(message)
                case Tell(peer, message):
                    self._hub.send(peer, message)
                case Keep(record):
                    self.records[record.id] = record
                case Forget(number):
                    self.records.pop(number, None)
                case _:
                    pass
        self.core.check()

    # For tests -------------------------------------------------------------------------------------------------------

    def call(self, function: Callable[[], Any]) -> Any:
        """Runs it in the hub's loop."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    def status(self) -> LendingStatus:
        def ask() -> LendingStatus:
            self.decide(Wish("test", AskLending(0, "")))
            answer = self.answers.pop()
            assert isinstance(answer, LendingStatus)
            return answer

        found: LendingStatus = self.call(ask)
        return found

    def revoke(self, lease: int, deadline_s: float = 5.0) -> None:
        self.call(lambda: self.decide(Wish("test", RevokeLease(0, lease, "", deadline_s))))

    def reclaim(self, gpu: int, size: int, deadline_s: float = 5.0) -> None:
        self.call(lambda: self.decide(Wish("test", ReclaimGpu(0, gpu, "", size, deadline_s))))

    def until(self, condition: Callable[[LendingStatus], object], timeout_s: float = 10.0) -> LendingStatus:
        return until(self.status, condition, timeout_s)

    def lose(self, party: str) -> None:
        """As if the party had been silent for too long. In the hub's loop."""
        self.decide(PartyGone(party, "planted"))

    def listen_again(self) -> None:
        """After having been deaf: what was said meanwhile is heard now, as after a SIGSTOP."""

        def catch_up() -> None:
            self.deaf = False
            missed, self._missed = self._missed, []
            for peer, message in missed:
                self.decide(FromPartyLink(peer, message))

        self.call(catch_up)

    def until_heard(self, kind: type, timeout_s: float = 10.0) -> None:
        until(lambda: [message for _, message in self.received if isinstance(message, kind)], len, timeout_s)

    def complaints(self) -> list[str]:
        return [message.reason for _, message in self.received if isinstance(message, Complain)]

    def stop(self) -> tuple[Record, ...]:
        """Ends it without a word to anybody; returns what it kept."""
        if not self._ended.is_set():
            self._ended.set()
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(10)
        return tuple(self.records.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
        if self._own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)


def until(look: Callable[[], Any], condition: Callable[[Any], object], timeout_s: float = 10.0) -> Any:
    """What a look finds once it satisfies the condition."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while True:
        found = look()
        if condition(found):
            return found
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {found}"
        pause.wait(0.005)

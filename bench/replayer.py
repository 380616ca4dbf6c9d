"""Open-loop replay: every request leaves at its arrival time, whether or not earlier ones have finished."""

import asyncio
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from forebay.bench.client import Completions, Outcome
from forebay.bench.errors import BenchError
from forebay.bench.report import Ending
from forebay.bench.workload_file import Workload

SPARE_DESCRIPTORS = 64
"""For everything that is not a request's connection."""

DRAIN_AFTER_LOSS_S = 10.0
"""How long requests in flight may still report after the server was found gone."""


@dataclass(frozen=True)
class Counts:
    """A moment of the replay, in requests."""

    total: int
    sent: int
    running: int
    done: int
    failed: int

    def __str__(self) -> str:
        return f"{self.sent}/{self.total} sent, {self.running} running, {self.done} done, {self.failed} failed"


@dataclass(frozen=True)
class Run:
    """A replay that ended: one outcome for each request of the workload, whatever happened. `begin` is when it began,
    in seconds of time.perf_counter."""

    outcomes: list[Outcome]
    begin: float
    duration_s: float
    ended: Ending


def reserve_descriptors(requests: int) -> None:
    """Raises the limit of open files as far as allowed. Raises BenchError if that would not do for `requests`
    connections at once, the worst case of a replay."""
    needed = requests + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise BenchError(
            f"open files: {requests} requests may be in flight at once and need {needed} descriptors, the hard limit "
            f"is {hard}: raise it (ulimit -Hn), or replay part of the workload with --max-requests "
            f"{max(hard - SPARE_DESCRIPTORS, 0)}"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else hard, hard))


@dataclass
class Replayer:
    """Replays one workload once. Setting `stop` ends it early: what is in flight is cut off, and what was not sent
    yet never will be; both count as failed."""

    client: Completions
    workload: Workload
    time_scale: float
    stop: asyncio.Event
    report: Callable[[Counts], None]
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _attention: asyncio.Event = field(default_factory=asyncio.Event)
    _sent: int = 0
    _done: int = 0
    _failed: int = 0
    _never_sent: int = 0
    _server_lost: bool = False
    _checking: bool = False

    async def run(self) -> Run:
        # A little ahead, so that the first request is not late by the making of the list.
        begin = time.perf_counter() + 0.1
        outcomes = [
            Outcome(
                request.model_name,
                request.prompt_tokens,
                request.output_tokens,
                scheduled=begin + arrival * self.time_scale,
            )
            for arrival, request in zip(self.workload.arrivals, self.workload.requests, strict=True)
        ]
        watcher = asyncio.create_task(self._watch_stop())
        try:
            await self._send_all(outcomes)
            await self._drain()
        finally:
            tasks = [watcher, *self._tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        duration_s = max(time.perf_counter() - begin, 0.0)
        ended: Ending = "complete"
        if self.stop.is_set():
            ended = "interrupted"
        elif self._server_lost:
            ended = "server_lost"
        for outcome in outcomes:
            if outcome.sent is None:
                outcome.fail("not_sent", f"the replay ended before its turn ({ended})")
                self._never_sent += 1
        self._tell()
        return Run(outcomes, begin, duration_s, ended)

    @property
    def _ending(self) -> bool:
        return self._server_lost or self.stop.is_set()

    async def _send_all(self, outcomes: list[Outcome]) -> None:
        for outcome, request in zip(outcomes, self.workload.requests, strict=True):
            while not self._ending and (left := outcome.scheduled - time.perf_counter()) > 0:
                await self._pause(left)
            if self._ending:
                return
            task = asyncio.create_task(self._send(outcome, request.prompt))
            self._tasks.add(task)
            task.add_done_callback(self._forget)

    async def _drain(self) -> None:
        """Waits for the requests in flight, but not for ever once the replay is to end early."""
        while self._tasks and not self._ending:
            await self._pause(1.0)
        if self._tasks and not self.stop.is_set():
            await asyncio.wait(self._tasks, timeout=DRAIN_AFTER_LOSS_S)

    async def _pause(self, seconds: float) -> None:
        """Until something asks for attention. At most a second, so that the display moves on in quiet stretches."""
        self._tell()
        with suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, 1.0)):
                await self._attention.wait()
        self._attention.clear()

    async def _send(self, outcome: Outcome, prompt: list[int]) -> None:
        self._sent += 1
        try:
            await self.client.complete(outcome, prompt)
        except asyncio.CancelledError:
            outcome.fail("interrupted", "cut off by the end of the replay")
            raise
        finally:
            if outcome.failure is None:
                self._done += 1
            else:
                self._failed += 1
        if outcome.failure in ("connect", "truncated"):
            await self._check_server()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._attention.set()

    async def _check_server(self) -> None:
        """A broken connection may be one request's bad luck, or the end of the server."""
        if self._checking or self._ending:
            return
        self._checking = True
        self._server_lost = not await self.client.is_listening()
        self._checking = False
        if self._server_lost:
            self._attention.set()

    async def _watch_stop(self) -> None:
        await self.stop.wait()
        self._attention.set()

    def _tell(self) -> None:
        running = self._sent - self._done - self._failed
        failed = self._failed + self._never_sent
        self.report(Counts(len(self.workload.requests), self._sent, running, self._done, failed))

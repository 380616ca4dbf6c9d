"""The worker process: carries messages to the lane core, its commands to the model runners, and tokens to front doors.

The event loop has this thread; model work runs in the device's own. Nothing here waits for a step.
"""

import asyncio
import os
import secrets
import socket
from concurrent.futures import Future
from pathlib import Path
from typing import Any, assert_never

from forebay.gpu.device import parse_device
from forebay.gpu.errors import DeviceError, DeviceLost, StepError
from forebay.runtime import logs, mps
from forebay.runtime.child import EXIT_BROKEN, EXIT_UNUSABLE, end_with_parent, exit_soon
from forebay.runtime.loop import Failure, on_signals, run
from forebay.runtime.mps import MpsError
from forebay.runtime.step_trace import StepTrace
from forebay.runtime.worker_device import WorkerDevice, open_worker_device
from forebay.runtime.worker_feeds import Feeds
from forebay.sched.lane_events import (
    Deliver,
    DropSlabs,
    FillSlabs,
    LaneEvent,
    LendSlabs,
    Report,
    Reset,
    SpillFreed,
    TakeBackSlabs,
    Tick,
    WantSpill,
)
from forebay.transport.addresses import RefusedAddress
from forebay.transport.codec import read_to_worker
from forebay.transport.messages import (
    PROTOCOL_VERSION,
    Cancel,
    CloseSequence,
    CopyBlocks,
    DeviceSettings,
    EvictWeights,
    Heartbeat,
    Join,
    Leave,
    Load,
    OpenSequence,
    Refused,
    Rejoin,
    RestoreWeights,
    Start,
    StepDone,
    StepFailed,
    StepPlan,
    Stop,
    ToScheduler,
    ToWorker,
    Welcome,
)
from forebay.transport.session import Session
from forebay.transport.zeromq import ZmqLink

WAITING_HEARTBEAT_S = 1.0
"""How often a worker says that it lives before a scheduler has told it how often."""

PATIENCE_S = 5.0
"""How long it waits for a scheduler before it says so."""


def work(gpu: str, scheduler: str, journal: Path | None, parent: int | None, trace: Path | None = None) -> int:
    """Runs a worker until it is stopped; returns the exit status."""
    if parent is not None:
        end_with_parent(parent)
    log = logs.set_up(f"worker {gpu}")
    try:
        parse_device(gpu)
        return run(WorkerProcess(gpu, scheduler, journal, parent is not None, log, trace).run())
    except (DeviceError, RefusedAddress) as error:
        log.error("this worker cannot work", error=str(error))
        return EXIT_UNUSABLE


class WorkerProcess:
    def __init__(
        self, gpu: str, scheduler: str, journal: Path | None, supervised: bool, log: Any, trace: Path | None = None
    ) -> None:
        self._gpu = gpu
        self._scheduler = scheduler
        self._journal = journal
        self._supervised = supervised
        self._log = log
        self._trace = None if trace is None else StepTrace(trace, gpu)
        self._broken = False
        self._id = f"{gpu}-{os.getpid()}-{secrets.token_hex(2)}"
        self._heartbeat_s = WAITING_HEARTBEAT_S
        self._session = Session()
        self._opened: WorkerDevice | None = None
        self._loader: asyncio.Task[None] | None = None
        self._unopened: dict[int, str] = {}  # sequences that the runner refused
        self._feeds = Feeds(log)
        self._exit: asyncio.Future[int]

    async def run(self) -> int:
        self._loop = asyncio.get_running_loop()
        self._failure = Failure()
        self._exit = self._loop.create_future()
        on_signals(self._on_signal)
        self._link: ZmqLink[ToScheduler, ToWorker] = ZmqLink(
            self._scheduler, self._id, read_to_worker(), self._on_messages, self._on_unreadable
        )
        self._log.info("joining", scheduler=self._scheduler, id=self._id)
        self._join()
        self._beat()
        self._loop.call_later(PATIENCE_S, self._complain)
        try:
            return await self._failure.or_done(self._exit)
        finally:
            if self._loader is not None:
                self._loader.cancel()
                await asyncio.gather(self._loader, return_exceptions=True)
            self._link.close()
            self._feeds.close()
            if self._opened is not None:
                self._opened.core.close()
            if self._trace is not None:
                self._trace.close()
            if self._opened is not None and not self._broken:
                await self._opened.close()

    def _on_signal(self) -> None:
        # A service manager signals all processes at once; the scheduler drains first, and then says Stop.
        if not self._supervised:
            self._end(0, "it was told to end by a signal")

    def _end(self, status: int, reason: str) -> None:
        if not self._exit.done():
            self._link.send(Leave(reason))
            self._exit.set_result(status)

    # The scheduler -------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        self._link.send(Join(PROTOCOL_VERSION, self._session.renew(), self._gpu, os.getpid(), socket.gethostname()))

    def _complain(self) -> None:
        """Somebody who started it by hand wants to know why nothing happens."""
        if not self._session.welcomed and not self._exit.done():
            self._log.warning("no scheduler has answered yet; waiting for one", scheduler=self._scheduler)

    def _break_down(self, error: DeviceError, **where: int) -> None:
        """The device is beyond repair, for this process: another one takes over, and requests go on there. Nothing is
        closed any more, for that might wait for ever for work that will never end."""
        if self._exit.done():
            return
        self._log.error("the device broke down; this worker ends", error=str(error), **where)
        self._broken = True
        self._end(EXIT_BROKEN, f"{error}{mps.explain()}")
        exit_soon(EXIT_BROKEN)

    def _beat(self) -> None:
        # Also before the welcome: a scheduler that came up later answers it with Rejoin.
        self._link.send(Heartbeat())
        if self._trace is not None:
            self._trace.flush()
        if (opened := self._opened) is not None:
            opened.core.flush()
            # A model that is being loaded may use the beginning of the pool, and nobody knows yet how much of it.
            if not opened.models.loading:
                opened.memory.neighbour.look()
            if opened.ticks:
                self._decide(Tick())
        self._loop.call_later(self._heartbeat_s, self._beat)

    def _on_unreadable(self, peer: str, error: Exception) -> None:
        self._log.error("an unreadable frame", error=str(error))
        self._end(EXIT_UNUSABLE, str(error))

    def _on_messages(self, messages: list[ToWorker]) -> None:
        for message in filter(self._session.admits, messages):
            if self._exit.done():
                return  # it ends: what follows in the frame is not for it any more
            match message:
                case Start() | Cancel():
                    self._decide(message)
                case Welcome(heartbeat_s=heartbeat_s, settings=settings):
                    self._welcome(heartbeat_s, settings)
                case Load(model):
                    assert self._opened is not None, "models are loaded after the welcome"
                    self._opened.models.want(model)
                case Rejoin(reason):
                    self._log.warning("joining anew; all requests are dropped", reason=reason)
                    if self._opened is not None:
                        self._opened.models.forget_wishes()
                        self._decide(Reset(reason))
                    self._join()
                case Refused(reason):
                    self._log.error("the scheduler refused this worker", reason=reason)
                    self._end(EXIT_UNUSABLE, reason)
                case Stop(reason):
                    self._log.info("stopping", reason=reason)
                    self._end(0, reason)
                case Heartbeat():
                    pass
                case _:
                    assert_never(message)

    def _welcome(self, heartbeat_s: float, settings: DeviceSettings | None) -> None:
        self._heartbeat_s = heartbeat_s
        if settings is None:
            self._log.info("joined; the configuration does not name this device, so there is nothing to load")
            return
        if self._opened is not None and self._opened.settings != settings:
            reason = (
                f"{self._gpu} is open with {self._opened.settings}, the scheduler now wants {settings}: start it again"
            )
            self._log.error("the configuration changed", reason=reason)
            return self._end(EXIT_UNUSABLE, reason)
        if self._opened is None:
            try:
                self._opened = open_worker_device(
                    self._gpu,
                    self._scheduler,
                    self._journal,
                    settings,
                    self._decide,
                    self._link.send,
                    self._break_down,
                    self._log,
                )
            except (DeviceError, MpsError, OSError, ValueError) as error:
                reason = str(error) if isinstance(error, MpsError) else f"{error}{mps.explain()}"
                self._log.error("the device cannot be opened", gpu=self._gpu, error=reason)
                return self._end(EXIT_UNUSABLE, reason)
            self._loader = asyncio.create_task(self._opened.models.run(), name="load models")
            self._loader.add_done_callback(self._loader_ended)
        self._log.info("joined", memory=self._opened.device.pool.capacity, threads=settings.threads)

    def _loader_ended(self, loader: "asyncio.Task[None]") -> None:
        if loader.cancelled() or (error := loader.exception()) is None:
            return
        if isinstance(error, DeviceLost):
            self._break_down(error)
        else:
            self._failure.set(error)

    # Steps ---------------------------------------------------------------------------------------------------------

    def _decide(self, event: LaneEvent) -> None:
        assert self._opened is not None, "requests come after the welcome"
        memory, models = self._opened.memory, self._opened.models
        if self._exit.done():
            return
        now = self._loop.time()
        if self._trace is not None:
            self._trace.event(now, event)
        for command in self._opened.core.handle(now, event):
            if self._trace is not None:
                self._trace.command(now, command)
            match command:
                case StepPlan():
                    self._launch(command)
                case Deliver(sink, messages):
                    self._feeds.deliver(sink, messages)
                case Report(message):
                    self._link.send(message)
                case OpenSequence():
                    self._open(command)
                case CopyBlocks():
                    memory.copy(command)
                case WantSpill():
                    memory.want(command)
                case SpillFreed():
                    memory.free(command)
                case LendSlabs():
                    memory.lend(command)
                case TakeBackSlabs():
                    memory.take_back(command)
                case DropSlabs():
                    memory.neighbour.drop(command)
                case FillSlabs():
                    memory.neighbour.fill(command)
                case EvictWeights() | RestoreWeights():
                    assert self._opened.weights is not None
                    self._opened.weights.move(command)
                case CloseSequence():
                    if self._unopened.pop(command.sequence, None) is None:
                        models.runners[command.model].close(command)
                case _:
                    assert_never(command)

    def _open(self, command: OpenSequence) -> None:
        assert self._opened is not None
        try:
            self._opened.models.runners[command.model].open(command)
        except StepError as error:  # what no front door of ours would send
            self._log.error("a sequence cannot be opened", model=command.model, error=str(error))
            self._unopened[command.sequence] = str(error)

    def _launch(self, plan: StepPlan) -> None:
        for work in plan.work:
            if (reason := self._unopened.get(work.sequence)) is not None:
                self._loop.call_soon(self._decide, StepFailed(plan.step, reason))
                return
        assert self._opened is not None
        self._opened.models.runners[plan.model].launch(plan).add_done_callback(
            lambda future: self._loop.call_soon_threadsafe(self._landed, plan.step, future)
        )

    def _landed(self, step: int, future: "Future[StepDone]") -> None:
        if self._exit.done():
            return
        error = future.exception()
        if error is None:
            self._decide(future.result())
        elif isinstance(error, DeviceError):
            self._break_down(error, step=step)
        else:
            self._log.error("a step failed", step=step, error=repr(error), exc_info=error)
            self._decide(StepFailed(step, str(error) or repr(error)))

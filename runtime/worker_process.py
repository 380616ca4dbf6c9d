"""The worker process: carries messages to the lane core, its commands to the model runners, and tokens to front doors.

The event loop has this thread; model work runs in the device's own. Nothing here waits for a step.
"""

import asyncio
import os
import secrets
import socket
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, assert_never

from forebay.gpu.device import Device, open_device, parse_device
from forebay.gpu.errors import DeviceError, ModelLoadError, StepError
from forebay.gpu.movable import MovableRunner
from forebay.gpu.runner import Runner
from forebay.runtime import logs, mps
from forebay.runtime.child import EXIT_BROKEN, EXIT_UNUSABLE, end_with_parent, exit_soon
from forebay.runtime.keyring import CREDENTIAL_VARIABLE
from forebay.runtime.loop import Failure, on_signals, run
from forebay.runtime.recording import Header, Recorder, make_lane_core
from forebay.runtime.step_trace import StepTrace
from forebay.runtime.worker_feeds import Feeds
from forebay.runtime.worker_memory import WorkerMemory, lane_settings
from forebay.runtime.worker_weights import WeightMover
from forebay.sched.lane_events import (
    Deliver,
    LaneCommand,
    LaneEvent,
    LendSlabs,
    ModelOpened,
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
    ModelFailed,
    ModelReady,
    ModelSpec,
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
        self._cost_models: set[str] = set()
        self._id = f"{gpu}-{os.getpid()}-{secrets.token_hex(2)}"
        self._heartbeat_s = WAITING_HEARTBEAT_S
        self._session = Session()
        self._settings: DeviceSettings | None = None
        self._device: Device | None = None
        self._memory: WorkerMemory | None = None
        self._core: Recorder[LaneEvent, LaneCommand] | None = None
        self._weights: WeightMover | None = None
        self._runners: dict[str, Runner] = {}
        self._wanted: set[str] = set()  # models that the present session asked for and has not been answered about
        self._unopened: dict[int, str] = {}  # sequences that the runner refused
        self._feeds = Feeds(log)
        self._to_load: asyncio.Queue[ModelSpec] = asyncio.Queue()
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
        loader = asyncio.create_task(self._load_models(), name="load models")
        loader.add_done_callback(self._loader_ended)
        try:
            return await self._failure.or_done(self._exit)
        finally:
            loader.cancel()
            await asyncio.gather(loader, return_exceptions=True)
            self._link.close()
            self._feeds.close()
            if self._core is not None:
                self._core.close()
            if self._trace is not None:
                self._trace.close()
            if not self._broken:
                await self._close_device()

    async def _close_device(self) -> None:
        if self._weights is not None:
            await asyncio.to_thread(self._weights.close)
        if self._memory is not None:
            await asyncio.to_thread(self._memory.close)
        if self._device is not None:
            self._device.close()
        if self._weights is not None:
            await asyncio.to_thread(self._weights.give_back)

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

    def _break_down(self, reason: str) -> None:
        """The device is beyond repair, for this process: another one takes over, and requests go on there. Nothing is
        closed any more, for that might wait for ever for work that will never end."""
        self._broken = True
        self._end(EXIT_BROKEN, reason)
        exit_soon(EXIT_BROKEN)

    def _beat(self) -> None:
        # Also before the welcome: a scheduler that came up later answers it with Rejoin.
        self._link.send(Heartbeat())
        if self._core is not None:
            self._core.flush()
        if self._trace is not None:
            self._trace.flush()
        if self._memory is not None and (self._memory.ticks or self._weights is not None):
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
                    self._load(model)
                case Rejoin(reason):
                    self._log.warning("joining anew; all requests are dropped", reason=reason)
                    self._wanted.clear()
                    if self._core is not None:
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
        if self._settings is not None and self._settings != settings:
            reason = f"{self._gpu} is open with {self._settings}, the scheduler now wants {settings}: start it again"
            self._log.error("the configuration changed", reason=reason)
            return self._end(EXIT_UNUSABLE, reason)
        if self._device is None:
            try:
                self._device, self._memory, self._core = self._open_device(settings)
                if settings.weights_memory:
                    credential = os.environ.get(CREDENTIAL_VARIABLE, "")
                    self._weights = WeightMover(
                        self._device, settings, self._scheduler, credential, self._decide, self._log
                    )
            except (DeviceError, OSError, ValueError) as error:
                reason = f"{error}{mps.explain()}"
                self._log.error("the device cannot be opened", gpu=self._gpu, error=reason)
                return self._end(EXIT_UNUSABLE, reason)
            self._settings = settings
        self._log.info("joined", memory=self._device.pool.capacity, threads=settings.threads)

    def _open_device(self, settings: DeviceSettings) -> tuple[Device, WorkerMemory, Recorder[LaneEvent, LaneCommand]]:
        """The device, the memory around it, and the core that decides for it. Raises DeviceError, OSError, ValueError
        (settings that no core can have)."""
        with ExitStack() as undo:
            device = open_device(self._gpu, settings)
            undo.callback(device.close)
            lane = lane_settings(settings, divisible=device.name.kind == "cuda")
            self._cost_models = {row.model for row in lane.costs}
            core = make_lane_core(lane)
            credential = os.environ.get(CREDENTIAL_VARIABLE, "")
            memory = WorkerMemory(self._gpu, self._scheduler, device, settings, credential, self._decide, self._log)
            undo.callback(memory.close)
            header = Header(PROTOCOL_VERSION, f"lane-{self._gpu}-{os.getpid()}", lane)
            recorder = Recorder(core, header, self._journal)
            undo.pop_all()
            return device, memory, recorder

    # Models --------------------------------------------------------------------------------------------------------

    def _load(self, spec: ModelSpec) -> None:
        runner = self._runners.get(spec.name)
        if runner is not None and runner.spec != spec:
            reason = f"this worker holds {runner.spec}, not {spec}; start it again"
            self._link.send(ModelFailed(spec.name, reason))
            return
        self._wanted.add(spec.name)
        if runner is None:
            self._to_load.put_nowait(spec)
        else:
            self._answer(runner)

    def _answer(self, runner: Runner) -> None:
        """Says that a model is ready, once, and only to the session that asked for it."""
        name = runner.spec.name
        if name in self._wanted:
            self._wanted.remove(name)
            self._link.send(ModelReady(name, runner.max_context, runner.blocks, runner.block_bytes))

    async def _load_models(self) -> None:
        while True:
            spec = await self._to_load.get()
            if spec.name not in self._runners and spec.name in self._wanted:
                assert self._device is not None, "models are loaded after the welcome"
                self._log.info("loading", model=spec.name, path=spec.path, dtype=spec.dtype)
                try:
                    # Where weights come and go, those of this model come when the core says so.
                    load = self._device.load if self._weights is None else self._device.introduce
                    runner: Runner = await asyncio.to_thread(load, spec)
                except ModelLoadError as error:
                    self._log.error("a model could not be loaded", model=spec.name, error=str(error))
                    if spec.name in self._wanted:
                        self._wanted.remove(spec.name)
                        self._link.send(ModelFailed(spec.name, str(error)))
                    continue
                self._runners[spec.name] = runner
                assert self._memory is not None
                self._memory.open_model(spec.name, runner.block_bytes)
                opened = ModelOpened(
                    spec.name,
                    runner.block_bytes,
                    spec.max_sequences,
                    spec.step_tokens,
                    spec.popularity,
                    cost_name="" if spec.name in self._cost_models else Path(spec.path).name,
                    weight_bytes=runner.weight_bytes if isinstance(runner, MovableRunner) else 0,
                )
                self._decide(opened)
            if (loaded := self._runners.get(spec.name)) is not None:
                self._answer(loaded)

    def _loader_ended(self, loader: "asyncio.Task[None]") -> None:
        if not loader.cancelled() and (error := loader.exception()) is not None:
            self._failure.set(error)

    # Steps ---------------------------------------------------------------------------------------------------------

    def _decide(self, event: LaneEvent) -> None:
        assert self._core is not None, "requests come after the welcome"
        assert self._memory is not None
        if self._exit.done():
            return
        now = self._loop.time()
        if self._trace is not None:
            self._trace.event(now, event)
        for command in self._core.handle(now, event):
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
                    self._memory.copy(command)
                case WantSpill():
                    self._memory.want(command)
                case SpillFreed():
                    self._memory.free(command)
                case LendSlabs():
                    self._memory.lend(command)
                case TakeBackSlabs():
                    self._memory.take_back(command)
                case EvictWeights() | RestoreWeights():
                    assert self._weights is not None
                    self._weights.move(command)
                case CloseSequence():
                    if self._unopened.pop(command.sequence, None) is None:
                        self._runners[command.model].close(command)
                case _:
                    assert_never(command)

    def _open(self, command: OpenSequence) -> None:
        try:
            self._runners[command.model].open(command)
        except StepError as error:  # what no front door of ours would send
            self._log.error("a sequence cannot be opened", model=command.model, error=str(error))
            self._unopened[command.sequence] = str(error)

    def _launch(self, plan: StepPlan) -> None:
        for work in plan.work:
            if (reason := self._unopened.get(work.sequence)) is not None:
                self._loop.call_soon(self._decide, StepFailed(plan.step, reason))
                return
        self._runners[plan.model].launch(plan).add_done_callback(
            lambda future: self._loop.call_soon_threadsafe(self._landed, plan.step, future)
        )

    def _landed(self, step: int, future: "Future[StepDone]") -> None:
        if self._exit.done():
            return
        error = future.exception()
        if error is None:
            self._decide(future.result())
        elif isinstance(error, DeviceError):
            self._log.error("the device broke down; this worker ends", step=step, error=str(error))
            self._break_down(f"{error}{mps.explain()}")
        else:
            self._log.error("a step failed", step=step, error=repr(error), exc_info=error)
            self._decide(StepFailed(step, str(error) or repr(error)))

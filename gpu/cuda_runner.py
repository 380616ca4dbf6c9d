"""Runs the steps of one model on a CUDA device: a Runner whose lanes overlap, and whose steps overlap with the host.

The host knows a token once its step has landed; a step that is launched before takes it from the device.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import structlog
import torch

from forebay.gpu.cuda_graphs import Captures
from forebay.gpu.cuda_lane import CudaLane, Flight
from forebay.gpu.cuda_model import ModelOnDevice
from forebay.gpu.cuda_stepper import Drawn, Stepper
from forebay.gpu.errors import DeviceError, is_lack
from forebay.gpu.pool import KVShape
from forebay.gpu.sequences import OpenSequences, Sequence
from forebay.transport.messages.common import ModelSpec
from forebay.transport.messages.steps import CloseSequence, LaneKind, OpenSequence, StepDone, StepPlan

LANDING_S = 60.0
"""A step that needs a token which is late for so long is given up: the steps that draw it take milliseconds."""


LACKING_S = 10.0
"""So long a step waits for memory that the device lacks, beginning with pauses of FIRST_PAUSE_S. Memory that is on its
way (weights that leave, a lane's results, a neighbour's peak) comes within a second or two."""

FIRST_PAUSE_S = 0.02


class Lanes(Protocol):
    """CudaLanes: lanes by kind, and streams that are nobody else's."""

    def lane(self, kind: LaneKind, model: str) -> CudaLane: ...

    def stream(self, kind: LaneKind, share: int = 0) -> torch.cuda.Stream: ...

    def give_back(self, kind: LaneKind, stream: torch.cuda.Stream) -> None: ...


class CudaRunner:
    """`diagnose` makes of an error in a step what the step fails with (DeviceError where the device is lost); `landed`
    hears the seconds of each step."""

    def __init__(
        self,
        spec: ModelSpec,
        shape: KVShape,
        blocks: int,
        shared: ModelOnDevice,
        lanes: Lanes,
        diagnose: Callable[[BaseException], BaseException],
        landed: Callable[[float], None],
    ) -> None:
        self.spec = spec
        self.shape = shape
        self.block_bytes = shape.block_bytes
        self.blocks = blocks
        self.max_context = shared.max_context
        self._shared = shared
        self._lanes = lanes
        self._captured_on: list[tuple[LaneKind, torch.cuda.Stream]] = []
        self._diagnose = diagnose
        self._on_landed = landed
        self.host_seconds = 0.0
        """What bringing steps to the device has taken so far, in threads of the host; for benchmarks."""
        self.host_busy_seconds = 0.0
        """As far as these threads had a core meanwhile."""
        self._steppers: dict[LaneKind, Stepper] = {}
        self._sequences = OpenSequences(spec.name, shared.vocabulary, self.max_context, blocks)
        self._tokens_landed = threading.Condition()

    def prepare(self, kind: LaneKind) -> Stepper:
        """What steps of a lane need, graphs included. By the thread that loads the model, or the lane's."""
        if kind not in self._steppers:
            lane, shared = self._lanes.lane(kind, self.spec.name), self._shared
            captures = Captures.of(shared, kind)
            stepper = Stepper(shared, lane.floats(captures.float_bytes(shared)), captures)
            if shared.model.graphs:
                stream = self._lanes.stream(kind)
                self._captured_on.append((kind, stream))
                stepper.capture(stream)
            self._steppers[kind] = stepper
        return self._steppers[kind]

    def open(self, message: OpenSequence) -> None:
        self._sequences.open(message)

    def close(self, message: CloseSequence) -> None:
        self._sequences.close(message)

    def launch(self, plan: StepPlan) -> "Future[StepDone]":
        future: Future[StepDone] = Future()
        sequences = self._sequences.of(plan)
        drawing: list[Sequence] = []

        def start() -> Drawn | None:
            checked = self._sequences.check(plan, sequences)
            for work, sequence in zip(plan.work, checked, strict=True):
                if work.start + work.count - sequence.landed > 1:
                    self._await_tokens(sequence, work.start + work.count - 1)
            begin, begin_busy = time.perf_counter(), time.thread_time()
            drawn = self._run(plan, checked)
            self.host_seconds += time.perf_counter() - begin
            self.host_busy_seconds += time.thread_time() - begin_busy
            if drawn is not None:
                drawing.extend(drawn.sequences)
            return drawn

        def land(drawn: Drawn | None, seconds: float) -> None:
            tokens, stopped = b"", b""
            if drawn is not None:
                tokens, stopped = drawn.tokens.astype("<u4").tobytes(), drawn.stopped.tobytes()
                self._add_tokens(drawn.sequences, drawn.tokens.tolist())
            self._on_landed(seconds)
            future.set_result(StepDone(plan.step, tokens, stopped, seconds))

        def fail(error: BaseException) -> None:
            # The sequences are lost, but steps that wait for their tokens must not wait for ever.
            self._add_tokens(drawing, [0] * len(drawing))
            future.set_exception(self._diagnose(error))

        self._lanes.lane(plan.lane, self.spec.name).launch(Flight(start, land, fail, plan.share))
        return future

    def _run(self, plan: StepPlan, sequences: list[Sequence]) -> Drawn | None:
        """Waits where the device lacks memory, and with this step all that come after it in the lane: what other lanes
        and other processes give back is used at once. Nothing that a step does before it has its memory is amiss when
        it is done again. In vain it fails as any step does, and its requests with it."""
        until, pause = 0.0, FIRST_PAUSE_S
        while True:
            try:
                return self.prepare(plan.lane).run(plan.work, sequences, plan.share)
            except Exception as error:
                now = time.monotonic()
                if not is_lack(error) or (until and now >= until):
                    raise
                if not until:
                    until = now + LACKING_S
                    structlog.get_logger().warning(
                        "a step waits for memory of the device", model=self.spec.name, at_most_s=LACKING_S,
                        error=str(error),
                    )  # fmt: skip
            torch.cuda.current_stream(self._shared.last_tokens.values.device).synchronize()
            if plan.lane in self._steppers:
                self._steppers[plan.lane].forget_rows()
            time.sleep(pause)
            pause = min(1.0, 2 * pause)

    def _add_tokens(self, sequences: list[Sequence], tokens: list[int]) -> None:
        with self._tokens_landed:
            for sequence, token in zip(sequences, tokens, strict=True):
                sequence.land(token)
            self._tokens_landed.notify_all()

    def _await_tokens(self, sequence: Sequence, needed: int) -> None:
        """Until the host knows so many tokens: of those in flight the device has only the last."""
        with self._tokens_landed:
            if not self._tokens_landed.wait_for(lambda: sequence.landed >= needed, LANDING_S):
                raise DeviceError(
                    f"a step of model {self.spec.name!r} waited {LANDING_S:g} s for tokens that steps before it draw"
                )

    def forget(self) -> None:
        """Drops every sequence, and what the steps needed. For the device, when no step is in flight."""
        self._sequences.clear()
        self._steppers.clear()
        while self._captured_on:
            self._lanes.give_back(*self._captured_on.pop())

"""A worker's loop without its processes and sockets: the lane core decides, a runner works, one step ahead."""

import queue
import time
from array import array
from concurrent.futures import Future
from dataclasses import dataclass, field

from forebay.gpu.runner import Runner
from forebay.sched.blocks import BlockPool
from forebay.sched.lane import LaneCore
from forebay.sched.lane_events import Deliver, LaneEvent, ModelOpened
from forebay.sched.partition import make_partition
from forebay.sched.policy import AdaptiveBatching
from forebay.transport.messages import CloseSequence, OpenSequence, Sampling, Start, StepDone, StepPlan, Tokens


@dataclass(frozen=True)
class Timing:
    """Seconds until every sequence had its first token, and from there to the end; `start_s` until the engine was
    there, where that is known."""

    prefill_s: float
    decode_s: float
    start_s: float = 0.0


@dataclass(frozen=True)
class StepRecord:
    """A step that landed: how many sequences took one token in it, how many tokens of prompts it computed, how many
    tokens its sequences had in the end, how long it took on the device, and how long after the one before it landed, in
    seconds."""

    decodes: int
    prompt_tokens: int
    context_tokens: int
    device_s: float
    period_s: float


@dataclass
class _Flight:
    decodes: int
    prompt_tokens: int
    context_tokens: int
    future: "Future[StepDone]" = field(repr=False)


class Engine:
    """One model on one device whose pool has `slabs` slabs of `slab_bytes`. `steps` are those of the last run, and
    `core_s` what the lane core took for them."""

    def __init__(self, runner: Runner, slabs: int, slab_bytes: int, partition: str = "none") -> None:
        self._runner = runner
        pool = BlockPool(slabs, slab_bytes)
        self._core = LaneCore(pool, AdaptiveBatching(), prefix_cache=False, partition=make_partition(partition))
        self._landed: queue.SimpleQueue[_Flight] = queue.SimpleQueue()
        self._flying = 0
        self._begun: set[int] = set()
        self.steps: list[StepRecord] = []
        self.core_s = 0.0
        spec = runner.spec
        self._handle(ModelOpened(spec.name, runner.block_bytes, spec.max_sequences, spec.step_tokens))

    def _handle(self, event: LaneEvent) -> None:
        begin = time.perf_counter()
        commands = self._core.handle(time.monotonic(), event)
        self.core_s += time.perf_counter() - begin
        for command in commands:
            match command:
                case OpenSequence():
                    self._runner.open(command)
                case CloseSequence():
                    self._runner.close(command)
                case StepPlan():
                    self._launch(command)
                case Deliver(_, messages):
                    for message in messages:
                        if isinstance(message, Tokens):
                            self._begun.update(memoryview(message.requests).cast("Q"))
                case _:
                    pass

    def _launch(self, plan: StepPlan) -> None:
        self._flying += 1
        counts = [work.count for work in plan.work]
        decodes = sum(count == 1 for count in counts)
        context = sum(work.start + work.count for work in plan.work)
        flight = _Flight(decodes, sum(counts) - decodes, context, self._runner.launch(plan))
        flight.future.add_done_callback(lambda _: self._landed.put(flight))

    def run(self, prompts: list[list[int]], output: int, first_request: int) -> Timing:
        """All prompts at once, each to exactly `output` tokens."""
        self._begun = set()
        self.steps = []
        self.core_s = 0.0
        begin = last = time.perf_counter()
        tokens = 0
        first = 0.0
        for number, prompt in enumerate(prompts, start=first_request):
            sampling = Sampling(output, ignore_eos=True)
            model = self._runner.spec.name
            self._handle(Start(number, 0, model, array("I", prompt).tobytes(), len(prompt), sampling, ""))
        while self._flying:
            flight = self._landed.get()
            done = flight.future.result()
            now = time.perf_counter()
            self.steps.append(
                StepRecord(flight.decodes, flight.prompt_tokens, flight.context_tokens, done.seconds, now - last)
            )
            last = now
            self._flying -= 1
            tokens += len(done.stopped)
            self._handle(done)
            if not first and len(self._begun) == len(prompts):
                first = time.perf_counter() - begin
        assert tokens == len(prompts) * output
        return Timing(first, time.perf_counter() - begin - first)

"""A worker's loop for several models on one device, without its processes and sockets: a lane core decides, the runners
work, and whoever measures takes one landing after the other.
"""

import queue
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from forebay.bench.errors import BenchError
from forebay.gpu.runner import Runner
from forebay.runtime.step_trace import StepTrace
from forebay.sched.blocks import BlockPool
from forebay.sched.lane import LaneCore
from forebay.sched.lane_events import Deliver, LaneEvent, ModelOpened
from forebay.sched.partition import Partition
from forebay.sched.policy import AdaptiveBatching
from forebay.transport.messages import (
    Cancel,
    CloseSequence,
    Finished,
    OpenSequence,
    Sampling,
    Start,
    StepDone,
    StepPlan,
    Tokens,
)

LANDING_S = 120.0
"""A step that has not landed by then never will."""


@dataclass(frozen=True)
class Landed:
    """A step that landed. `at` is when the core had handed its tokens on, in seconds of time.perf_counter; `drew` are
    the requests that got a token."""

    plan: StepPlan
    done: StepDone
    at: float
    drew: tuple[int, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(work.count for work in self.plan.work if work.count > 1 or not work.sample)


class Loop:
    """`runners` by the name of their model; their pool has `slabs` slabs of `slab_bytes`. `cost_name`: what the
    partition's cost table calls the models. Raises BenchError where a request fails."""

    def __init__(
        self,
        runners: Mapping[str, Runner],
        slabs: int,
        slab_bytes: int,
        partition: Partition,
        cost_name: str = "",
        trace: StepTrace | None = None,
    ) -> None:
        self._runners = runners
        self._trace = trace
        self._core = LaneCore(BlockPool(slabs, slab_bytes), AdaptiveBatching(), prefix_cache=False, partition=partition)
        self._landed: queue.SimpleQueue[tuple[StepPlan, Future[StepDone]]] = queue.SimpleQueue()
        self._flying = 0
        self._requests = 0
        self._drew: list[int] = []
        self.living: set[int] = set()
        """Requests that have not ended."""
        for name, runner in runners.items():
            spec = runner.spec
            self._handle(
                ModelOpened(name, runner.block_bytes, spec.max_sequences, spec.step_tokens, cost_name=cost_name)
            )

    def start(self, model: str, prompt: Sequence[int], output: int) -> int:
        """The number of a request for exactly `output` tokens."""
        self._requests += 1
        number = self._requests
        self.living.add(number)
        tokens = array("I", prompt).tobytes()
        self._handle(Start(number, 0, model, tokens, len(prompt), Sampling(output, ignore_eos=True), ""))
        return number

    def step(self) -> Landed:
        """Waits for the next landing, and lets the core decide what comes next."""
        if not self._flying:
            raise BenchError(f"nothing is launched, though {len(self.living)} requests wait: the pool is too small")
        try:
            plan, future = self._landed.get(timeout=LANDING_S)
        except queue.Empty:
            raise BenchError(f"none of {self._flying} launched steps landed within {LANDING_S:g} s") from None
        self._flying -= 1
        done = future.result()
        self._drew = []
        self._handle(done)
        return Landed(plan, done, time.perf_counter(), tuple(self._drew))

    def finish(self, requests: Iterable[int]) -> None:
        """Until these have ended."""
        waited = set(requests)
        while waited & self.living:
            self.step()

    def cancel_all(self) -> None:
        """Ends every request, and waits for what is in flight."""
        for number in list(self.living):
            self._handle(Cancel(number, 0))
        while self._flying:
            self.step()
        self._core.check()

    def _handle(self, event: LaneEvent) -> None:
        now = time.monotonic()
        if self._trace is not None:
            self._trace.event(now, event)
        for command in self._core.handle(now, event):
            if self._trace is not None:
                self._trace.command(now, command)
            match command:
                case OpenSequence():
                    self._runners[command.model].open(command)
                case CloseSequence():
                    self._runners[command.model].close(command)
                case StepPlan():
                    self._launch(command)
                case Deliver(_, messages):
                    for message in messages:
                        self._deliver(message)
                case _:
                    pass

    def _launch(self, plan: StepPlan) -> None:
        self._flying += 1
        self._runners[plan.model].launch(plan).add_done_callback(lambda future: self._landed.put((plan, future)))

    def _deliver(self, message: object) -> None:
        if isinstance(message, Tokens):
            self._drew.extend(memoryview(message.requests).cast("Q"))
        elif isinstance(message, Finished):
            self.living.discard(message.request)
            if message.reason == "failed":
                raise BenchError(f"a request failed: {message.detail}")


@dataclass(frozen=True)
class Seen:
    """What a stretch of time showed, times in seconds. `gaps`: between two tokens of one answer, of all those asked
    for; `decodes`: what steps without tokens of prompts took on the device, of the model that answers; `prompt_tokens`
    were computed within `took`, in chunks of which `chunks` counts those of each share of the SMs (0: all, or along
    with decodes); `whole`: the stretch ended because everything was done."""

    gaps: list[float]
    decodes: list[float]
    prompt_tokens: int
    took: float
    chunks: Counter[int]
    whole: bool = True


class Watch:
    """Watches the answers of `requests`, each of which has a token already."""

    def __init__(self, loop: Loop, model: str, requests: Iterable[int], most: int) -> None:
        """`most`: so many tokens an answer may have more before a stretch is cut short."""
        self._loop = loop
        self._model = model
        self._last = dict.fromkeys(requests, time.perf_counter())
        self._left = dict.fromkeys(self._last, most)

    def tokens(self, count: int) -> Seen:
        """Until each answer has so many more."""
        target = {number: left - count for number, left in self._left.items()}
        return self._watch(lambda: all(self._left[number] <= target[number] for number in target), 0)

    def prompts(self, model: str, prompts: Iterable[Sequence[int]], reserve: int) -> Seen:
        """While another model reads these prompts one after the other, each for one token; cut short where an answer
        has only `reserve` tokens left."""
        remaining = iter(prompts)
        current = 0

        def done() -> bool:
            nonlocal current
            if current in self._loop.living:
                return False
            prompt = next(remaining, None)
            if prompt is None:
                return True
            current = self._loop.start(model, prompt, 1)
            return False

        return self._watch(done, reserve)

    def _watch(self, done: Callable[[], bool], reserve: int) -> Seen:
        begin = end = time.perf_counter()
        gaps: list[float] = []
        decodes: list[float] = []
        chunks: Counter[int] = Counter()
        prompt_tokens = 0
        while not (whole := done()) and min(self._left.values()) > reserve:
            landed = self._loop.step()
            end = landed.at
            for number in landed.drew:
                if number in self._last:
                    gaps.append(end - self._last[number])
                    self._last[number] = end
                    self._left[number] -= 1
            if landed.prompt_tokens:
                prompt_tokens += landed.prompt_tokens
                chunks[landed.plan.share] += 1
            elif landed.plan.model == self._model:
                decodes.append(landed.done.seconds)
        return Seen(gaps, decodes, prompt_tokens, end - begin, chunks, whole)

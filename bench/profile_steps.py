"""Steps made by hand, without a lane core: what one model's prefill and decode take on a real device."""

import random
import time
from array import array
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from forebay.bench.errors import BenchError
from forebay.transport.messages import (
    BLOCK_TOKENS,
    CloseSequence,
    LaneKind,
    ModelSpec,
    OpenSequence,
    Sampling,
    StepDone,
    StepPlan,
    Work,
)

IN_FLIGHT = 2
"""As many steps as the lane core keeps launched."""

WARM_UP_STEPS = 3
FEWEST_STEPS, MOST_STEPS = 4, 24
WANTED_S = 0.2
"""How long the decode steps of one setting should take together, for a mean that is worth something."""

EXTRA_TOKENS = 1 + WARM_UP_STEPS + MOST_STEPS
"""Room that a decode measurement needs behind its context."""

FRESH_TOKENS = 4096
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Took:
    """Seconds: of a prefill, or of one decode step. `wall_s` is from launch to landing, with the next steps launched
    meanwhile, so what a server sees; `device_s` what the device says it worked."""

    wall_s: float
    device_s: float


class StepDriver:
    """Drives one runner (a `forebay.gpu` Runner). `share` is the per cent of the SMs that its steps may use, 0 for no
    bound; `lanes`: prefill and decode go to lanes of their own. Prompts are of token ids below `vocabulary`."""

    def __init__(self, runner: Any, vocabulary: int, *, lanes: bool = False) -> None:
        self._runner = runner
        self._spec: ModelSpec = runner.spec
        self._lanes = lanes
        self._vocabulary = range(vocabulary)
        self._chance = random.Random(0)
        self._text = array("I")
        self._next_sequence = 1
        self._next_step = 1

    def prefill(self, batch: int, length: int, share: int = 0) -> Took:
        """`batch` prompts at once, packed into steps of the model's `step_tokens`, to their first tokens."""
        tables = self._tables(batch, length)
        numbers = [self._open(length) for _ in range(batch)]
        begin = time.perf_counter()
        device_s = self._run([self._plan(work, "prefill", share) for work in self._packed(numbers, tables, length)])
        took = Took(time.perf_counter() - begin, device_s)
        self._close(numbers)
        return took

    def decode(self, batch: int, context: int, share: int = 0) -> Took:
        """The mean step of `batch` sequences of `context` tokens. Their blocks hold what was computed there last (see
        `fill`), else zeros: that changes the text, not the work."""
        tables = self._tables(batch, context + EXTRA_TOKENS)
        numbers = [self._open(context) for _ in range(batch)]
        # The last known token of each as a chunk of a prefill: from then on the device knows the sequences' tokens.
        first = [
            Work(number, context - 1, 1, 0, table, sample=True) for number, table in zip(numbers, tables, strict=True)
        ]
        self._run([self._plan(tuple(first), "prefill", 0)])
        blocks = len(tables[0])
        done = 0

        def steps(count: int) -> list[StepPlan]:
            nonlocal done
            plans = [
                self._plan(
                    tuple(Work(number, context + done + i, 1, blocks, (), sample=True) for number in numbers),
                    "decode",
                    share,
                )
                for i in range(count)
            ]
            done += count
            return plans

        begin = time.perf_counter()
        self._run(steps(WARM_UP_STEPS))
        expected = (time.perf_counter() - begin) / WARM_UP_STEPS
        count = min(max(FEWEST_STEPS, round(WANTED_S / max(expected, 1e-6))), MOST_STEPS)
        plans = steps(count)
        begin = time.perf_counter()
        device_s = self._run(plans)
        took = Took((time.perf_counter() - begin) / count, device_s / count)
        self._close(numbers)
        return took

    def fill(self, tokens: int, seconds: float) -> int:
        """Computes keys and values into the first blocks of the pool, for `tokens` tokens or until `seconds` are over;
        how many blocks were filled. Zeros would take as long to read, but fewer bits would flip in the chip."""
        length = min(self._spec.step_tokens, self._runner.max_context) // BLOCK_TOKENS * BLOCK_TOKENS
        if not length:
            return 0
        deadline = time.perf_counter() + seconds
        each, filled = length // BLOCK_TOKENS, 0
        while (filled + each) * BLOCK_TOKENS <= tokens and time.perf_counter() < deadline:
            number = self._open(length)
            blocks = tuple(range(filled, filled + each))
            self._run([self._plan((Work(number, 0, length, 0, blocks, sample=False),), "prefill", 0)])
            self._close([number])
            filled += each
        return filled

    def _open(self, tokens: int) -> int:
        number = self._next_sequence
        self._next_sequence += 1
        while len(self._text) < tokens + FRESH_TOKENS:
            self._text.extend(self._chance.choices(self._vocabulary, k=FRESH_TOKENS))
        # Some stretch of the same text: drawing tokens anew would take longer than the steps.
        begin = self._chance.randrange(len(self._text) - tokens)
        known = self._text[begin : begin + tokens].tobytes()
        sampling = Sampling(EXTRA_TOKENS + 1, ignore_eos=True)
        self._runner.open(OpenSequence(number, self._spec.name, known, tokens, sampling))
        return number

    def _close(self, numbers: list[int]) -> None:
        for number in numbers:
            self._runner.close(CloseSequence(number, self._spec.name))

    @staticmethod
    def _tables(batch: int, tokens: int) -> list[tuple[int, ...]]:
        each = -(-tokens // BLOCK_TOKENS)
        return [tuple(range(place * each, (place + 1) * each)) for place in range(batch)]

    def _packed(self, numbers: list[int], tables: list[tuple[int, ...]], length: int) -> list[tuple[Work, ...]]:
        """Chunks of the prompts, one prompt after the other, in steps that are as full as they may be."""
        steps: list[tuple[Work, ...]] = []
        step: list[Work] = []
        room = self._spec.step_tokens
        for number, table in zip(numbers, tables, strict=True):
            start = 0
            while start < length:
                count = min(room, length - start)
                kept, blocks = (len(table), ()) if start else (0, table)
                step.append(Work(number, start, count, kept, blocks, sample=start + count == length))
                start += count
                room -= count
                if not room:
                    steps.append(tuple(step))
                    step, room = [], self._spec.step_tokens
        return [*steps, tuple(step)] if step else steps

    def _plan(self, work: tuple[Work, ...], lane: LaneKind, share: int) -> StepPlan:
        number = self._next_step
        self._next_step += 1
        return StepPlan(number, self._spec.name, work, lane if self._lanes else "mixed", share)

    def _run(self, plans: list[StepPlan]) -> float:
        """Launches the steps, IN_FLIGHT at a time; returns their seconds on the device once all have landed. Raises
        BenchError if one never lands, and what a step failed with."""
        flying: deque[Future[StepDone]] = deque()
        device_s = 0.0

        def land() -> None:
            nonlocal device_s
            try:
                device_s += flying.popleft().result(PATIENCE_S).seconds
            except TimeoutError as error:
                raise BenchError(
                    f"model {self._spec.name}: a step did not land within {PATIENCE_S:g} s; nothing is measured"
                ) from error

        for plan in plans:
            if len(flying) == IN_FLIGHT:
                land()
            flying.append(self._runner.launch(plan))
        while flying:
            land()
        return device_s

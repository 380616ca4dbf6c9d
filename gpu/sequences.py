"""The open sequences of one model as its runner knows them: tokens, block tables, and what a step may do with them.

A sequence is opened, named by steps, and closed, all by the worker's thread; a step that was launched keeps its
sequences, so closing one takes nothing from under it. What a step changes in a sequence is changed where the step runs.
"""

import itertools
from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from forebay.gpu.errors import StepError
from forebay.transport.messages.common import Sampling
from forebay.transport.messages.steps import BLOCK_TOKENS, CloseSequence, OpenSequence, StepPlan, Work

_TABLE_NUMBERS = itertools.count()


class Sequence:
    """`known` tokens are those that steps may count on, among them the ones that launched steps draw; of these the
    first `landed` are in `tokens`, and the first `opened` it came with. `table` holds `blocks` block numbers; whenever
    some are taken out of it, it gets another `table_number`: no two tables have the same. Both arrays grow by
    doubling."""

    __slots__ = (
        "blocks",
        "known",
        "landed",
        "opened",
        "prompt_tokens",
        "sampling",
        "slot",
        "table",
        "table_number",
        "tokens",
    )

    def __init__(self, tokens: NDArray[np.int64], prompt_tokens: int, sampling: Sampling) -> None:
        self.tokens = tokens
        self.known = self.landed = self.opened = len(tokens)
        self.prompt_tokens = prompt_tokens
        self.sampling = sampling
        self.table = np.empty(16, np.int64)
        self.blocks = 0
        self.table_number = next(_TABLE_NUMBERS)
        self.slot: object = None
        """Where the device keeps its last token; the runner's own."""

    def draw(self) -> None:
        """A launched step will draw its next token."""
        self.known += 1

    def land(self, token: int) -> None:
        """The token that was drawn first and had not landed."""
        if self.landed == len(self.tokens):
            self.tokens = _grown(self.tokens, self.landed, self.landed + 1)
        self.tokens[self.landed] = token
        self.landed += 1

    def take_blocks(self, work: Work) -> None:
        """The table as this share of a step wants it."""
        if work.kept < self.blocks:
            self.table_number = next(_TABLE_NUMBERS)
            self.blocks = work.kept
        if work.blocks:
            needed = self.blocks + len(work.blocks)
            if needed > len(self.table):
                self.table = _grown(self.table, self.blocks, needed)
            self.table[self.blocks : needed] = work.blocks
            self.blocks = needed


def _grown(array: NDArray[np.int64], used: int, needed: int) -> NDArray[np.int64]:
    larger = np.empty(max(needed, 2 * len(array)), np.int64)
    larger[:used] = array[:used]
    return larger


class OpenSequences:
    """Those of one `model`, whose steps may name `blocks` blocks and sequences of at most `max_context` tokens."""

    def __init__(self, model: str, vocabulary: int, max_context: int, blocks: int) -> None:
        self.model = model
        self._vocabulary = vocabulary
        self._max_context = max_context
        self._blocks = blocks
        self._open: dict[int, Sequence] = {}

    def open(self, message: OpenSequence) -> None:
        """Raises StepError if it is open, empty or too long already."""
        number = message.sequence
        tokens = np.frombuffer(message.tokens, "<u4").astype(np.int64)
        if number in self._open:
            raise StepError(f"sequence {number} of model {self.model!r} is open already")
        if not 0 < len(tokens) <= self._max_context or not 0 < message.prompt_tokens <= len(tokens):
            raise StepError(
                f"sequence {number} has {len(tokens)} tokens, {message.prompt_tokens} of them prompt; model "
                f"{self.model!r} takes 1 to {self._max_context}, of which at least 1 is prompt"
            )
        if int(tokens.max()) >= self._vocabulary:
            raise StepError(
                f"sequence {number} has token {tokens.max()}; model {self.model!r} knows 0 to {self._vocabulary - 1}"
            )
        self._open[number] = Sequence(tokens, message.prompt_tokens, message.sampling)

    def close(self, message: CloseSequence) -> None:
        """Steps launched so far still have it. Raises StepError if it is not open."""
        if self._open.pop(message.sequence, None) is None:
            raise StepError(f"sequence {message.sequence} of model {self.model!r} is not open")

    def of(self, plan: StepPlan) -> list[Sequence | None]:
        """The sequence of each share of the plan, None for those that are not open."""
        return [self._open.get(work.sequence) for work in plan.work]

    def clear(self) -> None:
        self._open.clear()

    def check(self, plan: StepPlan, sequences: Items[Sequence | None]) -> list[Sequence]:
        """The sequences of a plan that may be run now. Raises StepError; changes nothing."""
        checked: list[Sequence] = []
        for work, sequence in zip(plan.work, sequences, strict=True):
            if sequence is None:
                raise self._broken(plan, work, "which is not open")
            end = work.start + work.count
            table = work.kept + len(work.blocks)
            if not 0 <= work.kept <= sequence.blocks:
                raise self._broken(plan, work, f"to keep {work.kept} blocks of a table of {sequence.blocks}")
            if work.count < 1 or work.start < 0 or end > sequence.known:
                raise self._broken(plan, work, f"of which {sequence.known} tokens are known")
            if work.sample and end != sequence.known:
                raise self._broken(plan, work, f"to sample from, but {sequence.known} tokens are known")
            if end > table * BLOCK_TOKENS:
                raise self._broken(plan, work, f"whose table of {table} blocks is too short")
            if work.blocks and not (min(work.blocks) >= 0 and max(work.blocks) < self._blocks):
                raise self._broken(plan, work, f"with a block outside 0..{self._blocks - 1}")
            checked.append(sequence)
        if not checked:
            raise StepError(f"step {plan.step} of model {self.model!r} holds no work")
        if len({work.sequence for work in plan.work}) != len(checked):
            raise StepError(f"step {plan.step} of model {self.model!r} names a sequence twice")
        return checked

    def _broken(self, plan: StepPlan, work: Work, problem: str) -> StepError:
        return StepError(
            f"step {plan.step} of model {self.model!r} names sequence {work.sequence} "
            f"(positions {work.start} to {work.start + work.count - 1}), {problem}"
        )

"""Runs the steps of one model: sequences in, one packed forward pass a step, the next tokens out.

Everything is queued to the device's lane and happens there in the order of the calls, so a step may be launched before
the tokens of the one before it are known. Only the lane touches the state of a sequence.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from forebay.gpu.attention import LayerViews, PagedBatch, Scratch, Share, build_layout, packing_order
from forebay.gpu.errors import ModelLoadError, StepError
from forebay.gpu.pool import KVPool
from forebay.gpu.sampling import Draw, choose
from forebay.gpu.weights import Weights
from forebay.transport.messages.common import ModelSpec, Sampling
from forebay.transport.messages.steps import CloseSequence, OpenSequence, StepDone, StepPlan, Work

Result = TypeVar("Result")


class Lane(Protocol):
    """What a runner needs of its device: a thread that runs what it is given in order, and room for gathered pages."""

    @property
    def scratch(self) -> Scratch: ...

    def submit(self, job: Callable[[], Result]) -> "Future[Result]": ...


class _Sequence:
    """Known tokens and block table, both in arrays that grow by doubling."""

    __slots__ = ("blocks", "known", "prompt_tokens", "sampling", "table", "tokens")

    def __init__(self, tokens: NDArray[np.int64], prompt_tokens: int, sampling: Sampling) -> None:
        self.tokens = tokens
        self.known = len(tokens)
        self.prompt_tokens = prompt_tokens
        self.sampling = sampling
        self.table = np.empty(16, np.int64)
        self.blocks = 0

    def append_token(self, token: int) -> None:
        if self.known == len(self.tokens):
            self.tokens = _grown(self.tokens, self.known, self.known + 1)
        self.tokens[self.known] = token
        self.known += 1

    def append_blocks(self, blocks: Sequence[int]) -> None:
        needed = self.blocks + len(blocks)
        if needed > len(self.table):
            self.table = _grown(self.table, self.blocks, needed)
        self.table[self.blocks : needed] = blocks
        self.blocks = needed


def _grown(array: NDArray[np.int64], used: int, needed: int) -> NDArray[np.int64]:
    larger = np.empty(max(needed, 2 * len(array)), np.int64)
    larger[:used] = array[:used]
    return larger


class ModelRunner:
    """One model on one device.

    `max_context` tokens is the longest sequence it can run: what the model was trained for, what the spec allows, what
    the pool holds. `blocks` of `block_bytes` is the whole pool in this model's blocks. Raises ModelLoadError."""

    def __init__(self, spec: ModelSpec, weights: Weights, pool: KVPool, lane: Lane) -> None:
        self.spec = spec
        self.shape = weights.shape
        self.block_bytes = self.shape.block_bytes
        self.blocks = pool.blocks(self.shape)
        if self.blocks < 1:
            raise ModelLoadError(
                spec.name,
                spec.path,
                f"one block of {self.shape.block_tokens} tokens takes {self.block_bytes} bytes, the device's pool has "
                f"{pool.capacity}; give the device more memory",
            )
        limits = [weights.max_positions, self.blocks * self.shape.block_tokens]
        self.max_context = min([*limits, spec.max_context] if spec.max_context else limits)
        self._weights = weights
        self._view = pool.view(self.shape)
        self._layers = LayerViews(self._view, self.shape)
        self._lane = lane
        self._sequences: dict[int, _Sequence] = {}
        self._open: set[int] = set()

    def open(self, message: OpenSequence) -> None:
        """Makes a sequence known to all later steps. Raises StepError if it is open, empty or too long already."""
        number = message.sequence
        tokens = np.frombuffer(message.tokens, "<u4").astype(np.int64)
        if number in self._open:
            raise StepError(f"sequence {number} of model {self.spec.name!r} is open already")
        if not 0 < len(tokens) <= self.max_context or not 0 < message.prompt_tokens <= len(tokens):
            raise StepError(
                f"sequence {number} has {len(tokens)} tokens, {message.prompt_tokens} of them prompt; model "
                f"{self.spec.name!r} takes 1 to {self.max_context}, of which at least 1 is prompt"
            )
        if int(tokens.max()) >= self._weights.vocabulary:
            raise StepError(
                f"sequence {number} has token {tokens.max()}; model {self.spec.name!r} knows "
                f"0 to {self._weights.vocabulary - 1}"
            )
        self._open.add(number)
        sequence = _Sequence(tokens, message.prompt_tokens, message.sampling)
        self._lane.submit(lambda: self._sequences.__setitem__(number, sequence))

    def close(self, message: CloseSequence) -> None:
        """Forgets a sequence once all steps launched so far have run. Raises StepError if it is not open."""
        number = message.sequence
        if number not in self._open:
            raise StepError(f"sequence {number} of model {self.spec.name!r} is not open")
        self._open.remove(number)
        self._lane.submit(lambda: self._sequences.pop(number))

    def launch(self, plan: StepPlan) -> "Future[StepDone]":
        """Queues a step and returns at once. The future fails with StepError if the plan breaks the contract (nothing
        was changed then), or with what the forward pass raised."""
        return self._lane.submit(lambda: self._infer(plan))

    def _infer(self, plan: StepPlan) -> StepDone:
        with torch.inference_mode():
            return self._run(plan)

    def _run(self, plan: StepPlan) -> StepDone:
        started = time.perf_counter()
        sequences = [self._sequences.get(work.sequence) for work in plan.work]
        checked = self._checked(plan, sequences)
        shares = [self._share(work, sequence) for work, sequence in zip(plan.work, checked, strict=True)]
        self._clear_new_blocks(plan.work, checked)
        logits = self._forward(plan.work, checked, shares)
        tokens, stopped = b"", b""
        if logits is not None:
            drawing = [sequence for work, sequence in zip(plan.work, checked, strict=True) if work.sample]
            draws = [Draw(sequence.sampling, sequence.known - sequence.prompt_tokens) for sequence in drawing]
            chosen, marks = choose(logits, draws, self._weights.end_of_sequence)
            for sequence, token in zip(drawing, chosen.tolist(), strict=True):
                sequence.append_token(token)
            tokens, stopped = chosen.astype("<u4").tobytes(), marks.tobytes()
        return StepDone(plan.step, tokens, stopped, time.perf_counter() - started)

    def _checked(self, plan: StepPlan, sequences: list[_Sequence | None]) -> list[_Sequence]:
        """The sequences of the plan; raises StepError before anything is changed."""
        checked: list[_Sequence] = []
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
            if end > table * self.shape.block_tokens:
                raise self._broken(plan, work, f"whose table of {table} blocks is too short")
            if work.blocks and not (min(work.blocks) >= 0 and max(work.blocks) < self.blocks):
                raise self._broken(plan, work, f"with a block outside 0..{self.blocks - 1}")
            checked.append(sequence)
        if not checked:
            raise StepError(f"step {plan.step} of model {self.spec.name!r} holds no work")
        if len({work.sequence for work in plan.work}) != len(checked):
            raise StepError(f"step {plan.step} of model {self.spec.name!r} names a sequence twice")
        return checked

    def _broken(self, plan: StepPlan, work: Work, problem: str) -> StepError:
        return StepError(
            f"step {plan.step} of model {self.spec.name!r} names sequence {work.sequence} "
            f"(positions {work.start} to {work.start + work.count - 1}), {problem}"
        )

    @staticmethod
    def _share(work: Work, sequence: _Sequence) -> Share:
        sequence.blocks = work.kept
        if work.blocks:
            sequence.append_blocks(work.blocks)
        return Share(sequence.table, work.start, work.count)

    def _clear_new_blocks(self, works: Sequence[Work], sequences: list[_Sequence]) -> None:
        """Zeroes new blocks that this step does not fill: another model's bytes may read as NaN, and a masked NaN is
        still NaN. Blocks before `start` are not ours to clear: they hold what was computed already."""
        size = self.shape.block_tokens
        stale: list[int] = []
        for work, sequence in zip(works, sequences, strict=True):
            if work.blocks:
                filled = (work.start + work.count) // size
                computed = -(-work.start // size)
                first = max(sequence.blocks - len(work.blocks), filled, computed)
                stale += sequence.table[first : sequence.blocks].tolist()
        if stale:
            self._view.index_fill_(0, torch.tensor(stale), 0)

    def _forward(self, works: Sequence[Work], sequences: list[_Sequence], shares: list[Share]) -> torch.Tensor | None:
        """Logits [n, vocabulary] of the shares that sample, in the plan's order; None if none does."""
        order = packing_order(shares)
        packed = [shares[i] for i in order]
        layout = build_layout(packed, self.shape)
        tokens = np.concatenate([sequences[i].tokens[works[i].start :][: works[i].count] for i in order])
        positions = np.concatenate([np.arange(share.start, share.start + share.count) for share in packed])
        last = np.empty(len(works), np.int64)
        last[order] = np.cumsum([share.count for share in packed]) - 1
        kept = torch.from_numpy(last[[work.sample for work in works]])
        batch = PagedBatch(layout, self._layers, self._lane.scratch)
        model = self._weights.model if len(kept) else self._weights.model.base_model
        arguments = {"logits_to_keep": kept} if len(kept) else {}
        out = model(
            input_ids=torch.from_numpy(tokens).unsqueeze(0),
            position_ids=torch.from_numpy(positions).unsqueeze(0),
            use_cache=False,
            paged=batch,
            **arguments,
        )
        return out.logits[0] if len(kept) else None

    def forget(self) -> None:
        """Drops every sequence. For the device, in the lane, when the model is unloaded."""
        self._open.clear()
        self._sequences.clear()

"""Runs the steps of one model: sequences in, one packed forward pass a step, the next tokens out.

Steps are queued to the device's lane and run there in the order of the calls, so a step may be launched before the
tokens of the one before it are known. Only the lane touches the state of a sequence.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np
import torch

from forebay.gpu.attention import LayerViews, PagedBatch, Scratch, Share, build_layout, packing_order
from forebay.gpu.errors import ModelLoadError
from forebay.gpu.pool import KVPool, KVShape
from forebay.gpu.sampling import Draw, choose
from forebay.gpu.sequences import OpenSequences, Sequence
from forebay.gpu.weights import Weights
from forebay.transport.messages.common import ModelSpec
from forebay.transport.messages.steps import BLOCK_TOKENS, CloseSequence, OpenSequence, StepDone, StepPlan, Work

Result = TypeVar("Result")


class Lane(Protocol):
    """What a runner needs of its device: a thread that runs what it is given in order, and room for gathered pages."""

    @property
    def scratch(self) -> Scratch: ...

    def submit(self, job: Callable[[], Result]) -> "Future[Result]": ...


class Runner(Protocol):
    """One model on one device, of whatever kind. Called by the worker's thread; nothing here waits for a step."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def shape(self) -> KVShape: ...

    @property
    def block_bytes(self) -> int:
        """Size of a KV block of this model."""

    @property
    def blocks(self) -> int:
        """The whole pool in blocks of this model."""

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence that it can run: what the model was trained for, what the spec allows, what
        the pool holds."""

    def open(self, message: OpenSequence) -> None:
        """Makes a sequence known to all later steps. Raises StepError if it is open, empty or too long already."""

    def close(self, message: CloseSequence) -> None:
        """No later step names this sequence. Raises StepError if it is not open."""

    def launch(self, plan: StepPlan) -> "Future[StepDone]":
        """Queues a step and returns at once. The future fails with StepError if the plan breaks the contract (nothing
        was changed then), with DeviceError if the device is lost, or with what else the forward pass raised."""

    def forget(self) -> None:
        """Drops every sequence. For the device, when the model is unloaded."""


def context_limit(spec: ModelSpec, max_positions: int, blocks: int) -> int:
    """Tokens of the longest sequence (see `Runner.max_context`)."""
    limits = [max_positions, blocks * BLOCK_TOKENS]
    return min([*limits, spec.max_context] if spec.max_context else limits)


def blocks_of_pool(spec: ModelSpec, shape: KVShape, pool: KVPool) -> int:
    """How many blocks of the model the pool holds. Raises ModelLoadError if not even one."""
    blocks = pool.blocks(shape)
    if blocks < 1:
        raise ModelLoadError(
            spec.name,
            spec.path,
            f"one block of {shape.block_tokens} tokens takes {shape.block_bytes} bytes, the device's pool has "
            f"{pool.capacity}; give the device more memory",
        )
    return blocks


class ModelRunner:
    """One model on one device: a Runner. Raises ModelLoadError."""

    def __init__(self, spec: ModelSpec, weights: Weights, pool: KVPool, lane: Lane) -> None:
        self.spec = spec
        self.shape = weights.shape
        self.block_bytes = self.shape.block_bytes
        self.blocks = blocks_of_pool(spec, self.shape, pool)
        self.max_context = context_limit(spec, weights.max_positions, self.blocks)
        self._weights = weights
        self._view = pool.view(self.shape)
        self._layers = LayerViews(self._view, self.shape)
        self._lane = lane
        self._sequences = OpenSequences(spec.name, weights.vocabulary, self.max_context, self.blocks)

    def use(self, weights: Weights | None) -> None:
        """The weights are these from here on, of the same model, or are away (None: no step may be launched until they
        are back). For the device, in the lane."""
        self._weights = weights or replace(self._weights, model=None)

    @property
    def away(self) -> bool:
        """Whether its weights are."""
        return self._weights.model is None

    def open(self, message: OpenSequence) -> None:
        self._sequences.open(message)

    def close(self, message: CloseSequence) -> None:
        self._sequences.close(message)

    def launch(self, plan: StepPlan) -> "Future[StepDone]":
        sequences = self._sequences.of(plan)
        return self._lane.submit(lambda: self._infer(plan, sequences))

    def _infer(self, plan: StepPlan, sequences: list[Sequence | None]) -> StepDone:
        with torch.inference_mode():
            return self._run(plan, sequences)

    def _run(self, plan: StepPlan, sequences: list[Sequence | None]) -> StepDone:
        started = time.perf_counter()
        checked = self._sequences.check(plan, sequences)
        shares = [self._share(work, sequence) for work, sequence in zip(plan.work, checked, strict=True)]
        self._clear_new_blocks(plan.work, checked)
        logits = self._forward(plan.work, checked, shares)
        tokens, stopped = b"", b""
        if logits is not None:
            drawing = [sequence for work, sequence in zip(plan.work, checked, strict=True) if work.sample]
            draws = [Draw(sequence.sampling, sequence.known - sequence.prompt_tokens) for sequence in drawing]
            chosen, marks = choose(logits, draws, self._weights.end_of_sequence)
            for sequence, token in zip(drawing, chosen.tolist(), strict=True):
                sequence.draw()
                sequence.land(token)
            tokens, stopped = chosen.astype("<u4").tobytes(), marks.tobytes()
        return StepDone(plan.step, tokens, stopped, time.perf_counter() - started)

    @staticmethod
    def _share(work: Work, sequence: Sequence) -> Share:
        sequence.take_blocks(work)
        return Share(sequence.table, work.start, work.count)

    def _clear_new_blocks(self, works: Items[Work], sequences: list[Sequence]) -> None:
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

    def _forward(self, works: Items[Work], sequences: list[Sequence], shares: list[Share]) -> torch.Tensor | None:
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
        self._sequences.clear()

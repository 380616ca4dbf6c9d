"""The arrays of a step of any make-up: prompts, chunks of them and decodes, rows that sample and rows that do not.

A step has arrays of its own sizes and runs launch by launch, or they are filled up to the sizes of a captured step:

- tokens that nobody needs belong to no sequence: they are computed, and written nowhere;
- sequences that are not there have no queries and no blocks: the attention's plan leaves them out;
- draws that nobody needs are of the first row, and go to nobody.

Only numpy here: what the device makes of these arrays is in cuda_stepper.py.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay.gpu.cuda_decode import IN_FLIGHT, DecodeArrays, DecodeRows
from forebay.gpu.cuda_staging import Staged
from forebay.gpu.sequences import Sequence
from forebay.transport.messages.steps import BLOCK_TOKENS, Work

TOKENS = tuple(range(64, 513, 64))
"""Tokens of captured steps. Beyond some 150 a step of an 8B model takes the longer the more tokens it has, so what
fills it up is kept below 64; beyond 512 the device takes longer than the host does to launch it."""

DRAWS = (0, 16, 64, 256)
"""Rows that sample in captured steps; 0: no logits are made."""

COARSE_SEQUENCES = 64
"""At most so many sequences are in a captured step whose attention has large tiles of queries."""

_FINE, _COARSE = 16, 128
"""Rows of queries (times the heads that share a KV head) of one program of the attention, see cuda_attention.py."""

_COARSE_COST = 2
"""What a program with large tiles takes for a key, in those of small ones: it computes instead of waiting for memory
(estimated from 350 TFLOP/s and what the cache gives; not measured)."""


@dataclass(frozen=True)
class StepShape:
    """The sizes of a step's arrays: tokens, sequences, and rows that sample."""

    tokens: int
    sequences: int
    draws: int


@dataclass(frozen=True, eq=False)
class Makeup:
    """A step of R sequences: of each [R] how many tokens it computes, from which position on (`starts`), how long it is
    afterwards, in tokens and in blocks, and whether it samples. The first `decodes` take one token and sample."""

    counts: NDArray[np.int32]
    starts: NDArray[np.int32]
    lengths: NDArray[np.int32]
    pages: NDArray[np.int32]
    samples: NDArray[np.bool_]
    decodes: int
    shape: StepShape
    """Its own, not filled up."""

    @property
    def all_pages(self) -> int:
        return int(self.pages.sum())


def makeup(works: Items[Work]) -> Makeup:
    counts = np.array([work.count for work in works], np.int32)
    starts = np.array([work.start for work in works], np.int32)
    samples = np.array([work.sample for work in works], np.bool_)
    lengths = starts + counts
    others = np.flatnonzero(~samples | (counts != 1))
    return Makeup(
        counts,
        starts,
        lengths,
        -(-lengths // BLOCK_TOKENS),
        samples,
        int(others[0]) if len(others) else len(works),
        StepShape(int(counts.sum()), len(works), int(samples.sum())),
    )


class GraphShapes:
    """The shapes of captured steps. A captured plan of the attention has tiles that follow from the number of tokens
    and of sequences alone: small ones where these are as many (which steps always fit), large ones where there are
    few sequences.

    `most_tokens` and `most_draws`: of any step of the model; `group`: query heads that share a KV head."""

    def __init__(self, most_tokens: int, most_draws: int, group: int) -> None:
        below = [tokens for tokens in TOKENS if tokens < most_tokens]
        self.tokens = (*below, *TOKENS[len(below) : len(below) + 1])
        self.draws = (*(draws for draws in DRAWS if draws < most_draws), most_draws)
        self._group = group

    @property
    def largest(self) -> StepShape:
        """Which has more of everything than any other."""
        return StepShape(self.tokens[-1], self.tokens[-1], self.draws[-1])

    @property
    def plans(self) -> list[tuple[int, int]]:
        """Tokens and sequences that the attention's memory has to suffice for."""
        return [plan for tokens in self.tokens for plan in ((tokens, tokens), (tokens, self._few(tokens)))]

    def find(self, step: Makeup) -> StepShape | None:
        """The smallest one that the step fits in, None if it is too large for any."""
        wanted = step.shape
        tokens = next((size for size in self.tokens if size >= wanted.tokens), None)
        draws = next((size for size in self.draws if size >= wanted.draws), None)
        if tokens is None or draws is None:
            return None
        few = self._few(tokens)
        return StepShape(tokens, few if wanted.sequences <= few and self._coarse(step) else tokens, draws)

    @staticmethod
    def _few(tokens: int) -> int:
        # Half of the tokens at most: the longest sequence that there could be decides on the tiles.
        return min(COARSE_SEQUENCES, tokens // 2)

    def _coarse(self, step: Makeup) -> bool:
        """Whether large tiles take less: each reads all keys of its sequence, for up to eight times as many queries."""
        rows = step.counts.astype(np.int64) * self._group
        fine, coarse = (int((-(-rows // tile) * step.lengths).sum()) for tile in (_FINE, _COARSE))
        return _COARSE_COST * coarse < fine


@dataclass(frozen=True, eq=False)
class MixedArrays:
    """A step's arrays, of T tokens, B sequences and S draws. `tokens` [T] may be IN_FLIGHT: the last one of the slot in
    `token_slots` [T]; `positions` [T] and `rows` [T] as in CudaStep. `queries` [B + 1], `starts` [B + 1], `last_tokens`
    [B] and `indices` as in Pages; `kept_queries` [B + 1] are the queries where only rows that sample are left, `kept`
    [S] which rows these are, `slots` [S] and `settings` [FIELDS, S] where their draws go and how they are made.
    `indices` lies last."""

    rows: Staged
    token_slots: Staged
    kept: Staged
    slots: Staged
    settings: Staged
    tokens: Staged
    positions: Staged
    queries: Staged
    kept_queries: Staged
    starts: Staged
    last_tokens: Staged
    indices: Staged


class MixedRows:
    """Fills MixedArrays. `decodes` keeps what it knows of a lane's decodes from step to step, these and pure ones; for
    `slot` and `nobody` see there."""

    def __init__(self, decodes: DecodeRows, slot: Callable[[Sequence], int], nobody: int) -> None:
        self._decodes = decodes
        self._slot = slot
        self._nobody = nobody

    def write(
        self, arrays: MixedArrays, step: Makeup, works: Items[Work], sequences: list[Sequence]
    ) -> NDArray[np.int32]:
        """All but `settings`. Gives the lengths of all sequences, those that fill up have none."""
        total, count, draws = step.shape.tokens, step.shape.sequences, step.shape.draws
        first = step.decodes
        queries, kept_queries, starts = arrays.queries.host, arrays.kept_queries.host, arrays.starts.host
        for ends, each in ((queries, step.counts), (kept_queries, step.samples), (starts, step.pages)):
            ends[0] = 0
            np.cumsum(each, out=ends[1 : count + 1])
            ends[count + 1 :] = ends[count]
        arrays.last_tokens.host[:count] = (step.lengths - 1) % BLOCK_TOKENS + 1
        arrays.last_tokens.host[count:] = 1
        arrays.token_slots.host[first:] = self._nobody
        if first:
            self._write_decodes(arrays, sequences[:first])
        if first < count:
            self._write_others(arrays, step, works, sequences)
        arrays.tokens.host[total:] = 0
        arrays.positions.host[total:] = 0
        arrays.rows.host[total:] = -1
        arrays.kept.host[:draws] = queries[1 : count + 1][step.samples] - 1
        arrays.kept.host[draws:] = 0
        arrays.slots.host[:first] = arrays.token_slots.host[:first]
        others = zip(works[first:], sequences[first:], strict=True)
        arrays.slots.host[first:draws] = [self._slot(sequence) for work, sequence in others if work.sample]
        arrays.slots.host[draws:] = self._nobody
        lengths = np.zeros(len(starts) - 1, np.int32)
        lengths[:count] = step.lengths
        return lengths

    def _write_decodes(self, arrays: MixedArrays, sequences: list[Sequence]) -> None:
        count = len(sequences)
        self._decodes.follow(sequences)

        def part(array: Staged, size: int) -> Staged:
            return Staged(array.host[:size], array.device)

        self._decodes.write(
            DecodeArrays(
                rows=part(arrays.rows, count),
                slots=part(arrays.token_slots, count),
                settings=arrays.settings,
                tokens=part(arrays.tokens, count),
                positions=part(arrays.positions, count),
                starts=part(arrays.starts, count + 1),
                last_tokens=part(arrays.last_tokens, count),
                indices=arrays.indices,
            ),
            count,
        )

    def _write_others(self, arrays: MixedArrays, step: Makeup, works: Items[Work], sequences: list[Sequence]) -> None:
        first, count, total = step.decodes, step.shape.sequences, step.shape.tokens
        starts = arrays.starts.host
        pages = step.pages[first:].tolist()
        blocks = [sequence.table[:used] for sequence, used in zip(sequences[first:], pages, strict=True)]
        indices = arrays.indices.host
        np.concatenate(blocks, out=indices[starts[first] : starts[count]], casting="same_kind")
        counts = step.counts[first:]
        begins = arrays.queries.host[first:count]
        at = np.arange(first, total, dtype=np.int32) + np.repeat(step.starts[first:] - begins, counts)
        arrays.positions.host[first:total] = at
        found = indices[np.repeat(starts[first:count], counts) + at // BLOCK_TOKENS]
        np.add(found.astype(np.int64) * BLOCK_TOKENS, at % BLOCK_TOKENS, out=arrays.rows.host[first:total])
        tokens = arrays.tokens.host
        for work, sequence, begin in zip(works[first:], sequences[first:], begins.tolist(), strict=True):
            end = begin + work.count
            there = min(end, begin + sequence.landed - work.start)
            tokens[begin:there] = sequence.tokens[work.start : work.start + there - begin]
            if there < end:  # its last one has not landed
                tokens[end - 1] = IN_FLIGHT
                arrays.token_slots.host[end - 1] = self._slot(sequence)

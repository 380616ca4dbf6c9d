"""What DecodeRows keeps from step to step beside what a step's sequences say themselves."""

import itertools
from typing import Any

import numpy as np
import torch

from forebay.gpu.cuda_decode import IN_FLIGHT, DecodeArrays, DecodeRows
from forebay.gpu.cuda_staging import Staged
from forebay.gpu.sequences import Sequence
from forebay.transport.messages import BLOCK_TOKENS, Sampling
from forebay.transport.messages.steps import Work

ROWS, PAGES, NOBODY = 12, 400, 999


def arrays_for(bucket: int) -> DecodeArrays:
    def array(dtype: Any, count: int) -> Staged:
        return Staged(np.full(count, -77, dtype), torch.empty(0))

    return DecodeArrays(
        array(np.int64, bucket), array(np.int64, bucket), array(np.int64, bucket), array(np.int32, bucket),
        array(np.int32, bucket), array(np.int32, bucket + 1), array(np.int32, bucket), array(np.int32, PAGES),
    )  # fmt: skip


class World:
    """Sequences whose blocks are numbered at random."""

    def __init__(self, seed: int) -> None:
        self.chance = np.random.default_rng(seed)
        self.slots = itertools.count(100)

    @staticmethod
    def slot(sequence: Sequence) -> int:
        assert isinstance(sequence.slot, int)
        return sequence.slot

    def sequence(self, length: int) -> Sequence:
        sequence = Sequence(np.arange(length, dtype=np.int64) + 1000, length, Sampling(max_tokens=99))
        sequence.slot = next(self.slots)
        return sequence

    def fit(self, sequence: Sequence, *, again: bool = False) -> None:
        """Blocks up to its last known token; `again`: all of them others than before."""
        kept = 0 if again else sequence.blocks
        needed = -(-sequence.known // BLOCK_TOKENS) - kept
        blocks = tuple(self.chance.integers(0, 5000, max(0, needed)).tolist())
        sequence.take_blocks(Work(0, 0, 1, kept, blocks, True))


def check(rows: DecodeRows, sequences: list[Sequence], bucket: int) -> None:
    count, pages = rows.follow(sequences)
    arrays = arrays_for(bucket)
    lengths = rows.write(arrays, bucket)
    filling = bucket - count
    at = [sequence.known - 1 for sequence in sequences]
    used = [sequence.table[: place // BLOCK_TOKENS + 1].tolist() for sequence, place in zip(sequences, at, strict=True)]
    flat = [block for blocks in used for block in blocks]
    assert (count, pages) == (len(sequences), len(flat))
    assert lengths.tolist() == [place + 1 for place in at] + [1] * filling
    assert arrays.positions.host.tolist() == at + [0] * filling
    assert arrays.last_tokens.host.tolist() == [place % BLOCK_TOKENS + 1 for place in at] + [1] * filling
    expected = [b[-1] * BLOCK_TOKENS + place % BLOCK_TOKENS for b, place in zip(used, at, strict=True)]
    assert arrays.rows.host.tolist() == expected + [-1] * filling
    assert arrays.slots.host.tolist() == [sequence.slot for sequence in sequences] + [NOBODY] * filling
    assert arrays.starts.host.tolist() == np.cumsum([0, *map(len, used), *[1] * filling]).tolist()
    assert arrays.indices.host[: pages + filling].tolist() == flat + [flat[0]] * filling
    assert set(arrays.indices.host[pages + filling :].tolist()) == {-77}, "nothing is written beyond"
    tokens = [int(s.tokens[p]) if p < s.opened else IN_FLIGHT for s, p in zip(sequences, at, strict=True)]
    assert arrays.tokens.host.tolist() == tokens + [0] * filling


def test_rows_follow_what_the_sequences_do() -> None:
    """They come and go, change places, grow by blocks, and come back after a preemption with other blocks."""
    for seed in range(8):
        world = World(seed)
        rows = DecodeRows(ROWS, PAGES, world.slot, NOBODY)
        rows.follow([])
        there = [world.sequence(int(length)) for length in world.chance.integers(1, 90, 6)]
        for sequence in there:
            world.fit(sequence)
        for _ in range(120):
            luck = world.chance.random()
            if luck < 0.04 and len(there) < ROWS:
                there.append(world.sequence(int(world.chance.integers(1, 90))))
                world.fit(there[-1])
            elif luck < 0.08 and len(there) > 1:
                there.pop(int(world.chance.integers(len(there))))
            elif luck < 0.12:
                there = [there[i] for i in world.chance.permutation(len(there))]
            elif luck < 0.16:
                world.fit(there[0], again=True)
            elif luck < 0.3:  # a step of another kind, with more than one block at times
                for sequence in there:
                    sequence.known += int(world.chance.integers(0, 30)) if sequence.known < 300 else 0
                    world.fit(sequence)
            if sum(s.known for s in there) > (PAGES - 2 * ROWS) * BLOCK_TOKENS:
                break
            check(rows, there, ROWS)
            for sequence in there:
                sequence.draw()
                world.fit(sequence)


def test_two_sequences_of_one_text_are_not_taken_for_each_other() -> None:
    world = World(1)
    rows = DecodeRows(ROWS, PAGES, world.slot, NOBODY)
    for _ in range(3):
        sequence = world.sequence(20)
        world.fit(sequence)
        check(rows, [sequence], 4)

"""What MixedRows puts into the arrays of a step, which shapes steps are filled up to, and whether FlashInfer's plans
for these shapes have room for every step."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from forebay.gpu.cuda_attention import AttentionShape
from forebay.gpu.cuda_decode import IN_FLIGHT, DecodeRows
from forebay.gpu.cuda_mixed import GraphShapes, MixedArrays, MixedRows, StepShape, makeup
from forebay.gpu.cuda_staging import Staged
from forebay.gpu.sequences import Sequence
from forebay.transport.messages import BLOCK_TOKENS, Sampling
from forebay.transport.messages.steps import Work

PAGES, NOBODY, JUNK = 2000, 999, -77


def arrays_for(shape: StepShape) -> MixedArrays:
    def array(dtype: Any, count: int) -> Staged:
        return Staged(np.full(count, JUNK, dtype), torch.empty(0))

    tokens, sequences, draws = shape.tokens, shape.sequences, shape.draws
    return MixedArrays(
        rows=array(np.int64, tokens), token_slots=array(np.int64, tokens), kept=array(np.int64, draws),
        slots=array(np.int64, draws), settings=array(np.int64, draws), tokens=array(np.int32, tokens),
        positions=array(np.int32, tokens), queries=array(np.int32, sequences + 1),
        kept_queries=array(np.int32, sequences + 1), starts=array(np.int32, sequences + 1),
        last_tokens=array(np.int32, sequences), indices=array(np.int32, PAGES),
    )  # fmt: skip


class World:
    def __init__(self, seed: int) -> None:
        self.chance = np.random.default_rng(seed)
        self.slots = itertools.count(100)
        self.numbers = itertools.count()

    @staticmethod
    def slot(sequence: Sequence) -> int:
        assert isinstance(sequence.slot, int)
        return sequence.slot

    def sequence(self, length: int, drawn: int = 0, late: int = 0) -> Sequence:
        """Of a prompt of `length`, with further tokens `drawn` and landed, and others that are `late`."""
        sequence = Sequence(self.chance.integers(0, 9999, length), length, Sampling(max_tokens=99))
        sequence.slot = next(self.slots)
        for token in self.chance.integers(0, 9999, drawn).tolist():
            sequence.draw()
            sequence.land(token)
        sequence.known += late
        return sequence

    def work(self, sequence: Sequence, start: int, count: int) -> Work:
        needed = max(0, -(-(start + count) // BLOCK_TOKENS) - sequence.blocks)
        blocks = tuple(self.chance.integers(0, 5000, needed).tolist())
        work = Work(next(self.numbers), start, count, sequence.blocks, blocks, start + count == sequence.known)
        sequence.take_blocks(work)
        return work


def check(rows: MixedRows, works: list[Work], sequences: list[Sequence], shape: StepShape | None) -> None:
    step = makeup(works)
    arrays = arrays_for(shape or step.shape)
    lengths = rows.write(arrays, step, works, sequences)
    tokens: list[tuple[int | None, object]] = []
    tables: list[list[int]] = []
    positions: list[int] = []
    places: list[int] = []
    lasts: list[int] = []
    kept: list[int] = []
    drawn: list[object] = []
    for work, sequence in zip(works, sequences, strict=True):
        for at in range(work.start, work.start + work.count):
            # A decode takes its token from the device even where the host knows it, unless it was opened with it.
            device = at >= sequence.landed or (work.count == 1 and work.sample and at >= sequence.opened)
            host = int(sequence.tokens[at]) if at < sequence.landed else None
            tokens.append((host, sequence.slot if device else None))
            positions.append(at)
            places.append(int(sequence.table[at // BLOCK_TOKENS]) * BLOCK_TOKENS + at % BLOCK_TOKENS)
        end = work.start + work.count
        tables.append(sequence.table[: -(-end // BLOCK_TOKENS)].tolist())
        lasts.append((end - 1) % BLOCK_TOKENS + 1)
        if work.sample:
            kept.append(len(positions) - 1)
            drawn.append(sequence.slot)
    total, count = len(positions), len(works)
    for at, (host, slot) in enumerate(tokens):
        got = int(arrays.tokens.host[at])
        if got == IN_FLIGHT:
            assert arrays.token_slots.host[at] == slot
        else:
            assert got == host, "what the host knows not must come from the device"
    spare = len(arrays.tokens.host) - total
    assert arrays.tokens.host[total:].tolist() == [0] * spare
    assert arrays.token_slots.host.min() >= 0
    assert arrays.positions.host.tolist() == positions + [0] * spare
    assert arrays.rows.host.tolist() == places + [-1] * spare
    missing = len(lengths) - count
    counts, samples = [work.count for work in works], [int(work.sample) for work in works]
    assert arrays.queries.host.tolist() == np.cumsum([0, *counts, *[0] * missing]).tolist()
    assert arrays.kept_queries.host.tolist() == np.cumsum([0, *samples, *[0] * missing]).tolist()
    assert arrays.starts.host.tolist() == np.cumsum([0, *map(len, tables), *[0] * missing]).tolist()
    assert arrays.last_tokens.host.tolist() == lasts + [1] * missing
    flat = [block for table in tables for block in table]
    assert arrays.indices.host[: len(flat)].tolist() == flat
    assert set(arrays.indices.host[len(flat) :].tolist()) <= {JUNK}, "nothing is written beyond"
    assert lengths.tolist() == [work.start + work.count for work in works] + [0] * missing
    nobodies = len(arrays.kept.host) - len(kept)
    assert arrays.kept.host.tolist() == kept + [0] * nobodies
    assert arrays.slots.host.tolist() == drawn + [NOBODY] * nobodies


@pytest.mark.parametrize("seed", range(6))
def test_steps_of_every_makeup(seed: int) -> None:
    """Decodes first, then chunks, whole prompts, and sequences that are computed again, exactly and filled up."""
    world = World(seed)
    chance = world.chance
    rows = MixedRows(DecodeRows(40, PAGES, world.slot, NOBODY), world.slot, NOBODY)
    shapes = GraphShapes(512, 40, 4)
    decoding = [world.sequence(int(chance.integers(1, 90)), late=1) for _ in range(int(chance.integers(0, 12)))]
    for sequence in decoding:
        world.work(sequence, 0, sequence.known - 1)
    for _ in range(25):
        sequences = list(decoding)
        works = [world.work(sequence, sequence.known - 1, 1) for sequence in decoding]
        for _ in range(int(chance.integers(0 if works else 1, 5))):
            length = int(chance.integers(1, 60))
            kind = int(chance.integers(4))
            sequence = world.sequence(length, drawn=int(chance.integers(0, 9)) * (kind > 1), late=kind % 2)
            begin = int(chance.integers(0, length))
            if begin:
                world.work(sequence, 0, begin)
            there = sequence.known - begin
            count = there if chance.random() < 0.6 else int(chance.integers(1, there + 1))
            sequences.append(sequence)
            works.append(world.work(sequence, begin, count))
        step = makeup(works)
        shape = shapes.find(step)
        assert shape is not None
        check(rows, works, sequences, shape if chance.random() < 0.7 else None)
        for sequence in decoding:
            if chance.random() < 0.5:
                sequence.land(int(chance.integers(0, 9999)))
            sequence.draw()
        if chance.random() < 0.2 and decoding:
            decoding.pop(int(chance.integers(len(decoding))))


def test_a_step_of_nothing_is_all_fill() -> None:
    world = World(0)
    rows = MixedRows(DecodeRows(4, PAGES, world.slot, NOBODY), world.slot, NOBODY)
    check(rows, [], [], StepShape(64, 64, 4))


# Shapes --------------------------------------------------------------------------------------------------------------


def of(*sequences: tuple[int, int], chunks: int = 0) -> Any:
    """A step of sequences (tokens, length afterwards); the last `chunks` do not sample."""
    sampling = len(sequences) - chunks
    return makeup([Work(i, n - t, t, 0, (), i < sampling) for i, (t, n) in enumerate(sequences)])


def test_the_smallest_shape_that_a_step_fits_in() -> None:
    shapes = GraphShapes(2048, 256, 4)
    decodes = [(1, 500)] * 30
    assert shapes.find(of(*decodes, (34, 34))) == StepShape(64, 64, 64)
    assert shapes.find(of(*decodes, (35, 35))) == StepShape(128, 128, 64)
    assert shapes.find(of(*decodes[:15], (160, 160))) == StepShape(192, 192, 16)
    assert shapes.find(of(*[(1, 500)] * 256, (256, 300), chunks=1)) == StepShape(512, 512, 256)
    assert shapes.find(of(*[(1, 500)] * 256, (257, 300), chunks=1)) is None
    assert shapes.find(of((64, 700), chunks=1)) == StepShape(64, 32, 0), "no logits"
    assert GraphShapes(2048, 16, 4).find(of(*[(1, 9)] * 17, (20, 20))) is None, "too many rows sample"


def test_long_chunks_get_large_tiles_and_many_decodes_small_ones() -> None:
    shapes = GraphShapes(2048, 256, 4)
    few = [(1, 500)] * 30
    assert shapes.find(of(*few, (450, 8000), chunks=1)) == StepShape(512, 64, 64)
    assert shapes.find(of((512, 512))) == StepShape(512, 64, 16)
    assert shapes.find(of(*few, (160, 160))) == StepShape(192, 192, 64)
    assert shapes.find(of(*[(1, 500)] * 64, (400, 8000), chunks=1)) == StepShape(512, 512, 64), (
        "too many for large ones"
    )


def test_shapes_follow_the_model() -> None:
    assert GraphShapes(256, 12, 4).tokens == (64, 128, 192, 256)
    assert GraphShapes(200, 12, 4).tokens == (64, 128, 192, 256)
    assert GraphShapes(12, 12, 4).tokens == (64,)
    assert GraphShapes(2048, 12, 4).draws == (0, 12)
    assert GraphShapes(2048, 384, 4).draws == (0, 16, 64, 256, 384)
    assert GraphShapes(2048, 256, 4).largest == StepShape(512, 512, 256)


def plan_of(counts: list[int], pages: list[int], room: int, group: int, split: int, head_size: int) -> tuple[int, ...]:
    """PrefillSplitQOKVIndptr of FlashInfer's scheduler.cuh with enable_cuda_graph: rows of a tile, programs, and
    programs that the plan has room for."""
    longest = (room - len(counts) + 1) * group
    tile = 128 if longest > 64 and head_size < 256 else 64 if longest > 16 else 16
    tiles = [-(-count * group // tile) for count in counts]
    low, high = 128 // BLOCK_TOKENS, max(1, *pages)
    while low < high:
        middle = (low + high) // 2
        programs = sum(t * -(-max(p, 1) // middle) for t, p in zip(tiles, pages, strict=True))
        low, high = (middle + 1, high) if programs > split else (low, middle)
    programs = sum(t * -(-max(p, 1) // low) for t, p in zip(tiles, pages, strict=True))
    return tile, programs, max(split, -(-room * group // tile) + len(counts) - 1)


@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(32, 8, 128), (9, 3, 64), (8, 8, 256), (64, 2, 128)])
def test_plans_have_room_for_every_step_of_their_shape(heads: int, kv_heads: int, head_size: int) -> None:
    chance = np.random.default_rng(heads)
    group, split = heads // kv_heads, 2 * 132 // kv_heads
    shapes = GraphShapes(512, 256, group)
    attention = AttentionShape(heads, kv_heads, head_size, torch.bfloat16, 1.0)
    memory = attention.float_workspace_bytes(132, 256, shapes.plans)
    for _ in range(300):
        tokens = int(chance.choice(shapes.tokens))
        sequences = int(chance.integers(1, min(256, tokens) + 1))
        ends = np.sort(chance.choice(np.arange(1, tokens), sequences - 1, replace=False))
        counts = np.diff([0, *ends, tokens])
        if chance.random() < 0.3:
            counts = np.array([*[1] * (sequences - 1), tokens - sequences + 1])
        lengths = counts + chance.integers(0, 9000, sequences) * (chance.random() < 0.8)
        shape = shapes.find(of(*zip(counts.tolist(), lengths.tolist(), strict=True)))
        assert shape is not None
        fill = [0] * (shape.sequences - sequences)
        pages = [*(-(-lengths // BLOCK_TOKENS)).tolist(), *fill]
        for each, room in (
            ([*counts.tolist(), *fill], shape.tokens), ([*[1] * sequences, *fill], shape.sequences),
        ):  # fmt: skip
            assert sum(each) <= room
            assert room >= len(each)
            tile, programs, places = plan_of(each, pages, room, group, split, head_size)
            assert programs <= places
            assert heads * places * tile * (head_size + 1) * 4 + 64 <= memory
            assert tile == 16 or group > 16 or shape.sequences < shape.tokens

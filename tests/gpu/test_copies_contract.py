"""One suite for the copiers of every kind of device. On a GPU host: python -m pytest tests/gpu -k contract"""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from forebay.gpu.backend import Arena, HostMemory
from forebay.gpu.copies import Copier
from forebay.gpu.errors import DeviceError
from forebay.gpu.pieces import Pieces, block_pieces, pieces
from tests.gpu.lending_devices import Lending, lending, noise

__all__ = ["lending"]

SLOTS = 3


class Stage:
    """An arena of lent slabs, one of the borrower's own and pinned host memory, each with known contents."""

    def __init__(self, lending: Lending) -> None:
        self.lending = lending
        self.backend = lending.borrower
        self.size = SLOTS * lending.slab_bytes
        self.lent: Arena = lending.arena(SLOTS, full=True)
        self.own: Arena = self.backend.arena(lending.slab_bytes, SLOTS)
        for slot in range(SLOTS):
            with self.backend.slab(lending.slab_bytes) as slab:
                self.own.map(slot, slab)
        self.host: HostMemory = self.backend.pinned(self.size)
        self.places: dict[str, Arena | HostMemory] = {"lent": self.lent, "own": self.own, "host": self.host}
        self.mirror: dict[str, np.ndarray] = {}
        for seed, (name, place) in enumerate(self.places.items()):
            self.backend.write(place.base, noise(self.size, seed))
            self.mirror[name] = np.frombuffer(noise(self.size, seed), np.uint8).copy()

    def expect(self, target: str, source: str, wanted: Pieces) -> None:
        """Does to the mirror what the copy is to do."""
        to, origin = self.places[target].base, self.places[source].base
        before = self.mirror[source].copy()
        for into, out_of, size in zip(wanted.destinations, wanted.sources, wanted.sizes, strict=True):
            begin, first = int(into) - to, int(out_of) - origin
            self.mirror[target][begin : begin + int(size)] = before[first : first + int(size)]

    def check(self) -> None:
        for name, place in self.places.items():
            found = np.frombuffer(self.backend.read(place.base, self.size), np.uint8)
            wrong = np.flatnonzero(found != self.mirror[name])
            assert not wrong.size, f"{name}: {wrong.size} bytes differ, the first at {wrong[0]}"

    def close(self) -> None:
        for place in self.places.values():
            place.close()


@pytest.fixture
def stage(lending: Lending) -> Iterator[Stage]:
    stage = Stage(lending)
    yield stage
    stage.check()
    stage.close()


@pytest.fixture
def copier(stage: Stage) -> Iterator[Copier]:
    with stage.backend.copier() as copier:
        yield copier


def finish(future: "Future[None]") -> None:
    future.result(timeout=30)


WAYS = [("lent", "own"), ("own", "lent"), ("lent", "host"), ("host", "lent"), ("own", "host"), ("host", "own")]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way[1]}-to-{way[0]}")
@pytest.mark.parametrize("beside_compute", [False, True], ids=["alone", "beside"])
def test_whole_and_scattered(stage: Stage, copier: Copier, way: tuple[str, str], beside_compute: bool) -> None:
    target, source = way
    to, origin = stage.places[target].base, stage.places[source].base
    random = np.random.default_rng(len(target) + 10 * len(source))
    for size in (512, 4096, 16384, stage.size // 2, stage.size):
        count = stage.size // size
        wanted = block_pieces(to, random.permutation(count), origin, random.permutation(count), size)
        finish(copier.copy(wanted, beside_compute=beside_compute))
        stage.expect(target, source, wanted)
        stage.check()


def test_within_one_space(stage: Stage, copier: Copier) -> None:
    half = stage.size // 2 // 4096
    wanted = block_pieces(stage.lent.base, range(half), stage.lent.base, range(half, 2 * half), 4096)
    finish(copier.copy(wanted))
    stage.expect("lent", "lent", wanted)


def test_nothing_to_copy(stage: Stage, copier: Copier) -> None:
    finish(copier.copy(pieces([], [], [])))
    finish(copier.copy(pieces([stage.own.base], [stage.lent.base], [0])))


def random_pieces(random: np.random.Generator, to: int, origin: int, room: int) -> Pieces:
    """Destinations apart from each other, at any address and of any size, in any order; sources anywhere."""
    count = int(random.integers(1, 60))
    marks = np.sort(random.choice(room, 2 * count, replace=False))
    begins, ends = marks[0::2], marks[1::2]
    if random.random() < 0.5:  # aligned as KV blocks are
        begins, ends = begins // 16 * 16, ends // 16 * 16
    sizes = ends - begins
    if random.random() < 0.3:  # neighbours that are to be joined
        sources = begins
    else:
        sources = (random.random(count) * (room - sizes)).astype(np.int64)
        if random.random() < 0.5:
            sources = sources // 16 * 16
    order = random.permutation(count)
    return pieces(to + begins[order], origin + sources[order], sizes[order])


@pytest.mark.parametrize("seed", range(12))
def test_random_pieces_as_numpy_would(stage: Stage, copier: Copier, seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(5):
        target, source = WAYS[int(random.integers(len(WAYS)))]
        wanted = random_pieces(random, stage.places[target].base, stage.places[source].base, stage.size)
        finish(copier.copy(wanted, beside_compute=bool(random.integers(2))))
        stage.expect(target, source, wanted)
        stage.check()


def test_copies_happen_in_the_order_of_the_calls(stage: Stage, copier: Copier) -> None:
    blocks = stage.size // 4096
    futures = []
    for seed in range(20):
        random = np.random.default_rng(seed)
        target, source = WAYS[seed % len(WAYS)]
        wanted = block_pieces(
            stage.places[target].base, random.permutation(blocks), stage.places[source].base,
            random.permutation(blocks), 4096,
        )  # fmt: skip
        futures.append(copier.copy(wanted, beside_compute=seed % 3 == 0))
        stage.expect(target, source, wanted)
    for future in futures:
        finish(future)


@pytest.mark.parametrize(
    ("targets", "sources", "problem"),
    [
        ([0, 100], [8192, 16384], "write the same memory"),
        ([0, 0], [8192, 16384], "write the same memory"),
        ([0], [100], "would write what it reads"),
        ([100], [0], "would write what it reads"),
        ([0], [0], "would write what it reads"),
        ([8192, 0], [4096, 8300], "would write what it reads"),
        ([16384, 0, 8192], [20480, 28672, 4096 + 1], "would write what it reads"),
    ],
)
def test_overlapping_pieces_are_refused_and_nothing_is_copied(
    stage: Stage, copier: Copier, targets: list[int], sources: list[int], problem: str
) -> None:
    base = stage.lent.base
    wanted = pieces([base + at for at in targets], [base + at for at in sources], 4096)
    with pytest.raises(DeviceError, match=problem):
        finish(copier.copy(wanted))
    finish(copier.copy(pieces([base], [stage.own.base], [16])))
    stage.expect("lent", "own", pieces([base], [stage.own.base], [16]))


def test_lists_that_are_none_are_refused() -> None:
    for lists, problem in (
        (([0, 1], [2, 3], [1]), "lists of the same length"),
        ((0, 1, 2), "lists of the same length"),
        (([0], [-1], [1]), "sources of a copy must be integers from 0"),
        (([0.5], [1], [1]), "destinations of a copy must be integers from 0"),
    ):
        with pytest.raises(DeviceError, match=problem):
            pieces(*lists)


class Held(Pieces):
    """Pieces at which a copier stays until it is let go: many empty ones, which are taken out first."""

    there = threading.Event()
    go = threading.Event()

    def part(self, which: Any) -> Pieces:
        self.there.set()
        assert self.go.wait(30)
        return super().part(which)


@contextmanager
def held_up(copier: Copier) -> "Iterator[Future[None]]":
    """The copier is at a copy for as long as this lasts."""
    none = np.zeros(1 << 16, np.uint64)
    Held.there.clear()
    Held.go.clear()
    held = copier.copy(Held(none, none, none))
    try:
        assert Held.there.wait(30)
        yield held
    finally:
        Held.go.set()
    finish(held)


def test_a_copy_that_is_cancelled_in_time_does_not_happen(stage: Stage, copier: Copier) -> None:
    with held_up(copier) as held:
        assert not held.cancel()
        future = copier.copy(pieces([stage.own.base], [stage.lent.base], [100]))
        assert future.cancel()
        kept = copier.copy(pieces([stage.own.base + 100], [stage.lent.base], [100]))
        assert not kept.done()
    with pytest.raises(CancelledError):
        finish(future)
    finish(kept)
    stage.expect("own", "lent", pieces([stage.own.base + 100], [stage.lent.base], [100]))


def test_a_small_copy_does_not_overtake_a_large_one_from_whichever_thread_it_comes(
    stage: Stage, copier: Copier
) -> None:
    first = pieces([stage.own.base], [stage.lent.base], [stage.size])
    second = pieces([stage.host.base], [stage.own.base], [64])  # what the first has written
    third = pieces([stage.own.base], [stage.host.base + 64], [64])  # what the second has read
    with held_up(copier), ThreadPoolExecutor(1) as other:
        futures = [
            copier.copy(first),
            other.submit(copier.copy, second, beside_compute=True).result(30),
            copier.copy(third),
        ]
        assert not any(future.done() for future in futures)
    for future in futures:
        finish(future)
    stage.expect("own", "lent", first)
    stage.expect("host", "own", second)
    stage.expect("own", "host", third)


def test_small_copies_of_many_threads_happen_one_after_the_other(stage: Stage, copier: Copier) -> None:
    half = stage.size // 2
    ways = [pieces([stage.own.base], [stage.lent.base + at], [half]) for at in (0, half)]

    def copy(number: int) -> None:
        for turn in range(50):
            finish(copier.copy(ways[(number + turn) % 2]))

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(copy, number) for number in range(4)]:
            done.result(60)
    found = stage.backend.read(stage.own.base, half)
    whole = stage.backend.read(stage.lent.base, stage.size)
    assert found in (whole[:half], whole[half:]), "bytes of two copies are mixed"
    stage.expect("own", "lent", ways[0 if found == whole[:half] else 1])


def test_a_small_copy_that_nothing_is_before_is_done_on_return(stage: Stage, copier: Copier) -> None:
    if stage.lending.cuda:
        pytest.skip("copies between devices take their time")
    threads: list[int] = []
    wanted = pieces([stage.own.base], [stage.lent.base], [stage.size])
    for large in range(3):
        future = copier.copy(wanted)
        assert future.done()
        future.add_done_callback(lambda _: threads.append(threading.get_ident()))
        stage.expect("own", "lent", wanted)
        with held_up(copier):
            assert not copier.copy(wanted).done(), f"after {large} large ones"
        finish(copier.copy(pieces(*np.zeros((3, 1 << 16), np.uint64))))  # one that is waited for is not before it
    assert threads == [threading.get_ident()] * 3
    overlapping = pieces([stage.own.base], [stage.own.base], [1])
    future = copier.copy(overlapping)
    assert future.done()
    with pytest.raises(DeviceError, match="would write what it reads"):
        finish(future)


def test_a_future_that_is_cancelled_anywhen_tells_what_happened(stage: Stage, copier: Copier) -> None:
    for _ in range(50):
        wanted = pieces([stage.own.base], [stage.lent.base], [stage.size])
        future = copier.copy(wanted)
        if future.cancel():
            with pytest.raises(CancelledError):
                finish(future)
        else:
            finish(future)
            stage.expect("own", "lent", wanted)


async def test_a_copy_is_awaited(stage: Stage, copier: Copier) -> None:
    wanted = pieces([stage.own.base], [stage.lent.base], [stage.size])
    await asyncio.wait_for(asyncio.wrap_future(copier.copy(wanted)), 30)
    stage.expect("own", "lent", wanted)


def test_closing_waits_for_what_is_on_its_way(stage: Stage) -> None:
    copier = stage.backend.copier()
    blocks = stage.size // 4096
    before = threading.active_count()
    futures = []
    for seed in range(10):
        order = np.random.default_rng(seed).permutation(blocks)
        wanted = block_pieces(stage.own.base, range(blocks), stage.lent.base, order, 4096)
        futures.append(copier.copy(wanted))
        stage.expect("own", "lent", wanted)
    copier.close()
    assert all(future.done() for future in futures)
    for future in futures:
        finish(future)
    copier.close()
    assert copier.closed
    assert threading.active_count() < before
    with pytest.raises(DeviceError, match="closed"):
        copier.copy(pieces([], [], []))


def test_copiers_leave_nothing_behind(stage: Stage) -> None:
    def cycle() -> None:
        with stage.backend.copier() as copier:
            finish(copier.copy(pieces([stage.own.base], [stage.lent.base], [stage.size])))

    cycle()
    before = stage.lending.holdings(), threading.active_count()
    for _ in range(5):
        cycle()
    assert (stage.lending.holdings(), threading.active_count()) == before
    stage.expect("own", "lent", pieces([stage.own.base], [stage.lent.base], [stage.size]))


def test_a_copy_comes_after_its_stream(stage: Stage, copier: Copier) -> None:
    wanted = pieces([stage.own.base], [stage.host.base], [stage.size])
    if not stage.lending.cuda:
        with pytest.raises(DeviceError, match="a cpu device has no streams"):
            copier.copy(wanted, after_stream=1)
        return
    cupy = pytest.importorskip("cupy")
    back = pieces([stage.host.base], [stage.own.base], [stage.size])
    with cupy.cuda.Device(stage.backend.device.index):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            view = cupy.asarray(stage.own.buffer())
            work = cupy.ones((4096, 4096), cupy.float32)
            for _ in range(20):
                work = work @ work * 1e-4
            view[:] = 7
        finish(copier.copy(back, after_stream=stream.ptr))
    stage.mirror["own"][:] = 7
    stage.mirror["host"][:] = 7

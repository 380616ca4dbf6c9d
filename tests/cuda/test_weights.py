"""Weights that come and go on the GPU: bit for bit, at the same addresses, under graphs, and at the link's speed.

    python -m pytest -q -s tests/cuda/test_weights.py

prints what each part of an eviction and a restore took, beside the link's own speed.
"""

import time
from collections.abc import Callable, Iterator

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from forebay.gpu.backend import MemoryBackend, MemorySlab, memory_backend
from forebay.gpu.errors import DeviceError
from forebay.gpu.pieces import pieces
from forebay.gpu.weight_range import WeightPlaces, WeightRange

SLAB = 256 << 20
MODEL = 16 << 30
"""An 8B model in bfloat16."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def backend() -> Iterator[MemoryBackend]:
    torch.zeros(1, device="cuda:0")  # torch's context is the one that is retained
    with memory_backend("cuda:0") as backend:
        yield backend


@pytest.fixture
def places(backend: MemoryBackend) -> Iterator[WeightPlaces]:
    with WeightPlaces(backend, SLAB) as places:
        yield places


def timed(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def say(what: str, seconds: float, size: int = 0) -> None:
    speed = f"{size / seconds / 1e9:8.1f} GB/s" if size else ""
    print(f"\n{what:60} {seconds * 1e3:10.1f} ms {speed}", end="")


def filled(weights: WeightRange, size: int, seed: int) -> list[torch.Tensor]:
    """Random bits in tensors of some MiB."""
    chance = torch.Generator("cuda:0").manual_seed(seed)
    tensors = []
    while size > 0:
        rows = min(size, 100 << 20) // 8192
        tensor = weights.allocate((rows, 4096), torch.bfloat16)
        tensor.view(torch.int16).random_(-(1 << 15), (1 << 15) - 1, generator=chance)
        tensors.append(tensor)
        size -= 100 << 20
    return tensors


def sums(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Of each tensor its address, and a number that depends on every bit and its place."""
    found = []
    for tensor in tensors:
        numbers = tensor.view(torch.int64).flatten()
        places = torch.arange(len(numbers), device=numbers.device)
        found.append((tensor.data_ptr(), int((numbers * (2 * places + 1)).sum())))
    return found


def test_weights_come_back_bit_for_bit_at_the_same_addresses(places: WeightPlaces) -> None:
    with places.range(3 << 30) as weights, places.range(3 << 30) as other:
        tensors, others = filled(weights, 2 << 30, 1), filled(other, 2 << 30, 2)
        before, before_others = sums(tensors), sums(others)
        other.evict()
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
        for round_number in range(3):
            weights.evict()
            other.restore()
            assert sums(others) == before_others, f"round {round_number}"
            other.evict()
            weights.restore()
            assert sums(tensors) == before, f"round {round_number}"
        torch.cuda.synchronize()
        assert torch.cuda.mem_get_info()[0] >= free - (1 << 30), "memory was taken again and again"


def test_graphs_that_know_the_weights_replay_after_a_restore(places: WeightPlaces) -> None:
    with places.range(1 << 30) as weights:
        first = weights.allocate((4096, 4096), torch.bfloat16).normal_(std=0.02)
        second = weights.allocate((4096, 4096), torch.bfloat16).normal_(std=0.02)
        rows = torch.randn(8, 4096, device="cuda:0", dtype=torch.bfloat16)
        out = torch.empty_like(rows)

        def pass_() -> None:
            out.copy_(torch.relu(rows @ first.T) @ second.T)

        pass_()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            pass_()
        graph.replay()
        torch.cuda.synchronize()
        expected = out.clone()
        for _ in range(3):
            weights.evict()
            with places.range(1 << 30) as other:
                other.allocate((512 << 20,), torch.uint8).fill_(255)
                torch.cuda.synchronize()
            weights.restore()
            out.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, expected)


def test_other_models_compute_meanwhile(places: WeightPlaces) -> None:
    """Weights move while another stream works on weights that stay: those are right, and the work is hardly slower."""
    with places.range(4 << 30) as moving, places.range(1 << 30) as staying:
        filled(moving, 4 << 30, 1)
        square = staying.allocate((8192, 8192), torch.bfloat16).normal_(std=0.02)
        rows = torch.randn(8192, 8192, device="cuda:0", dtype=torch.bfloat16)
        expected = rows @ square.T
        torch.cuda.synchronize()

        found: list[torch.Tensor] = []

        def products(count: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
            stream = torch.cuda.Stream()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(stream):
                begin.record()
                for _ in range(count):
                    found[:] = [rows @ square.T]
                end.record()
            return begin, end

        begin, end = products(50)
        torch.cuda.synchronize()
        alone = begin.elapsed_time(end)
        assert torch.equal(found[0], expected)
        moving.evict()
        begin, end = products(50)
        started = time.perf_counter()
        moving.restore()
        restoring = time.perf_counter() - started
        torch.cuda.synchronize()
        beside = begin.elapsed_time(end)
        print(
            f"\n50 products: alone {alone:.1f} ms, beside a restore {beside:.1f} ms (restore {restoring * 1e3:.0f} ms)"
        )
        assert torch.equal(found[0], expected)


def test_how_fast_an_8b_model_moves(backend: MemoryBackend, places: WeightPlaces) -> None:
    """Not slower than twice what the link needs, once the host's copy is there."""
    with backend.pinned(SLAB) as host:
        with places.range(SLAB) as piece:
            piece.allocate((SLAB,), torch.uint8)
            link = min(
                timed(lambda: places.copier.copy(pieces([piece.base], [host.base], SLAB)).result()) for _ in range(5)
            )
    say("host to device, one slab of 256 MiB", link, SLAB)
    made: list[MemorySlab] = []
    say("cuMemCreate and zero, one slab", timed(lambda: made.append(backend.slab(SLAB))))
    with made.pop() as slab, backend.arena(SLAB, 1) as arena:
        say("map and set access, one slab", timed(lambda: arena.map(0, slab)))
        say("unmap, one slab", timed(lambda: arena.unmap(0)))
    free, _ = torch.cuda.mem_get_info()
    size = min(MODEL, free // 2 // SLAB * SLAB)
    with places.range(size) as weights:
        say(f"filling {size >> 20} MiB with made-up weights", timed(lambda: filled(weights, size - SLAB, 1)), size)
        moved = len(weights._slabs) * SLAB
        say("pinning the host's copy", timed(lambda: places.shelf.take("pinned", len(weights._slabs))), moved)
        places.shelf.drop("pinned")
        say("first eviction (copies to the host)", timed(weights.evict), moved)
        restores = []
        for _ in range(3):
            restores.append(timed(weights.restore))
            say("restore", restores[-1], moved)
            say("eviction with the copy kept", timed(weights.evict), moved)
        weights.restore()
        with places.range(size) as other:
            other.allocate((size,), torch.uint8)
            other.evict()
            weights.evict()
            swap = timed(lambda: (other.restore(), other.evict(), weights.restore()))
            say("two models change places twice", swap, 2 * moved)
    print()
    ideal = link * moved / SLAB
    print(f"the link alone would need {ideal * 1e3:.0f} ms; a restore took {min(restores) / ideal:.2f} times that")
    assert min(restores) <= 2 * ideal


def test_a_full_device_says_so_and_changes_nothing(places: WeightPlaces) -> None:
    with places.range(1 << 40) as weights:
        with pytest.raises(DeviceError, match="MEMORY"):
            weights.allocate((1 << 40,), torch.uint8)
    places.stock.close()
    with places.range(SLAB) as weights:
        weights.allocate((SLAB,), torch.uint8).fill_(1)
        torch.cuda.synchronize()

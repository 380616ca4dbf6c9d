"""How fast host memory is made that a device can address, by which way and by how many threads, and what each step of
moving a slab to it takes. What is asked back goes there, so a borrower makes it ahead (runtime/host_stock.py)."""

import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from forebay.bench.figures import Figure
from forebay.bench.link_sweep import SLAB_BYTES, text_of
from forebay.gpu.backend import MemoryBackend, memory_backend
from forebay.gpu.machine_memory import available
from forebay.gpu.memory import Slab, SlabRange

THREADS = (1, 4, 8)
SLABS = 16
SHARE_OF_MEMORY = 4
"""All that is made at once is a quarter of what the machine has, or less."""

STEPS = 8

Held = Any


def host_memory(own: str, largest: int) -> Iterator[tuple[str, Figure]]:
    """Each way beside itself with one thread; each step beside the copy alone."""
    with memory_backend(own) as memory:
        slab = max(memory.granularity, min(SLAB_BYTES, largest) // memory.granularity * memory.granularity)
        count = max(1, min(SLABS, available() // SHARE_OF_MEMORY // slab))
        for name, way in _ways(memory, slab).items():
            alone = 0.0
            for threads in THREADS:
                rate = _rate(way, count, slab, threads)
                alone = alone or rate
                yield f"host_{name}_{threads}_threads", Figure(rate / 1e9, "GB/s", alone / 1e9)
        yield from _steps(memory, slab)


def _ways(memory: MemoryBackend, slab: int) -> dict[str, Callable[[], Held]]:
    """What each makes holds its memory until it is closed."""

    def ready() -> Held:
        made = memory.host_slab(slab, zero=False)
        memory.prepare(made)
        return made

    ways = {
        "slab": lambda: memory.host_slab(slab, zero=False),
        "slab_zero": lambda: memory.host_slab(slab),
        "slab_ready": ready,
        "pinned": lambda: memory.pinned(slab),
    }
    if memory.device.kind == "cuda":
        ways["registered"] = lambda: Registered(memory, slab)
    return ways


class Registered:
    """A memfd with all its pages, mapped, and then pinned by the driver (it can lie in no arena)."""

    def __init__(self, memory: Any, size: int) -> None:
        self._context = memory.context
        with ExitStack() as undo:
            self._range = SlabRange(size, 1)
            undo.callback(self._range.close)
            with Slab(size) as slab:
                slab.populate()
                self._range.map(0, slab)
            with self._context.current() as driver:
                flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
                self._context.call(driver.cuMemHostRegister(self._range.base, size, flags))
            undo.pop_all()

    def close(self) -> None:
        with self._context.current() as driver:
            self._context.call(driver.cuMemHostUnregister(self._range.base))
        self._range.close()


def _rate(way: Callable[[], Held], count: int, slab: int, threads: int) -> float:
    """Bytes a second."""
    made: list[Held] = []
    try:
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(lambda _: None, range(threads)):
                pass  # the threads are there
            begin = time.perf_counter()
            made += pool.map(lambda _: way(), range(count))
            return count * slab / (time.perf_counter() - begin)
    finally:
        for held in made:
            held.close()


def _steps(memory: MemoryBackend, slab: int) -> Iterator[tuple[str, Figure]]:
    """Of moving one slab of the device's to the host."""
    times: dict[str, list[float]] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        times.setdefault(name, []).append(time.perf_counter() - begin)

    with memory.arena(slab, 1) as arena:
        for _ in range(STEPS):
            with timed("device_slab"):
                own = memory.slab(slab)
            with own, timed("map_device"):
                arena.map(0, own)
            with timed("make"):
                host = memory.host_slab(slab, zero=False)
            with host:
                with timed("prepare"):
                    memory.prepare(host)
                with timed("copy"):
                    memory.fill(host, arena.base)
                with timed("replace"):
                    arena.replace(0, host)
                with timed("zero"):
                    memory.zero(host)
                with timed("close"):
                    host.close()
                with timed("unmap"):
                    arena.unmap(0)
    copy = statistics.median(times["copy"])
    for name, taken in times.items():
        yield f"host_step_{name}_{text_of(slab)}", Figure(1000 * statistics.median(taken), "ms", 1000 * copy)

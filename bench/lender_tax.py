"""What lending costs a lender: products on its device, while a borrower writes and reads what it lent."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from forebay.bench.errors import BenchError
from forebay.bench.figures import Figure
from forebay.bench.lending_processes import LenderProcess, SchedulerProcess
from forebay.bench.link_sweep import BLOCK_BYTES, IN_FLIGHT, SLAB_BYTES, Route, finish, scattered, text_of
from forebay.gpu.backend import Arena, MemoryBackend, memory_backend
from forebay.gpu.copies import Copier
from forebay.runtime.client import Borrower, HeldLease

LENDER_GPU, BORROWER_GPU = 1, 0
LENT_BYTES = 512 << 20
SMALL_BYTES = 64 << 10
READY_S = 60.0


def tax(
    scheduler: SchedulerProcess, own: str, neighbour: str, largest: int, seconds: float
) -> Iterator[tuple[str, Figure]]:
    """The lender's products beside the borrower's copies and alone, and the copies beside the products and alone."""
    with ExitStack() as held:
        memory = held.enter_context(memory_backend(own))
        with memory_backend(neighbour) as other:
            granularity = max(memory.granularity, other.granularity)
        slab = max(granularity, BLOCK_BYTES, min(SLAB_BYTES, largest // 4))
        size = max(2, min(LENT_BYTES, largest) // slab) * slab
        lender = held.enter_context(LenderProcess(scheduler, LENDER_GPU, neighbour, slab))
        lender.offer(size)
        borrower = held.enter_context(Borrower(scheduler.endpoint, BORROWER_GPU, own, slab_bytes=slab))
        lent = held.enter_context(_lent(borrower, memory, size, slab))
        mine = held.enter_context(memory.arena(slab, size // slab))
        for slot in range(mine.slots):
            with memory.slab(slab) as made:
                mine.map(slot, made)
        copier = held.enter_context(memory.copier())
        alone = _products(lender, seconds)
        for block in (BLOCK_BYTES, SMALL_BYTES):
            for way, target, source in (("out", lent.base, mine.base), ("in", mine.base, lent.base)):
                route = Route(way, target, source)
                raw = _copy(copier, route, block, size, seconds)
                lender.compute()
                rate = _copy(copier, route, block, size, seconds)
                products = lender.computed()
                yield f"tax_products_{way}_{text_of(block)}", Figure(products, "1/s", alone)
                yield f"tax_copy_{way}_{text_of(block)}", Figure(rate / 1e9, "GB/s", raw / 1e9)


@contextmanager
def _lent(borrower: Borrower, memory: MemoryBackend, size: int, slab: int) -> Iterator[Arena]:
    """An arena of this process's own, as an engine has one, full of what was borrowed."""
    if not borrower.ready(READY_S):
        raise BenchError(borrower.status().reason)
    leases, reason = borrower.obtain(size, _keep)
    with memory.arena(slab, size // slab) as arena:
        for lease in leases:
            for _, made in sorted(lease.slabs.items()):
                assert made is not None, "slabs are open until they are mapped"
                arena.map(len(arena.mapped), made)
            borrower.mapped(lease)
        if len(arena.mapped) < arena.slots:
            raise BenchError(f"only {len(arena.mapped)} of {arena.slots} slabs were lent: {reason}")
        yield arena
    for lease in leases:
        borrower.let_go(lease, tuple(lease.slabs))


def _keep(lease: HeldLease, numbers: frozenset[int], deadline_s: float, reason: str) -> None:
    """Nobody asks for it back while it is measured."""


def _products(lender: LenderProcess, seconds: float) -> float:
    lender.compute()
    time.sleep(seconds)
    return lender.computed()


def _copy(copier: Copier, route: Route, block: int, size: int, seconds: float) -> float:
    """Bytes a second, after one copy for the system to find the memory."""
    wanted, copied = scattered(route, block, size), 0
    finish(copier, [wanted])
    begin = time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < seconds:
        finish(copier, [wanted] * IN_FLIGHT)
        copied += IN_FLIGHT * wanted.bytes
    return copied / elapsed

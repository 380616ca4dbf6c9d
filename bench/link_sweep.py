"""How fast pieces of every size go between a device's own memory, a neighbour's lent memory and the host.

Every figure has the raw copy of the same run beside it: one plain copy of one large piece the same way, by the driver
(memmove on the CPU), repeated without a pause. Lent memory takes the real way: a slab of the lender, exported as a
descriptor, adopted and mapped by the borrower.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np

from forebay.bench.figures import Figure
from forebay.bench.products import Products
from forebay.gpu.backend import Arena, MemoryBackend
from forebay.gpu.copies import Copier
from forebay.gpu.pieces import Pieces, block_pieces

SIZES = tuple(kib << 10 for kib in (4, 16, 64, 256, 1 << 10, 2 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20))
SLAB_BYTES = 256 << 20
SCATTERED_BYTES = 256 << 20
"""Moved by one scattered copy, or as much as there is."""

SEQUENCE_BYTES = 512 << 20
BLOCK_BYTES = 2 << 20
"""A sequence of 4,096 tokens of the Llama-3.1-8B shape: 32 layers x 2 x 8 KV heads x 128 x 2 bytes a token, in blocks
of 16 tokens that hold all layers."""

BESIDE_SIZES = (16 << 10, 64 << 10, 256 << 10, 2 << 20)
IN_FLIGHT = 4
REPEATS = 5
RAW_BYTES = 256 << 20


@dataclass(frozen=True)
class Route:
    """`name` says between what and which way: `peer_out` writes a neighbour's memory, `peer_in` reads it."""

    name: str
    target: int
    source: int


def sweep(
    borrower: MemoryBackend, lender: MemoryBackend | None, largest: int, seconds: float, held: ExitStack
) -> Iterator[tuple[str, Figure]]:
    """Figures by name; pieces up to `largest` bytes, `seconds` for each one beside products. `held` keeps the memory.
    Without a lender, copies to and from the host alone."""
    room = max(largest, min(SEQUENCE_BYTES, 8 * largest))
    own = _arena(borrower, borrower, room, held)
    host = held.enter_context(borrower.pinned(room))
    routes = [Route("host_out", host.base, own.base), Route("host_in", own.base, host.base)]
    if lender is not None:
        lent = _arena(borrower, lender, room, held)
        routes = [Route("peer_out", lent.base, own.base), Route("peer_in", own.base, lent.base), *routes]
    copier = held.enter_context(borrower.copier())
    raws: dict[str, float] = {}
    for route in routes:
        size = min(RAW_BYTES, room)
        (raw,) = _rates(IN_FLIGHT * size, partial(_move, borrower, route, size, IN_FLIGHT))
        raws[route.name] = raw
        yield f"{route.name}_raw", Figure(raw / 1e9, "GB/s")
        yield from _sizes(borrower, copier, route, room, largest)
        yield _sequence(borrower, copier, route, min(SEQUENCE_BYTES, room))
    if lender is not None:
        for way in ("out", "in"):
            yield f"peer_over_host_{way}", Figure(raws[f"peer_{way}"] / raws[f"host_{way}"], "x")
    products = Products(str(borrower.device))
    for route in routes:
        yield from _beside(copier, products, route, min(SCATTERED_BYTES, room), seconds, raws[route.name])


def _arena(borrower: MemoryBackend, lender: MemoryBackend, room: int, held: ExitStack) -> Arena:
    """The borrower's, of slabs of the lender."""
    size = min(SLAB_BYTES, room)
    arena = held.enter_context(borrower.arena(size, -(-room // size)))
    for slot in range(arena.slots):
        with lender.slab(size) as slab:
            if lender is borrower:
                arena.map(slot, slab)
                continue
            with borrower.adopt(os.dup(slab.fileno()), size) as adopted:
                arena.map(slot, adopted)
    # Touched, and not zero: the system has to find the memory before the measurement.
    for offset in range(0, arena.size, size):
        borrower.write(arena.base + offset, np.random.default_rng(offset).bytes(1 << 20) * (size >> 20))
    return arena


def _rates(copied: int, *runs: Callable[[], object]) -> list[float]:
    """Bytes a second of each, the median of REPEATS after one to warm up; they take turns."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(1 + REPEATS):
        for run, taken in zip(runs, times, strict=True):
            begin = time.perf_counter()
            run()
            taken.append(time.perf_counter() - begin)
    return [copied / statistics.median(taken[1:]) for taken in times]


def _figure(copied: int, ours: Callable[[], object], plain: Callable[[], object]) -> Figure:
    rate, raw = _rates(copied, ours, plain)
    return Figure(rate / 1e9, "GB/s", raw / 1e9)


def _sizes(
    backend: MemoryBackend, copier: Copier, route: Route, room: int, largest: int
) -> Iterator[tuple[str, Figure]]:
    total = min(SCATTERED_BYTES, room)
    for size in SIZES:
        if size > largest:
            break
        # Single pieces all over the place, so that no cache holds them.
        wholes = scattered(route, size, room if size > total else total)
        wholes = wholes.part(slice(max(1, min(64, RAW_BYTES // size))))
        single = [wholes.part(slice(number, number + 1)) for number in range(len(wholes))]
        figure = _figure(wholes.bytes, partial(finish, copier, single), partial(_move_each, backend, wholes))
        yield f"{route.name}_whole_{text_of(size)}", figure
        if 2 * size > total:
            continue
        lists, plain = [scattered(route, size, total)] * IN_FLIGHT, partial(_move, backend, route, total, IN_FLIGHT)
        figure = _figure(IN_FLIGHT * lists[0].bytes, partial(finish, copier, lists), plain)
        yield f"{route.name}_scattered_{text_of(size)}", figure


def _move(backend: MemoryBackend, route: Route, size: int, count: int) -> None:
    """The plainest call there is."""
    for _ in range(count):
        backend.move(route.target, route.source, size)


def _move_each(backend: MemoryBackend, wanted: Pieces) -> None:
    for target, source, size in zip(
        wanted.destinations.tolist(), wanted.sources.tolist(), wanted.sizes.tolist(), strict=True
    ):
        backend.move(target, source, size)


def finish(copier: Copier, lists: list[Pieces], *, beside_compute: bool = False) -> None:
    """Copies all lists, one behind the other; returns when the last byte is there."""
    for future in [copier.copy(wanted, beside_compute=beside_compute) for wanted in lists]:
        future.result()


def scattered(route: Route, size: int, total: int) -> Pieces:
    """`total` bytes in pieces of `size`, in an order by chance at both ends."""
    random, count = np.random.default_rng(size), total // size
    return block_pieces(route.target, random.permutation(count), route.source, random.permutation(count), size)


def _sequence(backend: MemoryBackend, copier: Copier, route: Route, size: int) -> tuple[str, Figure]:
    """One swap by itself, from the call to the last byte. The baseline is what the link needs for it."""
    wanted = [scattered(route, BLOCK_BYTES, size)]
    rate, raw = _rates(size, partial(finish, copier, wanted), partial(_move, backend, route, size, 1))
    return f"{route.name}_sequence_{text_of(size)}", Figure(1000 * size / rate, "ms", 1000 * size / raw)


def _beside(
    copier: Copier, products: Products, route: Route, total: int, seconds: float, raw: float
) -> Iterator[tuple[str, Figure]]:
    with products:
        time.sleep(seconds)
    alone = products.rate
    for size in BESIDE_SIZES:
        wanted, copied = scattered(route, size, total), 0
        with products:
            begin = time.perf_counter()
            while (elapsed := time.perf_counter() - begin) < seconds:
                finish(copier, [wanted] * IN_FLIGHT, beside_compute=True)
                copied += IN_FLIGHT * wanted.bytes
        yield f"{route.name}_beside_{text_of(size)}", Figure(copied / elapsed / 1e9, "GB/s", raw / 1e9)
        yield f"{route.name}_products_beside_{text_of(size)}", Figure(products.rate, "1/s", alone)


def text_of(size: int) -> str:
    """`64KiB`"""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size % unit == 0:
            return f"{size // unit}{name}"
    return f"{size}B"

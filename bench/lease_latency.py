"""How soon memory is granted and usable, and how soon its lender has it back, between real processes."""

import asyncio
import statistics
import time
from collections.abc import Iterator
from functools import partial

import numpy as np
import zmq

from forebay.bench.errors import BenchError
from forebay.bench.figures import Figure
from forebay.bench.lending_processes import LenderProcess, SchedulerProcess
from forebay.bench.link_sweep import SLAB_BYTES, text_of
from forebay.gpu.backend import MemoryBackend, memory_backend
from forebay.runtime.client import Borrower, Loan
from forebay.runtime.loop import run
from forebay.runtime.party import Identity, Party, party_name
from forebay.transport.messages import Borrow, Granted, Release, ToParty

GRANTS = 500
SLABS = 8
"""Slabs on offer while grants are measured: what came back is zeroed while the next are granted."""

FEWEST_SLABS = 4
"""Taken back at once, or more."""

RECLAIMS = 3
MARK_BYTES = 1 << 20
WAIT_S = 60.0
PAUSE_S = 0.001
LENDER_GPU, OTHER_GPU, BORROWER_GPU = 1, 2, 0


def grants(scheduler: SchedulerProcess, own: str, neighbour: str, largest: int) -> Iterator[tuple[str, Figure]]:
    """Beside a plain round trip, and beside the same memory made and mapped in one process."""
    with memory_backend(own) as memory, memory_backend(neighbour) as other:
        slab = _slab_bytes(max(memory.granularity, other.granularity), largest)
        with LenderProcess(scheduler, LENDER_GPU, neighbour, slab) as lender:
            lender.offer(SLABS * slab)
            plain = _plain_round_trips(lender, scheduler)
            yield from _percentiles("grant", run(_grants(scheduler.endpoint, slab)), plain)
            lender.await_free(SLABS * slab)
            ours = _usable(scheduler.endpoint, own, slab)
            yield from _percentiles(f"usable_{text_of(slab)}", ours, _made_here(memory, other, slab))


def _slab_bytes(granularity: int, most: int) -> int:
    return max(granularity, min(SLAB_BYTES, most) // granularity * granularity)


def _percentiles(name: str, ours: list[float], plain: list[float]) -> Iterator[tuple[str, Figure]]:
    for title, share in (("p50", 0.5), ("p99", 0.99)):
        value, baseline = (sorted(times)[int(share * len(times))] for times in (ours, plain))
        yield f"{name}_{title}", Figure(1000 * value, "ms", 1000 * baseline)


def _plain_round_trips(lender: LenderProcess, scheduler: SchedulerProcess) -> list[float]:
    """Of a grant's size, between two blocking sockets."""
    endpoint, times, data = f"ipc://{scheduler.folder}/echo", list[float](), bytes(256)
    lender.echo(endpoint)
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.connect(endpoint)
        for _ in range(GRANTS):
            begin = time.perf_counter()
            socket.send(data)
            socket.recv()
            times.append(time.perf_counter() - begin)
        socket.send(b"")
    return times


async def _grants(endpoint: str, size: int) -> list[float]:
    """From the Borrow to the Granted, on a party's own link; what is granted is released at once."""
    granted: asyncio.Queue[Granted] = asyncio.Queue()

    def on_message(message: ToParty) -> None:
        if isinstance(message, Granted):
            granted.put_nowait(message)

    identity = Identity(party_name("borrower", BORROWER_GPU), BORROWER_GPU, "", "", size)
    party = Party(endpoint, identity, lambda: ((), (), ()), on_message, lambda: None)
    times: list[float] = []
    try:
        async with asyncio.timeout(WAIT_S):
            if not await party.wait_attached(WAIT_S):
                raise BenchError(party.reason)
            number = 0
            while len(times) < GRANTS:
                number += 1
                begin = time.perf_counter()
                party.send(Borrow(number, size))
                answer = await granted.get()
                taken = time.perf_counter() - begin
                for grant in answer.grants:
                    party.send(Release(grant.lease, grant.epoch, grant.slabs))
                if answer.grants:
                    times.append(taken)
                else:
                    await asyncio.sleep(PAUSE_S)  # all of it is being zeroed
    except TimeoutError:
        raise BenchError(f"only {len(times)} of {GRANTS} grants came within {WAIT_S:g} s") from None
    finally:
        party.close("measured")
    return times


def _usable(endpoint: str, own: str, slab: int) -> list[float]:
    """From the call to memory that is mapped."""
    times: list[float] = []
    deadline = time.monotonic() + 2 * WAIT_S
    with Borrower(endpoint, BORROWER_GPU, own, slab_bytes=slab) as borrower:
        if not borrower.ready(WAIT_S):
            raise BenchError(borrower.status().reason)
        while len(times) < GRANTS:
            if time.monotonic() > deadline:
                raise BenchError(f"only {len(times)} of {GRANTS} loans came within {2 * WAIT_S:g} s")
            begin = time.perf_counter()
            loan = borrower.allocate(slab, host=False)
            taken = time.perf_counter() - begin
            with loan:
                if not loan.bytes:
                    time.sleep(PAUSE_S)  # all of it is being zeroed
                    continue
                times.append(taken)
                loan.write(slab - 1, b"x")
    return times


def _made_here(memory: MemoryBackend, other: MemoryBackend, slab: int) -> list[float]:
    times: list[float] = []
    for _ in range(GRANTS):
        begin = time.perf_counter()
        with other.slab(slab) as made, memory.arena(slab, 1) as arena:
            # A slab of another device is known here as one that was handed over.
            arena.map(0, made)
            times.append(time.perf_counter() - begin)
            arena.unmap(0)
    return times


# Taking back ----------------------------------------------------------------------------------------------------------


def reclaim(scheduler: SchedulerProcess, own: str, neighbour: str, size: int) -> Iterator[tuple[str, Figure]]:
    """A lender takes `size` bytes back that hold data: they move to the host, or to another lender, which is on the
    borrower's own device, so that they cross the link once. Beside a raw copy of as much to the same place."""
    with memory_backend(own) as memory, memory_backend(neighbour) as other:
        granularity = max(memory.granularity, other.granularity)
        slab = _slab_bytes(granularity, size // FEWEST_SLABS)
        size = max(FEWEST_SLABS, size // slab) * slab
        lender = partial(LenderProcess, scheduler, slab_bytes=slab)
        with Borrower(
            scheduler.endpoint,
            BORROWER_GPU,
            own,
            slab_bytes=slab,
            ready_bytes=size,
            return_s=None,
            grant_s=10,
            handover_s=10,
        ) as borrower:
            with lender(LENDER_GPU, neighbour) as first:
                waits, runs = list[float](), list[tuple[float, float]]()
                for _ in range(RECLAIMS):
                    waited, *times = _to_host(memory, borrower, first, size, slab)
                    waits.append(waited)
                    runs.append((times[0], times[1]))
                yield f"host_ready_{text_of(size)}", Figure(1000 * waits[0], "ms")
                yield _reclaimed("host", size, runs)
                with lender(OTHER_GPU, own) as second:
                    runs = [_to_lender(memory, borrower, first, second, size, slab) for _ in range(RECLAIMS)]
                    yield _reclaimed("lender", size, runs)


def _reclaimed(place: str, size: int, runs: list[tuple[float, float]]) -> tuple[str, Figure]:
    ours, raw = (statistics.median(times) for times in zip(*runs, strict=True))
    return f"reclaim_to_{place}_{text_of(size)}", Figure(1000 * ours, "ms", 1000 * raw)


def _to_host(
    memory: MemoryBackend, borrower: Borrower, lender: LenderProcess, size: int, slab: int
) -> tuple[float, float, float]:
    """Seconds until there is a place on the host for all that was lent, of taking it back, and of the raw copy."""
    lender.offer(size)
    with _lent(borrower, size) as loan:
        waited = _until_ready(borrower, size)
        marks = _fill(memory, loan, slab)
        with memory.pinned(slab) as host:
            raw = _raw_seconds(memory, loan, [host.base] * (size // slab), slab)
        taken = lender.take_back(size)
        _require(loan, "host", marks, slab)
    return waited, taken, raw


def _until_ready(borrower: Borrower, size: int) -> float:
    begin = time.perf_counter()
    while (ready := borrower.status().ready) < size:
        if time.perf_counter() - begin > WAIT_S:
            print(f"only {ready} of {size} bytes of the host could be made ready: the rest is made when it is needed")
            break
        time.sleep(PAUSE_S)
    return time.perf_counter() - begin


def _to_lender(
    memory: MemoryBackend, borrower: Borrower, first: LenderProcess, second: LenderProcess, size: int, slab: int
) -> tuple[float, float]:
    first.offer(size)
    with _lent(borrower, size) as loan:
        marks = _fill(memory, loan, slab)
        second.offer(size)
        with _lent(borrower, size) as new, new.hold():
            raw = _raw_seconds(memory, loan, [new.address + offset for offset in range(0, size, slab)], slab)
        second.await_free(size)
        taken = first.take_back(size)
        _require(loan, "peer", marks, slab)
    second.await_free(size)
    second.take_back(size)
    return taken, raw


def _lent(borrower: Borrower, size: int) -> Loan:
    loan = borrower.allocate(size, host=False)
    if loan.bytes < size:
        raise BenchError(f"only {loan.bytes} of {size} bytes were lent: {loan.reason}")
    return loan


def _fill(memory: MemoryBackend, loan: Loan, slab: int) -> list[bytes]:
    """Data in every page; each slab's own mark is what is in it everywhere."""
    mark_bytes, marks = min(MARK_BYTES, slab), list[bytes]()
    with loan.hold():
        for offset in range(0, loan.bytes, slab):
            begin, filled = loan.address + offset, mark_bytes
            marks.append(np.random.default_rng(offset).bytes(mark_bytes))
            memory.write(begin, marks[-1])
            while filled < slab:
                more = min(filled, slab - filled)
                memory.move(begin + filled, begin, more)
                filled += more
    return marks


def _raw_seconds(memory: MemoryBackend, loan: Loan, targets: list[int], slab: int) -> float:
    """The plainest copy of all of it, slab by slab, after one to warm up."""
    times: list[float] = []
    with loan.hold():
        for _ in range(2):
            begin = time.perf_counter()
            for number, target in enumerate(targets):
                memory.move(target, loan.address + number * slab, slab)
            times.append(time.perf_counter() - begin)
    return times[-1]


def _require(loan: Loan, where: str, marks: list[bytes], slab: int) -> None:
    """Raises BenchError unless it is there, whole."""
    if loan.where != where:
        raise BenchError(f"what was taken back is at {loan.where} now, not at {where}: {loan.reason}")
    for number, mark in enumerate(marks):
        for offset in (number * slab, (number + 1) * slab - len(mark)):
            if loan.read(offset, len(mark)) != _mark_at(mark, offset - number * slab):
                raise BenchError(f"the bytes at {offset} are others since they moved")


def _mark_at(mark: bytes, offset: int) -> bytes:
    turn = offset % len(mark)
    return mark[turn:] + mark[:turn]

"""A worker's memory beyond its pool: the spill arena, copies to and from it, and what is borrowed and lent.

What is copied, borrowed, lent and given back the lane core decides; here it is done, in threads of their own, and what
became of it is told to the core as an event. Nothing here waits.
"""

import asyncio
import math
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import ExitStack
from contextvars import copy_context
from pathlib import Path
from typing import Any

from forebay.gpu.backend import memory_backend
from forebay.gpu.device import Device
from forebay.gpu.errors import DeviceError
from forebay.gpu.machine_memory import available
from forebay.gpu.memory import Slab
from forebay.gpu.pieces import block_pieces
from forebay.runtime.client import Borrower, HeldLease, Lender
from forebay.runtime.recording import LaneSettings
from forebay.runtime.spill_checks import SpillChecks
from forebay.runtime.worker_lending import WorkerLending
from forebay.runtime.worker_neighbour import WorkerNeighbour
from forebay.sched.cost_table import parse_costs
from forebay.sched.lane_events import (
    LaneEvent,
    LendSlabs,
    SpillFreed,
    SpillGrew,
    SpillRevoked,
    TakeBackSlabs,
    Tick,
    WantSpill,
)
from forebay.transport.messages import CopyBlocks, CopyDone, CopyFailed, DeviceSettings

ARENA_FACTOR = 2
"""Lent slots of the arena for each slab of the pool. They are addresses only until something is lent."""

SHARE_OF_DEADLINE = 0.8
"""Of a revocation's deadline, for the core; the rest is for unmapping, and for the way of the word."""

MOST_REVOCATION_S = 60.0
"""Deadline for memory that nobody waits for: its lease is over, but it counts against the machine."""

CHECK_VARIABLE = "FOREBAY_CHECK_SPILLS"
"""With this environment variable every spilled block is compared with what was written. For tests: it costs a pass over
the block at each end."""


def host_slots(settings: DeviceSettings) -> int:
    return settings.spill_bytes // settings.slab_bytes


def arena_slots(settings: DeviceSettings) -> int:
    """How many slots the arena has addresses for. A worker borrows if it has a use for it: somewhere to spill to was
    asked for, or a fairness policy that makes sequences give way."""
    borrows = settings.spill_bytes > 0 or settings.fairness != "fcfs"
    return host_slots(settings) + ARENA_FACTOR * (settings.memory // settings.slab_bytes) * borrows


def lane_settings(settings: DeviceSettings, divisible: bool) -> LaneSettings:
    """What the device's lane core is to know of it. `divisible`: its SMs can be shared. Raises OSError, CostError where
    the cost file cannot be read."""
    return LaneSettings(
        settings.memory // settings.slab_bytes,
        settings.slab_bytes,
        settings.policy,
        settings.prefix_cache,
        settings.fairness,
        arena_slots(settings),
        host_slots(settings),
        settings.lend,
        settings.weights,
        weights_memory=settings.weights_memory,
        partition=settings.partition if divisible else "none",
        targets=settings.targets,
        costs=parse_costs(Path(settings.costs).read_bytes(), settings.costs) if settings.costs else (),
        reserve=settings.reserve,
    )


class WorkerMemory:
    """Made in the event loop; `decide` takes events for the lane core and is called in it. `gpu` is the device's name,
    `scheduler` the endpoint through which memory is borrowed and lent. Raises DeviceError, RefusedAddress, OSError."""

    def __init__(
        self,
        gpu: str,
        scheduler: str,
        device: Device,
        settings: DeviceSettings,
        credential: str,
        decide: Callable[[LaneEvent], None],
        log: Any,
    ) -> None:
        self._device = device
        self._slab_bytes = settings.slab_bytes
        self._decide = decide
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()
        self._closing = False
        self._block_bytes: dict[str, int] = {}
        self._slots: dict[int, tuple[HeldLease, int]] = {}
        self._empty = list(range(host_slots(settings), arena_slots(settings)))
        self._copies: set[Future[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._borrowing = False
        self._borrower: Borrower | None = None
        self._lending: WorkerLending | None = None
        self.ticks = settings.lend or bool(self._empty)
        """Whether the core wants to hear that time passes."""
        number = device.name.index
        with ExitStack() as undo:
            self._memory = undo.enter_context(memory_backend(gpu))
            if self._empty:
                self._borrower = undo.enter_context(
                    Borrower(scheduler, number, gpu, slab_bytes=settings.slab_bytes, credential=credential)
                )
            if settings.lend:
                lending = WorkerLending(device.pool, self._memory, self._tell, self._spawn, log)
                lending.lender = undo.enter_context(
                    Lender(
                        scheduler,
                        number,
                        gpu,
                        slab_bytes=settings.slab_bytes,
                        credential=credential,
                        on_yielded=self._from_thread(lending.yielded),
                        on_replaced=lending.replaced,
                    )
                )
                self._lending = lending
            # A CPU device has what its container may have, which can be less than what the machine has.
            free = available if device.name.kind == "cpu" else self._free
            self.neighbour = WorkerNeighbour(device.pool, free, settings.reserve, self._tell, log)
            slots = arena_slots(settings)
            if slots:
                self._arena = undo.enter_context(self._memory.arena(settings.slab_bytes, slots))
                for slot in range(host_slots(settings)):
                    # The slot keeps the memory; the handle is not needed.
                    with self._memory.host_slab(settings.slab_bytes) as slab:
                        if isinstance(slab, Slab):
                            slab.populate()  # a process that touches memory the machine has not got is killed
                        self._arena.map(slot, slab)
                self._copier = undo.enter_context(self._memory.copier())
                self._checks = SpillChecks(self._memory, device.pool.base, self._arena.base)
            self._undo = undo.pop_all()

    def _free(self) -> int:
        return self._memory.memory().free

    def _from_thread(self, callback: Callable[..., None]) -> Callable[..., None]:
        """The callback, in the worker's loop, and with what its log lines carry."""

        def call(*given: object) -> None:
            if not self._closing:
                self._loop.call_soon_threadsafe(callback, *given, context=self._context)

        return call

    def _tell(self, event: LaneEvent) -> None:
        if not self._closing:
            self._decide(event)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and not self._closing and (error := task.exception()) is not None:
            raise error  # in a callback of the loop: the worker ends with it

    def open_model(self, model: str, block_bytes: int) -> None:
        self._block_bytes[model] = block_bytes

    # Copies ----------------------------------------------------------------------------------------------------------

    def copy(self, command: CopyBlocks) -> None:
        block_bytes = self._block_bytes[command.model]
        pool, arena = self._device.pool.base, self._arena.base
        source, target = {"out": (pool, arena), "in": (arena, pool), "move": (arena, arena)}[command.kind]
        future = self._copier.copy(
            block_pieces(target, command.target, source, command.source, block_bytes), beside_compute=True
        )
        self._copies.add(future)
        future.add_done_callback(lambda done: self._copied(command, block_bytes, done))

    def _copied(self, command: CopyBlocks, block_bytes: int, done: "Future[None]") -> None:
        """In the copier's thread, or in the worker's where a small copy is done at once."""
        error = done.exception() or (self._checks.check(command, block_bytes) if CHECK_VARIABLE in os.environ else None)
        self._from_thread(self._landed)(command, done, error)

    def _landed(self, command: CopyBlocks, done: "Future[None]", error: BaseException | None) -> None:
        self._copies.discard(done)
        if error is not None:
            self._log.error("a copy failed; its tokens are computed again", copy=command.kind, error=str(error))
        self._tell(CopyDone(command.copy) if error is None else CopyFailed(command.copy, str(error)))

    # Borrowing -------------------------------------------------------------------------------------------------------

    def want(self, command: WantSpill) -> None:
        """Borrows what there is, unless it is at it already: the core asks again."""
        size = min(command.bytes, len(self._empty) * self._slab_bytes)
        if self._borrower is not None and size and not self._borrowing:
            self._borrowing = True
            self._spawn(self._borrow(self._borrower, size))

    async def _borrow(self, borrower: Borrower, size: int) -> None:
        try:
            leases, reason = await borrower.obtain_async(size, self._from_thread(self._revoked))
            for lease in leases:
                self._map(borrower, lease)
            if leases:
                self._log.info("borrowed", bytes=sum(len(lease.slabs) for lease in leases) * self._slab_bytes)
            else:
                self._log.debug("nothing to borrow", reason=reason)
        finally:
            self._borrowing = False

    def _map(self, borrower: Borrower, lease: HeldLease) -> None:
        slots = []
        for number, slab in list(lease.slabs.items()):
            if slab is None or not self._empty:
                continue
            slot = self._empty.pop(0)
            try:
                self._arena.map(slot, slab)
            except DeviceError as error:
                self._empty.insert(0, slot)
                self._log.error("a borrowed slab cannot be mapped", lender=lease.lender, error=str(error))
                continue
            slab.close()
            lease.slabs[number] = None
            self._slots[slot] = lease, number
            slots.append(slot)
        unused = [number for number, slab in lease.slabs.items() if slab is not None]
        borrower.mapped(lease)
        if unused:
            borrower.let_go(lease, unused)
        if slots:
            self._tell(SpillGrew(tuple(slots)))

    def _revoked(self, lease: HeldLease, numbers: frozenset[int], deadline_s: float, reason: str) -> None:
        slots = tuple(s for s, (holder, number) in sorted(self._slots.items()) if holder is lease and number in numbers)
        if not slots:
            return
        self._log.info("borrowed memory is asked back", slabs=len(slots), deadline_s=deadline_s, reason=reason)
        within = MOST_REVOCATION_S if math.isinf(deadline_s) else SHARE_OF_DEADLINE * deadline_s
        self._tell(SpillRevoked(slots, within))
        self._loop.call_later(within, self._tell, Tick())

    def free(self, command: SpillFreed) -> None:
        """Slots of the arena are empty: their memory goes back."""
        assert self._borrower is not None, "only what was borrowed is given back"
        gone: dict[int, tuple[HeldLease, list[int]]] = {}
        for slot in command.slots:
            lease, number = self._slots.pop(slot)
            self._arena.unmap(slot)
            self._empty.append(slot)
            gone.setdefault(id(lease), (lease, []))[1].append(number)
        for lease, numbers in gone.values():
            self._borrower.let_go(lease, numbers)

    # Lending ---------------------------------------------------------------------------------------------------------

    def lend(self, command: LendSlabs) -> None:
        assert self._lending is not None, "the core lends only where it may"
        self._lending.lend(command)

    def take_back(self, command: TakeBackSlabs) -> None:
        assert self._lending is not None, "the core lends only where it may"
        self._lending.take_back(command)

    def close(self) -> None:
        """Waits for copies, gives back what is borrowed, ends what is lent. Closing twice is fine."""
        self._closing = True
        if self._lending is not None:
            self._lending.close()
        for task in self._tasks:
            task.cancel()
        self._undo.close()

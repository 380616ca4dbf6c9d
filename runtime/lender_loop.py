"""A lender's side of all loans, in its event loop: what the scheduler says, what is offered, and how slabs that came
back are made fit for the next one."""

import asyncio
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from forebay.gpu.backend import MemoryBackend, MemorySlab
from forebay.gpu.errors import DeviceError
from forebay.runtime.background import Background, log
from forebay.runtime.handover import HandoverServer
from forebay.runtime.lender_slabs import LentSlab, SlabTable
from forebay.runtime.lending_errors import LendingError
from forebay.runtime.party import Identity, Party, PartyState
from forebay.runtime.takeback import Reclaimed, TakeBacks
from forebay.transport.messages import Lend, Offer, Returned, ToParty, Yielded

Callback = Callable[..., object]


@dataclass(frozen=True)
class LenderStatus:
    """Bytes of what is offered, by where it is: `free` (nobody's), `lent`, `cleaning` (came back, not yet offered
    again). `leases`: borrower and bytes by lease."""

    party: str
    state: PartyState
    reason: str
    free: int
    lent: int
    cleaning: int
    leases: dict[int, tuple[str, int]]


@dataclass(frozen=True)
class Callbacks:
    """Of whoever lends; see `Lender`."""

    on_lent: Callback | None
    on_returned: Callback | None
    on_yielded: Callable[[Reclaimed], object] | None
    on_replaced: Callable[[MemorySlab, MemorySlab], object] | None


class LenderLoop:
    """Made and used in the loop of `background`. Raises RefusedAddress, OSError."""

    def __init__(
        self,
        scheduler: str,
        identity: Identity,
        background: Background,
        memory: MemoryBackend,
        path: Path,
        socket_mode: int,
        uids: Collection[int],
        callbacks: Callbacks,
    ) -> None:
        self._name = identity.party
        self._slab_bytes = identity.slab_bytes
        self._background = background
        self._memory = memory
        self._callbacks = callbacks
        self._renewed = asyncio.Event()
        self._handover = HandoverServer(path, socket_mode, uids, lambda text: log.warning(text))
        self.table = SlabTable(identity.slab_bytes, self._handover.endpoint)
        try:
            self.party = Party(scheduler, identity, self.table.holdings, self._on_message, self._on_attached)
        except BaseException:
            self._handover.close()
            raise
        self._takebacks = TakeBacks(self.party, self.table, background.loop)

    # For whoever lends ---------------------------------------------------------------------------------------------

    async def offer(self, size: int) -> int:
        count = -(-size // self._slab_bytes)
        if count < 1:
            raise LendingError(f"{size} bytes cannot be offered; offer at least one, it is rounded up to a slab")
        slabs = await self._background.work(self._make, count)
        self._send_offer([self.table.add(slab, ours=True) for slab in slabs])
        return count * self._slab_bytes

    def _make(self, count: int) -> list[MemorySlab]:
        made: list[MemorySlab] = []
        try:
            for _ in range(count):
                made.append(self._memory.slab(self._slab_bytes))  # noqa: PERF401 (undone where one fails)
        except BaseException:
            _close_all(made)
            raise
        return made

    async def offer_slabs(self, slabs: Sequence[MemorySlab]) -> None:
        for slab in slabs:
            if slab.size != self._slab_bytes:
                raise LendingError(f"a slab of {slab.size} bytes cannot be lent here: all have {self._slab_bytes}")
        await self._renew([self.table.add(slab, ours=False, place="cleaning") for slab in slabs], [])

    def _send_offer(self, entries: Sequence[LentSlab]) -> None:
        if entries:
            self.party.send(Offer(tuple(entry.number for entry in entries)))

    async def take_back(self, size: int, deadline_s: float) -> Reclaimed:
        count = -(-size // self._slab_bytes)
        if count < 1 or deadline_s < 0:
            raise LendingError(f"cannot take back {size} bytes within {deadline_s} s; both must be positive")
        while self.table.of("cleaning"):  # it is offered first, and can then be taken
            await self._renewed.wait()
        wait = self._takebacks.open(count, deadline_s)
        try:
            await self._takebacks.run(wait)
        except asyncio.CancelledError:  # nobody waits any more, but what has come is theirs
            if not self._background.closed:
                self._background.spawn(self._unasked(wait.slabs, wait.kept, 0, ()))
            raise
        slabs, kept = await self._settle(wait.slabs, wait.kept)
        return self._takebacks.account(wait, slabs, kept)

    async def status(self) -> LenderStatus:
        sizes = {place: len(self.table.of(place)) * self._slab_bytes for place in ("free", "lent", "cleaning")}
        leases = {
            lease.lease: (lease.borrower, len(lease.slabs) * self._slab_bytes) for lease in self.table.leases.values()
        }
        return LenderStatus(self._name, self.party.state, self.party.reason, **sizes, leases=leases)

    async def close(self) -> None:
        self.party.close("the lender closes")
        await self._handover.aclose()
        _close_all([entry.slab for entry in self.table.slabs.values() if entry.ours])
        self.table.slabs.clear()
        self.table.leases.clear()

    # The scheduler -------------------------------------------------------------------------------------------------

    def _on_attached(self) -> None:
        self._takebacks.ask_again()

    def _on_message(self, message: ToParty) -> None:
        match message:
            case Lend():
                self._lend(message)
            case Returned(lease=lease, epoch=epoch, slabs=slabs, released=released):
                self._returned(lease, epoch, slabs, released)
            case Yielded():
                self._yielded(message)
            case _:
                log.warning("%s: not for a lender: %s", self._name, type(message).__name__)

    def _lend(self, message: Lend) -> None:
        descriptors = self.table.lend(message)
        if descriptors is None:
            log.warning("%s: lease %d is of slabs that are no longer offered", self._name, message.lease)
            return
        self._handover.admit(message.lease, message.epoch, message.token, descriptors)
        self._tell(self._callbacks.on_lent, message.lease, message.borrower, len(descriptors) * self._slab_bytes)

    def _returned(self, lease: int, epoch: int, slabs: Sequence[int], released: bool) -> None:
        known = self.table.leases.get(lease)
        if known is not None and known.epoch > epoch:
            return  # of an earlier life of the lease; it has been told since
        dirty, doubtful = self._come_back(slabs, [] if released else slabs)
        if known is not None:
            size = (len(dirty) + len(doubtful)) * self._slab_bytes
            self._tell(self._callbacks.on_returned, lease, known.borrower, size)
        self._background.spawn(self._renew(dirty, doubtful))

    def _yielded(self, message: Yielded) -> None:
        slabs, kept = self._come_back((*message.slabs, *message.kept), message.kept)
        if self._takebacks.yielded(message, slabs, kept):
            # Freed as it comes: a device takes its time, which would else be added up at the end of the wait.
            self._background.spawn(self._background.work(_close_all, [e.slab for e in (*slabs, *kept) if e.ours]))
            return
        self.table.remove([*slabs, *kept])
        self._background.spawn(self._unasked(slabs, kept, message.missing, message.holders))

    async def _unasked(
        self, slabs: list[LentSlab], kept: list[LentSlab], missing: int, holders: tuple[str, ...]
    ) -> None:
        """Tells of what came back without anybody waiting for it."""
        size = (len(slabs) + len(kept)) * self._slab_bytes
        if not size:
            return
        mine, destroy = await self._settle(slabs, kept)
        log.debug("%s: %d bytes came back", self._name, size)
        reclaimed = Reclaimed(size, tuple(mine), tuple(destroy), missing, holders)
        self._tell(self._callbacks.on_yielded, reclaimed)

    # Slabs that came back ------------------------------------------------------------------------------------------

    def _come_back(self, slabs: Sequence[int], doubtful: Sequence[int]) -> tuple[list[LentSlab], list[LentSlab]]:
        """(to be zeroed, to be destroyed): a process of another user may have kept a mapping, whatever it says."""
        leases = {number: self.table.lease_of(number) for number in slabs}
        foreign = {
            number
            for number, lease in leases.items()
            if lease is not None and self._handover.fetched_by(lease.lease) - {os.getuid()}
        }
        for number, lease in leases.items():
            if lease is not None:
                self._handover.withdraw(lease.lease, [number])
        entries = self.table.come_back(slabs)
        destroy = foreign.union(doubtful)
        return [e for e in entries if e.number not in destroy], [e for e in entries if e.number in destroy]

    async def _settle(self, slabs: list[LentSlab], kept: list[LentSlab]) -> tuple[list[MemorySlab], list[MemorySlab]]:
        """Closes what the lender had made; the rest goes to whoever gave it."""
        ours = [entry.slab for entry in (*slabs, *kept) if entry.ours]
        await self._background.work(_close_all, ours)
        return [entry.slab for entry in slabs if not entry.ours], [entry.slab for entry in kept if not entry.ours]

    async def _renew(self, dirty: Sequence[LentSlab], doubtful: Sequence[LentSlab]) -> None:
        """Makes slabs fit to be offered: zero, or new ones in their place."""
        fit: list[LentSlab] = []
        for entry in dirty:
            try:
                await self._background.work(self._memory.zero, entry.slab)
                fit.append(entry)
            except (DeviceError, OSError) as error:
                log.error("%s: slab %d is made anew: %s", self._name, entry.number, error)
                doubtful = [*doubtful, entry]
        for entry in doubtful:
            try:
                fit.append(await self._make_anew(entry))
            except (DeviceError, OSError) as error:
                log.error("%s: slab %d could not be made anew: %s", self._name, entry.number, error)
                self.table.remove([entry])
                # Whoever gave it may find memory for another later.
                self._background.spawn(self._unasked([], [entry], 0, ()))
        fit = [entry for entry in fit if entry.number in self.table.slabs]
        for entry in fit:
            entry.place = "free"
        self._send_offer(fit)
        renewed, self._renewed = self._renewed, asyncio.Event()
        renewed.set()

    async def _make_anew(self, entry: LentSlab) -> LentSlab:
        fresh = await self._background.work(self._memory.slab, self._slab_bytes)
        if not entry.ours and self._callbacks.on_replaced is not None:
            await self._call(self._callbacks.on_replaced, entry.slab, fresh)
        self.table.remove([entry])
        await self._background.work(entry.slab.close)
        return self.table.add(fresh, entry.ours, "cleaning")

    # Callbacks -----------------------------------------------------------------------------------------------------

    def _tell(self, callback: Callback | None, *given: object) -> None:
        if callback is not None:
            self._background.spawn(self._call(callback, *given))

    async def _call(self, callback: Callback, *given: object) -> None:
        await self._background.call(self._guarded, callback, *given)

    def _guarded(self, callback: Callback, *given: object) -> None:
        try:
            callback(*given)
        except Exception:
            log.exception("%s: a callback raised", self._name)


def _close_all(slabs: Sequence[MemorySlab]) -> None:
    for slab in slabs:
        slab.close()

"""What a lender has offered, slab by slab: bookkeeping alone, in the lender's event loop."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from forebay.gpu.backend import MemorySlab
from forebay.runtime.party import Holdings
from forebay.transport.messages import Holding, Lend


@dataclass
class LentSlab:
    """`ours`: made by the lender, rather than given by whoever uses it. cleaning: it came back, and is not zero yet."""

    number: int
    slab: MemorySlab
    ours: bool
    place: Literal["free", "lent", "cleaning"]


@dataclass
class LentLease:
    """A lease of some of the slabs, as the scheduler told of it."""

    lease: int
    epoch: int
    borrower: str
    token: str
    slabs: set[int]


class SlabTable:
    """Numbers go up and are never used again."""

    def __init__(self, slab_bytes: int, endpoint: str) -> None:
        self.slab_bytes = slab_bytes
        self.endpoint = endpoint
        self.slabs: dict[int, LentSlab] = {}
        self.leases: dict[int, LentLease] = {}
        self._last = 0

    def add(self, slab: MemorySlab, ours: bool, place: Literal["free", "cleaning"] = "free") -> LentSlab:
        self._last += 1
        entry = self.slabs[self._last] = LentSlab(self._last, slab, ours, place)
        return entry

    def of(self, place: str) -> list[LentSlab]:
        return [entry for entry in self.slabs.values() if entry.place == place]

    def lend(self, message: Lend) -> dict[int, int] | None:
        """The descriptors of a new lease, by slab number; None if not all of it is there to be lent (any more). A lease
        that is known already is told of again after the scheduler came back."""
        known = self.leases.get(message.lease)
        mine = known.slabs if known is not None else set()
        entries = [self.slabs.get(number) for number in message.slabs]
        found = [entry for entry in entries if entry and (entry.place == "free" or entry.number in mine)]
        if len(found) < len(entries) or not found:
            return None
        for entry in found:
            entry.place = "lent"
        self.leases[message.lease] = LentLease(
            message.lease, message.epoch, message.borrower, message.token, set(message.slabs)
        )
        return {entry.number: entry.slab.fileno() for entry in found}

    def come_back(self, numbers: Iterable[int]) -> list[LentSlab]:
        """These slabs are in no lease any more; those that are known here."""
        found = [self.slabs[number] for number in numbers if number in self.slabs]
        for entry in found:
            entry.place = "cleaning"
        gone = {entry.number for entry in found}
        for lease in list(self.leases.values()):
            lease.slabs -= gone
            if not lease.slabs:
                del self.leases[lease.lease]
        return found

    def lease_of(self, number: int) -> LentLease | None:
        return next((lease for lease in self.leases.values() if number in lease.slabs), None)

    def remove(self, entries: Iterable[LentSlab]) -> None:
        """They are offered no longer."""
        for entry in entries:
            self.slabs.pop(entry.number, None)

    def holdings(self) -> Holdings:
        """For an `Attach`."""
        lent = tuple(
            Holding(
                lease.lease,
                lease.epoch,
                tuple(sorted(lease.slabs)),
                self.slab_bytes,
                lease.borrower,
                self.endpoint,
                lease.token,
            )
            for lease in self.leases.values()
        )
        return tuple(entry.number for entry in self.of("free")), lent, ()

    def check(self) -> None:
        """Asserts that every lent slab is in exactly one lease, and nothing else is."""
        held = [number for lease in self.leases.values() for number in lease.slabs]
        assert len(held) == len(set(held)), self.leases
        assert set(held) == {entry.number for entry in self.of("lent")}, (self.leases, self.slabs)

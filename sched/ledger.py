"""The ledger of lent memory: whose every offered slab is. Bookkeeping only; who gets what is decided in lending.py.

Conserved at every event, by lender: offered = free + lent + returned, and every lent slab is in exactly one lease.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

from forebay.sched.lending_events import LeaseRecord
from forebay.sched.states import LEASE, SLAB, IllegalTransition, move
from forebay.transport.messages import Grant, LeaseState


@dataclass(slots=True)
class Stock:
    """What one lender offers. `free` and `returned` in the order in which they became so, `lent` with their leases.
    `offered` counts all of them by itself."""

    lender: str
    gpu: int
    slab_bytes: int
    free: dict[int, None] = field(default_factory=dict)
    lent: dict[int, int] = field(default_factory=dict)
    returned: dict[int, None] = field(default_factory=dict)
    offered: int = 0

    def state(self, slab: int) -> str:
        """`gone` for one that is not offered."""
        for state, slabs in (("free", self.free), ("lent", self.lent), ("returned", self.returned)):
            if slab in slabs:
                return state
        return "gone"

    def add(self, slab: int, lease: int | None = None) -> None:
        """A slab that is new here: free, or already lent. Raises IllegalTransition for one that is there."""
        if (state := self.state(slab)) != "gone":
            raise IllegalTransition(f"slab {slab} of {self.lender} is {state} already; it cannot be offered anew")
        self.offered += 1
        if lease is None:
            self.free[slab] = None
        else:
            self.lent[slab] = lease

    def move(self, slab: int, event: str, lease: int = 0) -> None:
        """Raises IllegalTransition, and then nothing has changed."""
        old = self.state(slab)
        new = move(SLAB, "slab", f"{slab} of {self.lender}", old, event)
        self.free.pop(slab, None)
        self.lent.pop(slab, None)
        self.returned.pop(slab, None)
        match new:
            case "free":
                self.free[slab] = None
            case "lent":
                self.lent[slab] = lease
            case "returned":
                self.returned[slab] = None
            case _:
                self.offered -= 1


@dataclass(slots=True)
class Lease:
    """`slabs` that the borrower has, `asked` those of them that it is to let go of, with the deadline of each."""

    number: int
    epoch: int
    token: str
    lender: str
    lender_gpu: int
    lender_tenant: str
    borrower: str
    borrower_gpu: int
    tenant: str
    slab_bytes: int
    endpoint: str
    slabs: dict[int, None]
    state: str = "granted"
    asked: dict[int, float] = field(default_factory=dict)

    @property
    def status(self) -> LeaseState:
        return cast(LeaseState, self.state)

    @property
    def bytes(self) -> int:
        return len(self.slabs) * self.slab_bytes

    @property
    def deadline(self) -> float | None:
        """The earliest of what is asked back."""
        return min(self.asked.values(), default=None)

    @property
    def grant(self) -> Grant:
        return Grant(
            self.number,
            self.epoch,
            self.lender,
            self.lender_gpu,
            tuple(self.slabs),
            self.slab_bytes,
            self.endpoint,
            self.token,
        )

    @property
    def record(self) -> LeaseRecord:
        return LeaseRecord(
            self.number,
            self.epoch,
            self.token,
            self.lender,
            self.lender_gpu,
            self.lender_tenant,
            self.borrower,
            self.borrower_gpu,
            self.tenant,
            tuple(self.slabs),
            self.slab_bytes,
            self.endpoint,
            self.state,
            tuple(self.asked.items()),
        )

    @classmethod
    def of(cls, record: LeaseRecord) -> "Lease":
        return cls(
            record.lease,
            record.epoch,
            record.token,
            record.lender,
            record.lender_gpu,
            record.lender_tenant,
            record.borrower,
            record.borrower_gpu,
            record.tenant,
            record.slab_bytes,
            record.endpoint,
            dict.fromkeys(record.slabs),
            record.state,
            dict(record.asked),
        )

    def move(self, event: str) -> None:
        self.state = move(LEASE, "lease", self.number, self.state, event)


class Ledger:
    """All stocks by their lenders, and all leases that are not over. A lease may be here before its lender's stock is:
    after a restart, until the lender attaches, and once it is stranded."""

    def __init__(self) -> None:
        self.stocks: dict[str, Stock] = {}
        self.leases: dict[int, Lease] = {}
        self.next_lease = 1
        self._lent: dict[str, dict[int, None]] = {}
        self._borrowed: dict[str, dict[int, None]] = {}

    def lent_by(self, party: str) -> list[Lease]:
        return [self.leases[number] for number in self._lent.get(party, ())]

    def borrowed_by(self, party: str) -> list[Lease]:
        return [self.leases[number] for number in self._borrowed.get(party, ())]

    def open_stock(self, lender: str, gpu: int, slab_bytes: int) -> Stock:
        """Empty, in place of what the ledger knew of that lender's slabs."""
        stock = self.stocks[lender] = Stock(lender, gpu, slab_bytes)
        return stock

    def close_stock(self, lender: str) -> None:
        self.stocks.pop(lender, None)

    def enter(self, lease: Lease) -> None:
        """Makes a lease known. Its slabs are the caller's business (`Stock.move`, `Stock.add`)."""
        assert lease.number not in self.leases, lease
        self.leases[lease.number] = lease
        self.next_lease = max(self.next_lease, lease.number + 1)
        self._lent.setdefault(lease.lender, {})[lease.number] = None
        self._borrowed.setdefault(lease.borrower, {})[lease.number] = None

    def grant(self, lease: Lease) -> None:
        """A new lease over slabs that are free."""
        stock = self.stocks[lease.lender]
        for slab in lease.slabs:
            stock.move(slab, "lend", lease.number)
        self.enter(lease)

    def take_out(self, lease: Lease, slabs: Iterable[int], event: str) -> None:
        """The lease has these slabs no longer; in its lender's stock, if that is there, `event` happens to them. What
        was asked back and has come settles a revocation; a lease without slabs is over and leaves the ledger."""
        stock = self.stocks.get(lease.lender)
        for slab in slabs:
            del lease.slabs[slab]
            lease.asked.pop(slab, None)
            if stock is not None and stock.lent.get(slab) == lease.number:
                stock.move(slab, event)
        if not lease.slabs:
            lease.move("end")
            del self.leases[lease.number]
            for index, party in ((self._lent, lease.lender), (self._borrowed, lease.borrower)):
                del index[party][lease.number]
                if not index[party]:
                    del index[party]
        elif not lease.asked and lease.state in ("revoking", "overdue"):
            lease.move("settle")

    def check(self) -> None:
        """Asserts conservation."""
        for name, stock in self.stocks.items():
            slabs = [*stock.free, *stock.lent, *stock.returned]
            assert len(slabs) == len(set(slabs)) == stock.offered, f"{name} offers {stock.offered} slabs, has {slabs}"
            for slab, number in stock.lent.items():
                lease = self.leases.get(number)
                assert lease is not None, f"slab {slab} of {name} is lent in lease {number}, which is over"
                assert lease.lender == name, f"slab {slab} of {name} is lent in lease {number} of {lease.lender}"
                assert slab in lease.slabs, f"slab {slab} of {name} is not in its lease {number}"
                assert lease.slab_bytes == stock.slab_bytes, f"lease {number} cuts {name}'s slabs to another size"
        for number, lease in self.leases.items():
            assert lease.number == number < self.next_lease, lease
            assert lease.state != "over", f"lease {number} is over and still here"
            assert lease.slabs, f"lease {number} is {lease.state} and holds nothing"
            assert lease.asked.keys() <= lease.slabs.keys(), lease
            assert bool(lease.asked) == (lease.state in ("revoking", "overdue", "stranded")), lease
            assert number in self._lent[lease.lender], lease
            assert number in self._borrowed[lease.borrower], lease
        assert sum(map(len, self._lent.values())) == sum(map(len, self._borrowed.values())) == len(self.leases)

    def check_attached(self, lender: str) -> None:
        """Asserts that an attached lender's stock holds every slab that it has lent."""
        stock = self.stocks[lender]
        for lease in self.lent_by(lender):
            held = [slab for slab in lease.slabs if stock.lent.get(slab) == lease.number]
            expected = [] if lease.state == "stranded" else list(lease.slabs)
            assert held == expected, f"lease {lease.number} ({lease.state}) of {lender} has {held}, not {expected}"

"""What the lending core keeps, and how slabs and leases end, whoever ends them: every way on which a borrower's slabs
come back leads through `Book.let_go`. Decisions are in lending.py, reclaims.py, registration.py, lending_wishes.py.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from forebay.sched.ledger import Lease, Ledger
from forebay.sched.lending_events import CountRecord, Forget, Keep, LendingCommand, LendingSettings, Remark, Tell
from forebay.sched.mapping import Mapping
from forebay.transport.messages import LeaseOver, LendingAnswer, Returned, Revoke, ToPartyLink

COUNTERS = (
    "grants",
    "granted_bytes",
    "shortfalls",
    "revocations",
    "overdue",
    "ended_leases",
    "lost_parties",
    "stranded",
    "complaints",
    "adopted",
    "refused_parties",
    "ignored_messages",
)


@dataclass(slots=True)
class Party:
    """One that is attached. `doubt`: why nobody is given its memory until it attaches anew, which it is asked to at
    `doubted_until`; `complaints` counts the borrowers that could not get it. `last_borrow` and `last_take_back`: the
    numbers of its latest requests."""

    name: str
    peer: str
    gpu: int
    pid: int
    host: str
    tenant: str
    endpoint: str
    slab_bytes: int
    last_heard: float
    doubt: str = ""
    doubted_until: float = 0.0
    complaints: int = 0
    last_borrow: int = 0
    last_take_back: int = 0


@dataclass(slots=True)
class Book:
    """`awaited`: parties of restored leases that have not attached yet, each with the time until which it may. `taker`
    is asked whose a slab becomes that came back (lender, slab, whether it is clean): true if somebody took it."""

    settings: LendingSettings
    ledger: Ledger = field(default_factory=Ledger)
    mapping: Mapping = field(default_factory=Mapping)
    parties: dict[str, Party] = field(default_factory=dict)
    peers: dict[str, str] = field(default_factory=dict)
    awaited: dict[str, float] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    taker: Callable[[str, int, bool], bool] = lambda lender, slab, clean: False
    _commands: list[LendingCommand] = field(default_factory=list)
    _records: list[Keep | Forget] = field(default_factory=list)
    _touched: dict[int, None] = field(default_factory=dict)
    _kept_count: int = 1

    # What goes out -------------------------------------------------------------------------------------------------

    def tell(self, party: str, message: ToPartyLink) -> None:
        """To a party, if it is attached: one that is not learns of it when it attaches."""
        if (known := self.parties.get(party)) is not None:
            self._commands.append(Tell(known.peer, message))

    def answer(self, peer: str, message: ToPartyLink | LendingAnswer) -> None:
        self._commands.append(Tell(peer, message))

    def remark(self, text: str) -> None:
        self._commands.append(Remark(text))

    def count(self, name: str, by: int = 1) -> None:
        self.counters[name] += by

    def keep(self, record: Keep | Forget) -> None:
        self._records.append(record)

    def touch(self, lease: Lease) -> None:
        """The lease is not as it was kept."""
        self._touched[lease.number] = None

    def take_commands(self) -> list[LendingCommand]:
        """All of one event: first what is to be kept, then what is told of it."""
        records, self._records = self._records, []
        if self.ledger.next_lease != self._kept_count:
            self._kept_count = self.ledger.next_lease
            records.append(Keep(CountRecord(self._kept_count)))
        for number in self._touched:
            lease = self.ledger.leases.get(number)
            records.append(Forget(f"lease/{number}") if lease is None else Keep(lease.record))
        self._touched.clear()
        commands, self._commands = self._commands, []
        return [*records, *commands]

    # What becomes of leases ----------------------------------------------------------------------------------------

    def let_go(self, lease: Lease, slabs: Iterable[int], released: bool) -> None:
        """The borrower has these slabs of the lease no longer. `released`: it says so itself; if not it may still map
        them. Each goes to whoever takes it back, else it is returned, or destroyed by its lender."""
        stock = self.ledger.stocks.get(lease.lender)
        taken: list[int] = []
        returned: list[int] = []
        forgotten: list[int] = []
        for slab in slabs:
            if stock is None or stock.lent.get(slab) != lease.number:
                forgotten.append(slab)
            elif self.taker(lease.lender, slab, released):
                taken.append(slab)
            else:
                returned.append(slab)
        for group, event in (
            (forgotten, "take"),
            (taken, "take"),
            (returned, "return" if released else "take"),
        ):
            if group:
                self.ledger.take_out(lease, group, event)
        if returned:
            self.tell(lease.lender, Returned(lease.number, lease.epoch, tuple(returned), released))
        if lease.state == "over":
            self.count("ended_leases")
        self.touch(lease)

    def end(self, lease: Lease, reason: str, released: bool = False) -> None:
        """The lease is over. Its borrower is told unless it said so itself (`released`)."""
        if not released:
            self.tell(lease.borrower, LeaseOver(lease.number, lease.epoch, reason))
        self.let_go(lease, tuple(lease.slabs), released)

    def ask_back(self, now: float, lease: Lease, slabs: Iterable[int], deadline: float, reason: str) -> None:
        """Tells the borrower to let go of slabs, unless it knows that already with a deadline that is no later."""
        fresh = [slab for slab in slabs if lease.asked.get(slab, deadline + 1) > deadline]
        if not fresh or lease.state == "stranded":
            return
        lease.asked.update(dict.fromkeys(fresh, deadline))
        if lease.state in ("granted", "active"):
            lease.move("revoke")
            self.count("revocations")
        self._tell_revoked(now, lease, fresh, reason)
        self.touch(lease)

    def strand(self, now: float, lease: Lease, reason: str) -> None:
        """The lender is gone: the borrower is asked to move what it has there, within the time to live."""
        if lease.state == "stranded":
            return
        deadline = now + self.settings.ttl_s
        lease.move("strand")
        lease.asked = {slab: min(deadline, lease.asked.get(slab, deadline)) for slab in lease.slabs}
        self.count("stranded")
        self._tell_revoked(now, lease, lease.slabs, reason)
        self.touch(lease)

    def remind(self, now: float, lease: Lease, reason: str) -> None:
        """A borrower that attached anew may have missed what it was asked."""
        if lease.asked:
            self._tell_revoked(now, lease, lease.asked, reason)

    def _tell_revoked(self, now: float, lease: Lease, slabs: Iterable[int], reason: str) -> None:
        left: dict[float, list[int]] = {}
        for slab in slabs:
            left.setdefault(lease.asked[slab], []).append(slab)
        for deadline, group in left.items():
            within = round(max(0.0, deadline - now), 6)
            self.tell(lease.borrower, Revoke(lease.number, lease.epoch, tuple(group), within, reason))

    def shift(self, now: float, absent: float) -> None:
        """This process did not listen for so long: nobody's time has run meanwhile."""
        for party in self.parties.values():
            party.last_heard = now
        for name in self.awaited:
            self.awaited[name] += absent
        for lease in self.ledger.leases.values():
            if lease.asked:
                lease.asked = {slab: deadline + absent for slab, deadline in lease.asked.items()}
                self.touch(lease)

    def check(self) -> None:
        """Asserts conservation, and that every lease has its two parties, or waits for them."""
        self.ledger.check()
        for name, party in self.parties.items():
            assert name not in self.awaited, f"{name} is attached and awaited"
            assert self.peers[party.peer] == party.name == name
            self.ledger.check_attached(name)
        assert self.ledger.stocks.keys() == self.parties.keys()
        for lease in self.ledger.leases.values():
            known = lease.borrower in self.parties or lease.borrower in self.awaited
            assert known, f"lease {lease.number} has no borrower"
            lent = lease.lender in self.parties or lease.lender in self.awaited
            assert lent or lease.state == "stranded", f"lease {lease.number} has no lender"

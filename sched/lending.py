"""The lending core: who borrows whose memory, and how it comes back; in the scheduler process.

Only what decides lives here, as `handle(now, event) -> commands`. `now` is any clock in seconds that does not go back,
the same one for a core and its successor. What a wrong party or one of the past says about a lease changes nothing, and
is counted.
"""

from typing import assert_never

from forebay.sched.borrowing import Borrowing
from forebay.sched.claims import Claims
from forebay.sched.ledger import Lease
from forebay.sched.lending_book import Book, Party
from forebay.sched.lending_events import (
    CountRecord,
    FromPartyLink,
    LeaseRecord,
    LendingCommand,
    LendingEvent,
    LendingSettings,
    LendingTick,
    PairRecord,
    PartyGone,
    Record,
    Restored,
    Wish,
)
from forebay.sched.lending_wishes import Wishes
from forebay.sched.reclaims import Reclaims, within
from forebay.sched.registration import Registration
from forebay.transport.messages import (
    Attach,
    Borrow,
    Complain,
    Detach,
    FromParty,
    Heartbeat,
    Mapped,
    Offer,
    Rejoin,
    Release,
    TakeBack,
)

MOST_DOUBLINGS = 5
"""Of the time to live, for which nothing is borrowed from a lender that borrowers complain of again and again."""


class LendingCore:
    """Several calls to `handle`, one after the other; the commands of each are to be carried out in order."""

    def __init__(self, settings: LendingSettings) -> None:
        self.settings = settings
        self.book = Book(settings)
        self._reclaims = Reclaims(self.book)
        self._claims = Claims(self.book)
        self._registration = Registration(self.book, self._reclaims, self._claims)
        self._borrowing = Borrowing(self.book)
        self._wishes = Wishes(self.book, self._reclaims)
        self._strangers: set[str] = set()
        self._last_tick: float | None = None
        self._next_beat = 0.0

    def handle(self, now: float, event: LendingEvent) -> list[LendingCommand]:
        match event:
            case FromPartyLink(peer, message):
                self._received(now, peer, message)
            case Wish(peer, wish):
                self._wishes.handle(now, peer, wish)
            case PartyGone(peer, reason):
                if (name := self.book.peers.get(peer)) is not None:
                    self._lose(now, name, reason)
            case LendingTick():
                self._tick(now)
            case Restored(records):
                self._restore(now, records)
            case _:
                assert_never(event)
        self._reclaims.settle(now)
        return self.book.take_commands()

    @property
    def records(self) -> list[Record]:
        """All that is to be kept, as it is now."""
        ledger, mapping = self.book.ledger, self.book.mapping
        pairs = [PairRecord(*pair) for pair in mapping.pairs]
        return [CountRecord(ledger.next_lease), *pairs, *(lease.record for lease in ledger.leases.values())]

    def knows(self, peer: str) -> bool:
        """Whether the peer is an attached party."""
        return peer in self.book.peers

    @property
    def peers(self) -> tuple[str, ...]:
        """The attached parties' links."""
        return tuple(self.book.peers)

    def check(self) -> None:
        """Asserts that every slab is where it belongs, and every lease has its parties."""
        self.book.check()
        self._reclaims.check()

    # Time ----------------------------------------------------------------------------------------------------------

    def _restore(self, now: float, records: tuple[Record, ...]) -> None:
        book = self.book
        for record in records:
            match record:
                case LeaseRecord():
                    lease = Lease.of(record)
                    grace = now + self.settings.ttl_s
                    book.ledger.enter(lease)
                    if lease.asked:
                        lease.asked = {slab: max(deadline, grace) for slab, deadline in lease.asked.items()}
                        book.touch(lease)
                    book.awaited[lease.borrower] = grace
                    if lease.state != "stranded":
                        book.awaited[lease.lender] = grace
                case PairRecord(producer, consumer):
                    book.mapping.add(producer, consumer)
                case CountRecord(next_lease):
                    book.ledger.next_lease = max(book.ledger.next_lease, next_lease)
                case _:
                    assert_never(record)

    def _tick(self, now: float) -> None:
        self._strangers.clear()
        absent, self._last_tick = 0.0 if self._last_tick is None else now - self._last_tick, now
        if absent > self.settings.ttl_s / 2:
            # It was we who did not listen (stopped, or starved of processor time): what was said meanwhile is unread.
            for part in (self.book, self._reclaims, self._claims):
                part.shift(now, absent)
        for party in list(self.book.parties.values()):
            silence = now - party.last_heard
            if silence > self.settings.ttl_s:
                self._lose(now, party.name, f"silent for {silence:.1f} s (allowed: {self.settings.ttl_s:g})")
            elif party.doubt and party.doubted_until <= now:
                party.doubted_until = now + self.settings.ttl_s
                self.book.tell(party.name, Rejoin("a borrower could not get your memory: say anew what you hold"))
        if now >= self._next_beat:
            # So that a party that has nothing to ask for notices, too, when this scheduler is no longer there.
            self._next_beat = now + self.settings.heartbeat_s
            for name in self.book.parties:
                self.book.tell(name, Heartbeat())
        self._registration.expire(now)
        for lease in self.book.ledger.leases.values():
            if lease.state == "revoking" and lease.deadline is not None and lease.deadline <= now:
                lease.move("expire")
                self.book.touch(lease)
                self.book.count("overdue")
                self.book.remark(f"lease {lease.number} is overdue: {lease.borrower} holds {lease.bytes} bytes of it")
        self._reclaims.expire(now)

    def _lose(self, now: float, name: str, reason: str, detached: bool = False) -> None:
        if not detached:
            self.book.count("lost_parties")
            self.book.remark(f"party {name} is lost: {reason}")
        self._registration.lose(now, name, reason, detached)

    # Parties -------------------------------------------------------------------------------------------------------

    def _received(self, now: float, peer: str, message: FromParty | Heartbeat) -> None:
        if isinstance(message, Attach):
            return self._registration.attach(now, peer, message)
        name = self.book.peers.get(peer)
        if name is None:
            if not isinstance(message, Detach) and peer not in self._strangers:
                self._strangers.add(peer)  # told once a tick, however much it still has to say
                reason = "this scheduler does not know you: it was restarted, or you were silent too long"
                self.book.answer(peer, Rejoin(reason))
            return
        party = self.book.parties[name]
        party.last_heard = now
        match message:
            case Borrow():
                self._borrowing.borrow(party, message)
            case Mapped(number, epoch):
                lease = self._own(party, number, epoch)
                if lease is not None and lease.state == "granted":
                    lease.move("map")
                    self.book.touch(lease)
            case Release(number, epoch, slabs):
                if self._claims.let_go(name, number, epoch, slabs):
                    return
                lease = self._own(party, number, epoch)
                if lease is not None:
                    if slabs and lease.slabs.keys() >= set(slabs) and len(set(slabs)) == len(slabs):
                        self.book.let_go(lease, slabs, released=True)
                    else:
                        self.book.count("ignored_messages")
            case Complain(number, epoch, reason):
                if self._claims.let_go(name, number, epoch, None):
                    return
                lease = self._own(party, number, epoch)
                if lease is not None:
                    self._doubt(now, lease, f"{party.name} could not get lease {number}: {reason}")
                    self.book.let_go(lease, tuple(lease.slabs), released=False)
            case Offer(slabs):
                self._offer(party, slabs)
            case TakeBack():
                self._take_back(now, party, message)
            case Detach(reason):
                self._lose(now, name, f"it left: {reason}", detached=True)
            case Heartbeat():
                pass
            case _:
                assert_never(message)

    def _own(self, party: Party, number: int, epoch: int) -> Lease | None:
        """The lease, if it is that party's to speak of."""
        lease = self.book.ledger.leases.get(number)
        if lease is None or lease.epoch != epoch or lease.borrower != party.name:
            self.book.count("ignored_messages")
            return None
        return lease

    def _doubt(self, now: float, lease: Lease, reason: str) -> None:
        self.book.count("complaints")
        lender = self.book.parties.get(lease.lender)
        if lender is not None and lease.state != "stranded":
            lender.doubt = lender.doubt or reason
            lender.complaints += 1
            # Perhaps it was only slow: it may try again, each time after longer.
            patience = 2 ** min(lender.complaints - 1, MOST_DOUBLINGS) * self.settings.ttl_s
            lender.doubted_until = max(lender.doubted_until, now + patience)
            self.book.remark(f"nothing more is borrowed from {lender.name} until it attaches anew: {reason}")

    def _offer(self, party: Party, slabs: tuple[int, ...]) -> None:
        stock = self.book.ledger.stocks[party.name]
        if not party.endpoint or party.slab_bytes <= 0:
            return self.book.count("ignored_messages")
        stranded = {
            slab for lease in self.book.ledger.lent_by(party.name) if lease.state == "stranded" for slab in lease.slabs
        }
        for slab in slabs:
            state = stock.state(slab)
            if state == "returned":
                if not self._reclaims.offered(party.name, slab):
                    stock.move(slab, "offer")
            elif state == "gone" and slab not in stranded:
                stock.add(slab)
            else:
                self.book.count("ignored_messages")

    def _take_back(self, now: float, party: Party, wish: TakeBack) -> None:
        stock = self.book.ledger.stocks[party.name]
        if wish.request <= party.last_take_back:
            return self.book.count("ignored_messages")
        party.last_take_back = wish.request
        slabs = -(-max(0, wish.bytes) // max(1, stock.slab_bytes))
        self._reclaims.open(now, party.name, wish.request, slabs, within(wish.deadline_s))

"""Leases that the ledger does not know, but a party says that it has: the ledger's file was lost, or what ended the
lease did not reach the party. Such a lease is adopted when both parties claim it and agree; a claim waits for the other
party as long as a silent one has. Every other claim is refused: the borrower is told `LeaseOver`, the lender makes the
memory anew.
"""

from collections.abc import Callable
from dataclasses import dataclass
from hmac import compare_digest

from msgspec.structs import replace

from forebay.sched.ledger import Lease
from forebay.sched.lending_book import Book, Party
from forebay.transport.messages import Holding, LeaseOver, Returned


@dataclass(slots=True)
class _Claim:
    """It waits for the other party until `until`."""

    party: str
    holding: Holding
    until: float


class Claims:
    """Those that wait, by the lease's number: of lenders and of borrowers."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._lent: dict[int, _Claim] = {}
        self._borrowed: dict[int, _Claim] = {}

    def let_go(self, borrower: str, number: int, epoch: int, slabs: tuple[int, ...] | None) -> bool:
        """A borrower lets go of slabs (None: all) that it claims: whether it does claim that lease."""
        claim = self._borrowed.get(number)
        if claim is None or claim.party != borrower or claim.holding.epoch != epoch:
            return False
        left = () if slabs is None else tuple(slab for slab in claim.holding.slabs if slab not in slabs)
        if left:
            claim.holding = replace(claim.holding, slabs=left)
        else:
            del self._borrowed[number]
        return True

    def withdraw(self, party: str) -> None:
        """The party leaves, or tells its story anew."""
        for claims in (self._lent, self._borrowed):
            for number in [number for number, claim in claims.items() if claim.party == party]:
                del claims[number]

    def expire(self, now: float) -> None:
        self._refuse(lambda claim: claim.until <= now)

    def shift(self, now: float, absent: float) -> None:
        for claim in (*self._lent.values(), *self._borrowed.values()):
            claim.until += absent

    def of_lender(self, now: float, party: Party, holding: Holding) -> None:
        """By the lender, of a lease that the ledger does not know so."""
        other = self._borrowed.get(holding.lease)
        if holding.lease in self._book.ledger.leases:
            self._refuse_lent(party.name, holding)
        elif other is not None and _matches(party.name, holding, other.party, other.holding):
            del self._borrowed[holding.lease]
            self._adopt(party, holding, self._book.parties[other.party], other.holding)
        elif holding.peer in self._book.parties or holding.peer == party.name or holding.lease in self._lent:
            self._refuse_lent(party.name, holding)
        else:
            self._reserve(holding)
            self._lent[holding.lease] = _Claim(party.name, holding, now + self._book.settings.ttl_s)

    def of_borrower(self, now: float, party: Party, holding: Holding) -> None:
        """By the borrower, likewise."""
        other = self._lent.get(holding.lease)
        if holding.lease in self._book.ledger.leases:
            self._refuse_borrowed(party.name, holding)
        elif other is not None and _matches(other.party, other.holding, party.name, holding):
            del self._lent[holding.lease]
            self._adopt(self._book.parties[other.party], other.holding, party, holding)
        elif holding.peer in self._book.parties or holding.peer == party.name or holding.lease in self._borrowed:
            self._refuse_borrowed(party.name, holding)
        else:
            self._reserve(holding)
            self._borrowed[holding.lease] = _Claim(party.name, holding, now + self._book.settings.ttl_s)

    def refuse_unshared(self, party: str) -> None:
        """Claims that name a party which has told its story, and does not share them."""
        self._refuse(lambda claim: claim.holding.peer == party)

    def _refuse(self, which: Callable[[_Claim], bool]) -> None:
        for claims, refuse in ((self._lent, self._refuse_lent), (self._borrowed, self._refuse_borrowed)):
            for number, claim in list(claims.items()):
                if which(claim):
                    del claims[number]
                    refuse(claim.party, claim.holding)

    def _adopt(self, lender: Party, lent: Holding, borrower: Party, borrowed: Holding) -> None:
        book = self._book
        stock = book.ledger.stocks[lender.name]
        if any(stock.state(slab) != "gone" for slab in borrowed.slabs) or lent.slab_bytes != stock.slab_bytes:
            self._refuse_lent(lender.name, lent)
            return self._refuse_borrowed(borrower.name, borrowed)
        lease = Lease(
            lent.lease,
            lent.epoch,
            lent.token,
            lender.name,
            lender.gpu,
            lender.tenant,
            borrower.name,
            borrower.gpu,
            borrower.tenant,
            lent.slab_bytes,
            lender.endpoint,
            dict.fromkeys(borrowed.slabs),
            "active",
        )
        for slab in lease.slabs:
            stock.add(slab, lease.number)
        book.ledger.enter(lease)
        book.touch(lease)
        book.count("adopted")
        book.remark(f"lease {lease.number}: adopted, both {lender.name} and {borrower.name} know it")
        if extra := tuple(slab for slab in lent.slabs if slab not in lease.slabs):
            book.tell(lender.name, Returned(lease.number, lease.epoch, extra, False))

    def _reserve(self, holding: Holding) -> None:
        """No new lease takes the number of one that may yet be adopted."""
        self._book.ledger.next_lease = max(self._book.ledger.next_lease, holding.lease + 1)

    def _refuse_lent(self, party: str, holding: Holding) -> None:
        self._book.tell(party, Returned(holding.lease, holding.epoch, holding.slabs, False))

    def _refuse_borrowed(self, party: str, holding: Holding) -> None:
        reason = "the ledger does not know it: its time to live ran out, or its lender does not know it"
        self._book.tell(party, LeaseOver(holding.lease, holding.epoch, reason))


def _matches(lender: str, lent: Holding, borrower: str, borrowed: Holding) -> bool:
    """Whether a lender and a borrower claim the same lease."""
    return (
        (lent.epoch, lent.slab_bytes, lent.peer, borrowed.peer)
        == (borrowed.epoch, borrowed.slab_bytes, borrower, lender)
        and compare_digest(lent.token.encode(), borrowed.token.encode())
        and set(borrowed.slabs) <= set(lent.slabs)
    )

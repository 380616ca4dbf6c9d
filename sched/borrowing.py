"""Who gets whose memory: the grants that answer a borrower."""

from hashlib import sha256
from hmac import new as keyed_hash

from forebay.sched.ledger import Lease
from forebay.sched.lending_book import Book, Party
from forebay.transport.messages import Borrow, Granted, Lend


class Borrowing:
    def __init__(self, book: Book) -> None:
        self._book = book

    def borrow(self, borrower: Party, wish: Borrow) -> None:
        """Answers with as much as there is."""
        book = self._book
        if wish.request <= borrower.last_borrow:
            return book.count("ignored_messages")
        borrower.last_borrow = wish.request
        left, leases = wish.bytes, []
        # Few lenders: the one with the most to give first.
        lenders = [lender for lender in self._lenders(borrower) if lender.name != wish.avoid]
        ranking = sorted(lenders, key=lambda lender: (-self._free(lender), lender.name))
        for lender in ranking:
            if left <= 0:
                break
            stock = book.ledger.stocks[lender.name]
            slabs = list(stock.free)[: -(-left // stock.slab_bytes)]
            leases.append(self._grant(lender, borrower, slabs))
            left -= len(slabs) * stock.slab_bytes
        for lease in leases:
            message = Lend(lease.number, lease.epoch, tuple(lease.slabs), borrower.name, lease.token)
            book.tell(lease.lender, message)
            book.count("granted_bytes", lease.bytes)
        book.count("grants", len(leases))
        reason = self._shortfall(borrower, left) if left > 0 else ""
        book.tell(borrower.name, Granted(wish.request, tuple(lease.grant for lease in leases), reason))

    def _free(self, lender: Party) -> int:
        return len(self._book.ledger.stocks[lender.name].free) * lender.slab_bytes

    def _lenders(self, borrower: Party) -> list[Party]:
        """Those that have something for this borrower. Descriptors do not leave a host, and slabs fill
        slots of their size."""
        return [
            party
            for name, party in self._book.parties.items()
            if self._book.ledger.stocks[name].free
            and not party.doubt
            and party.host == borrower.host
            and borrower.slab_bytes in (0, party.slab_bytes)
            and self._book.mapping.allows(party.gpu, borrower.gpu)
        ]

    def _grant(self, lender: Party, borrower: Party, slabs: list[int]) -> Lease:
        number, epoch = self._book.ledger.next_lease, self._book.settings.epoch
        token = keyed_hash(self._book.settings.secret.encode(), f"{epoch}/{number}".encode(), sha256).hexdigest()
        lease = Lease(
            number,
            epoch,
            token,
            lender.name,
            lender.gpu,
            lender.tenant,
            borrower.name,
            borrower.gpu,
            borrower.tenant,
            lender.slab_bytes,
            lender.endpoint,
            dict.fromkeys(slabs),
        )
        self._book.ledger.grant(lease)
        self._book.touch(lease)
        return lease

    def _shortfall(self, borrower: Party, missing: int) -> str:
        self._book.count("shortfalls")
        producers = self._book.mapping.producers(borrower.gpu)
        if producers:
            whose = (
                f"GPU {borrower.gpu} borrows from its producers only (GPU {', '.join(map(str, producers))}), and they"
            )
        else:
            whose = "the other GPUs of this host"
        text = f"{missing} bytes are missing: {whose} have nothing more to lend at the moment"
        parties = self._book.parties.values()
        sizes = {party.slab_bytes for party in parties if self._book.ledger.stocks[party.name].free}
        if borrower.slab_bytes and sizes - {borrower.slab_bytes}:
            others = ", ".join(map(str, sorted(sizes - {borrower.slab_bytes})))
            text += f" in slabs of {borrower.slab_bytes} bytes (there are slabs of {others})"
        return text

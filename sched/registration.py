"""How parties enter and leave the lending core: who may, and how what they say they hold is reconciled with the ledger.

An `Attach` is a party's whole story, so it replaces what was known. Lender, borrower and ledger must agree on a lease
(number, epoch, token, slabs); a borrower may hold less than the ledger says. Where they do not agree the lease ends:
the borrower is told `LeaseOver`, and the lender makes the memory anew. Leases that the ledger does not know are in
claims.py.
"""

from hmac import compare_digest

from forebay.sched.claims import Claims
from forebay.sched.ledger import Lease
from forebay.sched.lending_book import Book, Party
from forebay.sched.reclaims import Reclaims
from forebay.transport.messages import PROTOCOL_VERSION, Attach, Attached, Holding, Refused, Returned

MOST_SLABS = 1 << 20
"""A party that names more at once is none of ours."""

HIGHEST_LEASE = 1 << 50
"""No ledger comes so far, and JSON still holds it."""


class Registration:
    def __init__(self, book: Book, reclaims: Reclaims, claims: Claims) -> None:
        self._book = book
        self._reclaims = reclaims
        self._claims = claims

    def attach(self, now: float, peer: str, attach: Attach) -> None:
        book = self._book
        refusal, tenant = self._refusal(peer, attach)
        if refusal:
            book.count("refused_parties")
            book.remark(f"party {attach.party} was refused: {refusal}")
            return book.answer(peer, Refused(refusal))
        former = book.peers.get(peer)
        if former is not None and former != attach.party:
            self.lose(now, former, f"its link now speaks for {attach.party}", False)
        self._withdraw(attach.party, "its lender attached anew")
        party = Party(
            attach.party,
            peer,
            attach.gpu,
            attach.pid,
            attach.host,
            tenant,
            attach.endpoint,
            attach.slab_bytes,
            now,
        )
        if (known := book.parties.get(party.name)) is not None:
            party.complaints = known.complaints
            del book.peers[known.peer]  # it may be another link of the same process
        book.parties[party.name] = party
        book.peers[peer] = party.name
        book.awaited.pop(party.name, None)
        book.answer(peer, Attached(PROTOCOL_VERSION, attach.session, book.settings.heartbeat_s, book.settings.ttl_s))
        self._as_lender(now, party, attach)
        self._as_borrower(now, party, attach)
        self._claims.refuse_unshared(party.name)

    def lose(self, now: float, name: str, reason: str, detached: bool) -> None:
        """The party is gone. `detached`: it says so itself, and that it has unmapped what it borrowed."""
        book = self._book
        self._withdraw(name, f"its lender is gone: {reason}")
        if (party := book.parties.pop(name, None)) is not None:
            del book.peers[party.peer]
        book.awaited.pop(name, None)
        for lease in book.ledger.borrowed_by(name):
            book.end(lease, f"its borrower is gone: {reason}", released=detached)
        book.ledger.close_stock(name)
        for lease in book.ledger.lent_by(name):
            book.strand(now, lease, f"its lender {name} is gone: {reason}")

    def expire(self, now: float) -> None:
        """Ends the waiting for parties of restored leases, and of claims."""
        for name, until in list(self._book.awaited.items()):
            if until <= now:
                self.lose(now, name, "it did not come back after the scheduler was restarted", False)
        self._claims.expire(now)

    def _withdraw(self, name: str, reason: str) -> None:
        """What is in progress for a party that leaves or begins anew is given up."""
        self._reclaims.forget(name, reason)
        self._claims.withdraw(name)

    # Who may -------------------------------------------------------------------------------------------------------

    def _refusal(self, peer: str, attach: Attach) -> tuple[str, str]:
        """Why the party cannot take part, or nothing and its tenant."""
        book, name = self._book, attach.party
        if attach.version != PROTOCOL_VERSION:
            return (
                f"you speak protocol {attach.version}, this scheduler {PROTOCOL_VERSION}: install the same forebay on "
                "both"
            ), ""
        tenant = "" if not book.settings.tenants else self._tenant(attach.credential)
        if tenant is None:
            return "your credential is no tenant's of this server; give one of its tokens (lending.tokens)", ""
        if problem := _nonsense(attach):
            return problem, ""
        known = book.parties.get(name)
        if known is not None and known.peer != peer and (known.pid, known.host) != (attach.pid, attach.host):
            return f"the name {name!r} is taken by process {known.pid} of {known.host}; choose another", ""
        owners = {lease.lender_tenant for lease in book.ledger.lent_by(name)}
        owners |= {lease.tenant for lease in book.ledger.borrowed_by(name)}
        if known is not None:
            owners.add(known.tenant)
        if owners - {tenant}:
            return f"the name {name!r} belongs to another tenant; choose another", ""
        return "", tenant

    def _tenant(self, credential: str) -> str | None:
        found = None
        for tenant, digest in self._book.settings.tenants.items():
            if compare_digest(digest.encode(), credential.encode()):
                found = tenant
        return found

    # What it holds -------------------------------------------------------------------------------------------------

    def _as_lender(self, now: float, party: Party, attach: Attach) -> None:
        book = self._book
        stock = book.ledger.open_stock(party.name, party.gpu, party.slab_bytes)
        claims = {holding.lease: holding for holding in attach.lent}
        taken: set[int] = set()  # slabs that may not be lent again
        for lease in book.ledger.lent_by(party.name):
            taken.update(lease.slabs)
            claimed = claims.get(lease.number)
            agreed = claimed is not None and _same(lease, claimed) and lease.slabs.keys() <= set(claimed.slabs)
            if agreed:
                assert claimed is not None
                del claims[lease.number]
                for slab in lease.slabs:
                    stock.add(slab, lease.number)
                if lease.state == "stranded":
                    lease.move("resume")
                    book.touch(lease)
                if extra := tuple(slab for slab in claimed.slabs if slab not in lease.slabs):
                    taken.update(extra)
                    book.tell(party.name, Returned(lease.number, lease.epoch, extra, False))
                continue
            # It never heard of it, or has lost its memory: the borrower may map even what the lender takes for free.
            if lost := tuple(slab for slab in lease.slabs if slab in attach.free):
                book.tell(party.name, Returned(lease.number, lease.epoch, lost, False))
            if lease.state != "stranded":
                book.remark(f"lease {lease.number}: its lender {party.name} knows nothing of it; it ends")
                book.end(lease, f"its lender {party.name} knows nothing of it")
        for holding in claims.values():
            taken.update(holding.slabs)
            self._claims.of_lender(now, party, holding)
        for slab in dict.fromkeys(attach.free):
            if slab not in taken:
                stock.add(slab)

    def _as_borrower(self, now: float, party: Party, attach: Attach) -> None:
        book = self._book
        claims = {holding.lease: holding for holding in attach.borrowed}
        for lease in book.ledger.borrowed_by(party.name):
            claimed = claims.get(lease.number)
            if claimed is None or not _same(lease, claimed):
                book.end(lease, "its borrower does not hold it", released=True)
                continue
            del claims[lease.number]
            held = set(claimed.slabs)
            if strange := held - lease.slabs.keys():
                book.end(lease, f"you hold slabs {sorted(strange)}, which are not in it")
                continue
            if lease.state == "granted":
                lease.move("map")
                book.touch(lease)
            if given := [slab for slab in lease.slabs if slab not in held]:
                book.let_go(lease, given, released=True)
            book.remind(now, lease, "you were asked before")
        for holding in claims.values():
            self._claims.of_borrower(now, party, holding)


def _nonsense(attach: Attach) -> str:
    """What in a party's story cannot be, or nothing."""
    slabs = list(attach.free)
    for holding in attach.lent:
        slabs += holding.slabs
    holdings = [*attach.lent, *attach.borrowed]
    if not attach.party or attach.gpu < 0:
        return f"a party has a name and a GPU's number from 0 on, not {attach.party!r} and {attach.gpu}"
    if slabs and (attach.slab_bytes <= 0 or not attach.endpoint):
        return f"a lender has an endpoint and slabs of some size, not {attach.endpoint!r} and {attach.slab_bytes} bytes"
    if len(set(slabs)) < len(slabs):
        return "a slab is named twice among what you offer and have lent"
    if any(not holding.slabs or len(set(holding.slabs)) < len(holding.slabs) for holding in holdings):
        return "a lease holds one slab or more, each named once"
    if len(slabs) > MOST_SLABS or sum(len(holding.slabs) for holding in holdings) > MOST_SLABS:
        return f"more than {MOST_SLABS} slabs are named"
    if any(holding.slab_bytes != attach.slab_bytes for holding in attach.lent):
        return f"what you have lent has slabs of another size than the {attach.slab_bytes} bytes that you offer"
    if not all(0 < holding.lease < HIGHEST_LEASE for holding in holdings):
        return f"a lease's number is more than 0 and less than {HIGHEST_LEASE}"
    for group in (attach.lent, attach.borrowed):
        if len({holding.lease for holding in group}) < len(group):
            return "a lease is named twice"
    return ""


def _same(lease: Lease, holding: Holding) -> bool:
    """Whether a party that names the lease's number means this lease, and proves it."""
    return (
        holding.epoch == lease.epoch
        and holding.slab_bytes == lease.slab_bytes
        and compare_digest(holding.token.encode(), lease.token.encode())
    )

"""What operators ask of the lending core through a front door: the mapping, what is lent, and to have it back."""

from collections.abc import Callable
from typing import assert_never

from forebay.sched.ledger import Lease
from forebay.sched.lending_book import Book
from forebay.sched.lending_events import Forget, Gpu, Keep, PairRecord
from forebay.sched.reclaims import OperatorReclaim, Reclaims, answer, within
from forebay.transport.messages import (
    Answered,
    AskLending,
    GpuStatus,
    LeaseStatus,
    LendingStatus,
    LendingWish,
    Map,
    Outcome,
    ReclaimGpu,
    RevokeLease,
    Unmap,
)


class Wishes:
    def __init__(self, book: Book, reclaims: Reclaims) -> None:
        self._book = book
        self._reclaims = reclaims

    def handle(self, now: float, door: str, wish: LendingWish) -> None:
        match wish:
            case Map():
                self._map(door, wish)
            case Unmap():
                self._unmap(door, wish)
            case RevokeLease():
                self._revoke(now, door, wish)
            case ReclaimGpu():
                self._reclaim(now, door, wish)
            case AskLending(query, tenant):
                self._book.answer(door, self.status(now, query, tenant))
            case _:
                assert_never(wish)

    def status(self, now: float, query: int, tenant: str) -> LendingStatus:
        book = self._book
        leases = tuple(
            LeaseStatus(
                lease.number,
                lease.epoch,
                lease.lender,
                lease.lender_gpu,
                lease.borrower,
                lease.borrower_gpu,
                lease.bytes,
                lease.status,
                None if lease.deadline is None else round(lease.deadline - now, 3),
            )
            for lease in book.ledger.leases.values()
            if tenant in ("", lease.tenant)
        )
        counters = tuple(book.counters.items())
        return LendingStatus(query, book.mapping.pairs, self._gpus(), leases, counters)

    def _known(self) -> dict[int, Gpu]:
        known = {gpu.index: gpu for gpu in self._book.settings.gpus}
        for party in self._book.parties.values():
            known.setdefault(party.gpu, Gpu(party.gpu))
        return dict(sorted(known.items()))

    def _gpus(self) -> tuple[GpuStatus, ...]:
        book = self._book
        free: dict[int, int] = {}
        lent: dict[int, int] = {}
        borrowed: dict[int, int] = {}
        notes: dict[int, list[str]] = {}
        for name, party in book.parties.items():
            stock = book.ledger.stocks[name]
            free[party.gpu] = free.get(party.gpu, 0) + len(stock.free) * stock.slab_bytes
            if party.doubt:
                notes.setdefault(party.gpu, []).append(f"nothing more is borrowed from {name}: {party.doubt}")
        for lease in book.ledger.leases.values():
            lent[lease.lender_gpu] = lent.get(lease.lender_gpu, 0) + lease.bytes
            borrowed[lease.borrower_gpu] = borrowed.get(lease.borrower_gpu, 0) + lease.bytes
        return tuple(
            GpuStatus(
                index,
                gpu.name,
                gpu.total,
                free.get(index, 0),
                lent.get(index, 0),
                borrowed.get(index, 0),
                "; ".join(notes.get(index, ())),
            )
            for index, gpu in self._known().items()
        )

    def _answer(self, door: str, query: int) -> Callable[[Outcome, str], None]:
        return lambda outcome, reason: self._book.answer(door, Answered(query, outcome, reason))

    def _unknown(self, *gpus: int) -> str:
        """Which of these GPUs nobody knows, in words, or nothing."""
        known = self._known()
        strange = [str(gpu) for gpu in gpus if gpu not in known]
        exist = ", ".join(map(str, known)) or "none"
        return f"there is no GPU {' and no GPU '.join(strange)} here (there is: {exist})" if strange else ""

    def _map(self, door: str, wish: Map) -> None:
        say, book = self._answer(door, wish.query), self._book
        if wish.producer == wish.consumer:
            return say("refused", f"GPU {wish.producer} cannot be its own producer; name two different ones")
        if strange := self._unknown(wish.producer, wish.consumer):
            return say("unknown", strange)
        if (wish.producer, wish.consumer) in book.mapping:
            return say("duplicate", f"GPU {wish.producer} lends to GPU {wish.consumer} already")
        book.mapping.add(wish.producer, wish.consumer)
        book.keep(Keep(PairRecord(wish.producer, wish.consumer)))
        say("done", "")

    def _unmap(self, door: str, wish: Unmap) -> None:
        say, book = self._answer(door, wish.query), self._book
        if (wish.producer, wish.consumer) not in book.mapping:
            if strange := self._unknown(wish.producer, wish.consumer):
                return say("unknown", strange)
            return say(
                "absent", f"GPU {wish.producer} does not lend to GPU {wish.consumer}: there is nothing to delete"
            )
        book.mapping.remove(wish.producer, wish.consumer)
        book.keep(Forget(PairRecord(wish.producer, wish.consumer).id))
        going_on = [
            str(lease.number)
            for lease in book.ledger.leases.values()
            if (lease.lender_gpu, lease.borrower_gpu) == (wish.producer, wish.consumer)
        ]
        say("done", f"nothing new is lent; what is lent goes on: lease {', '.join(going_on)}" if going_on else "")

    def _revoke(self, now: float, door: str, wish: RevokeLease) -> None:
        say, book = self._answer(door, wish.query), self._book
        lease = book.ledger.leases.get(wish.lease)
        if lease is None:
            return say("unknown", f"there is no lease {wish.lease}, or it is over")
        if wish.tenant not in ("", lease.tenant):
            return say("forbidden", f"lease {wish.lease} is another tenant's")
        was = lease.state
        book.ask_back(now, lease, lease.slabs, now + within(wish.deadline_s), "an operator asks it back")
        notes = {"stranded": "is asked back already: its lender is gone"}
        notes |= dict.fromkeys(("revoking", "overdue"), f"was {was} already")
        note = f"lease {wish.lease} {notes[was]}" if was in notes else ""
        left = None if lease.deadline is None else round(lease.deadline - now, 3)
        book.answer(door, Answered(wish.query, "done", note, deadline_s=left))

    def _reclaim(self, now: float, door: str, wish: ReclaimGpu) -> None:
        say, book = self._answer(door, wish.query), self._book
        if strange := self._unknown(wish.gpu):
            return say("unknown", strange)
        lenders = [name for name, party in book.parties.items() if party.gpu == wish.gpu and party.slab_bytes > 0]
        mine = [name for name in lenders if wish.tenant in ("", book.parties[name].tenant)]
        if lenders and not mine:
            return say("forbidden", f"what GPU {wish.gpu} lends is another tenant's")
        operator = OperatorReclaim(door, wish.query)
        before = [(lease, tuple(lease.asked)) for lease in book.ledger.leases.values() if lease.lender in mine]
        left = wish.bytes
        for free_only in (True, False):
            for name in mine:
                stock = book.ledger.stocks[name]
                slabs = -(-max(0, left) // stock.slab_bytes)
                slabs = min(slabs, len(stock.free) if free_only else stock.offered)
                if slabs > 0:
                    left -= (
                        self._reclaims.open(now, name, 0, slabs, within(wish.deadline_s), operator) * stock.slab_bytes
                    )
        if left > 0:
            operator.reason = f"GPU {wish.gpu} lends {wish.bytes - left} bytes, which is all that can be taken back"
            operator.reason += self._hastened(now, before, wish)
        if operator.parts == 0:
            book.answer(door, answer(operator))

    def _hastened(self, now: float, asked: list[tuple[Lease, tuple[int, ...]]], wish: ReclaimGpu) -> str:
        """What was asked back of these leases before is wanted by now, too; who holds it, in words, or nothing."""
        size, holders = 0, set()
        for lease, slabs in asked:
            if slabs:
                self._book.ask_back(now, lease, slabs, now + within(wish.deadline_s), "an operator asks it back")
                size += len(slabs) * self._book.ledger.stocks[lease.lender].slab_bytes
                holders.add(lease.borrower)
        return f"; {size} bytes more are asked back already, of {', '.join(sorted(holders))}" if size else ""

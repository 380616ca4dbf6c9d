"""Lenders that take memory back: what is free at once, what is lent as its borrowers let go of it.

Every slab that is on its way back is pledged to one reclaim, so that none is counted twice. A reclaim is over when
all its slabs are back; at its deadline it reports who holds the rest, and goes on waiting for them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from forebay.sched.ledger import Lease
from forebay.sched.lending_book import Book
from forebay.transport.messages import Answered, Yielded

LONGEST_DEADLINE_S = 86400.0


def within(deadline_s: float) -> float:
    """A deadline that somebody sent, as one that can be."""
    return max(0.0, min(deadline_s, LONGEST_DEADLINE_S))


@dataclass(slots=True)
class OperatorReclaim:
    """What a front door asked of a whole GPU: over all lenders there, answered once, when every part has reported."""

    door: str
    query: int
    parts: int = 0
    yielded: int = 0
    missing: int = 0
    holders: dict[str, None] = field(default_factory=dict)
    reason: str = ""


@dataclass(slots=True, eq=False)
class Reclaim:
    """Of one lender. `pledged`: slabs that are still to come. `clean` and `kept`: those that have come and are not
    reported yet. `reported`: its last word to whoever asked was said."""

    lender: str
    request: int
    slab_bytes: int
    deadline: float
    operator: OperatorReclaim | None
    pledged: dict[int, None] = field(default_factory=dict)
    clean: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    came: int = 0
    reported: bool = False


class Reclaims:
    """All that are not over."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._open: dict[Reclaim, None] = {}
        self._pledges: dict[str, dict[int, Reclaim]] = {}
        self._news: dict[Reclaim, None] = {}
        book.taker = self._take

    def open(
        self,
        now: float,
        lender: str,
        request: int,
        slabs: int,
        deadline_s: float,
        operator: OperatorReclaim | None = None,
    ) -> int:
        """Takes that many slabs back, or as many as the lender offers: free ones, then those that are on their way back
        anyhow, then those of the fewest leases. How many slabs that are."""
        stock = self._book.ledger.stocks[lender]
        reclaim = Reclaim(lender, request, stock.slab_bytes, now + deadline_s, operator)
        if operator is not None:
            operator.parts += 1
        self._open[reclaim] = self._news[reclaim] = None
        pledges = self._pledges.setdefault(lender, {})
        for slab in list(stock.free)[:slabs]:
            stock.move(slab, "take")
            self._came(reclaim, slab, True)
            slabs -= 1
        coming = [slab for slab in stock.returned if slab not in pledges]
        leases = self._book.ledger.lent_by(lender)
        coming += [slab for lease in leases if lease.state != "stranded" for slab in lease.asked if slab not in pledges]
        self._pledge(reclaim, coming[:slabs])
        slabs -= len(coming[:slabs])
        untouched = {
            lease.number: [slab for slab in lease.slabs if slab not in lease.asked]
            for lease in leases
            if lease.state != "stranded"
        }
        for number, count in choose({number: len(found) for number, found in untouched.items() if found}, slabs):
            self._pledge(reclaim, untouched[number][-count:])
        for lease in leases:
            mine = [slab for slab in lease.slabs if pledges.get(slab) is reclaim]
            if mine:
                reason = "its lender takes it back" if operator is None else "an operator takes it back for its lender"
                self._book.ask_back(now, lease, mine, reclaim.deadline, reason)
        return reclaim.came + len(reclaim.pledged)

    def offered(self, lender: str, slab: int) -> bool:
        """A slab that its lender offers again: whether it is taken back."""
        if not self._take(lender, slab, True):
            return False
        self._book.ledger.stocks[lender].move(slab, "take")
        return True

    def forget(self, lender: str, reason: str) -> None:
        """The lender is gone, or begins anew: its reclaims are over."""
        for reclaim in [reclaim for reclaim in self._open if reclaim.lender == lender]:
            del self._open[reclaim]
            self._news.pop(reclaim, None)
            if not reclaim.reported:
                self._report(reclaim, reason)
        self._pledges.pop(lender, None)

    def expire(self, now: float) -> None:
        for reclaim in self._open:
            if not reclaim.reported and reclaim.deadline <= now:
                self._news[reclaim] = None

    def shift(self, now: float, absent: float) -> None:
        for reclaim in self._open:
            reclaim.deadline += absent

    def settle(self, now: float) -> None:
        """At the end of an event: one `Yielded` for each reclaim that has something to say."""
        for reclaim in self._news:
            complete = not reclaim.pledged or reclaim.reported or reclaim.deadline <= now
            missing = len(reclaim.pledged) * reclaim.slab_bytes if complete else 0
            message = Yielded(
                reclaim.request,
                tuple(reclaim.clean),
                tuple(reclaim.kept),
                complete,
                missing,
                tuple(self._holders(reclaim)) if complete else (),
            )
            reclaim.clean, reclaim.kept = [], []
            # An operator's reclaim that brought nothing is of no interest to the lender.
            if reclaim.operator is None or message.slabs or message.kept:
                self._book.tell(reclaim.lender, message)
            if complete and not reclaim.reported:
                self._report(reclaim, "")
            if not reclaim.pledged:
                del self._open[reclaim]
        self._news.clear()

    def check(self) -> None:
        """Asserts that every pledged slab is out, and on its way back."""
        for lender, pledges in self._pledges.items():
            if not pledges:
                continue
            stock = self._book.ledger.stocks[lender]
            for slab, reclaim in pledges.items():
                assert reclaim in self._open, reclaim
                assert slab in reclaim.pledged, reclaim
                assert slab in stock.returned or slab in self._lease_of(lender, slab).asked, (lender, slab)
        for reclaim in self._open:
            assert reclaim.pledged, f"{reclaim} is over"
            assert all(self._pledges[reclaim.lender][slab] is reclaim for slab in reclaim.pledged), reclaim

    def _lease_of(self, lender: str, slab: int) -> Lease:
        return self._book.ledger.leases[self._book.ledger.stocks[lender].lent[slab]]

    def _pledge(self, reclaim: Reclaim, slabs: Iterable[int]) -> None:
        for slab in slabs:
            reclaim.pledged[slab] = None
            self._pledges[reclaim.lender][slab] = reclaim

    def _take(self, lender: str, slab: int, clean: bool) -> bool:
        reclaim = self._pledges.get(lender, {}).pop(slab, None)
        if reclaim is None:
            return False
        del reclaim.pledged[slab]
        self._came(reclaim, slab, clean)
        return True

    def _came(self, reclaim: Reclaim, slab: int, clean: bool) -> None:
        (reclaim.clean if clean else reclaim.kept).append(slab)
        reclaim.came += 1
        self._news[reclaim] = None

    def _holders(self, reclaim: Reclaim) -> dict[str, None]:
        """Of what is missing; a slab that its lender has yet to offer again is held by the lender itself."""
        stock = self._book.ledger.stocks.get(reclaim.lender)
        return {
            reclaim.lender
            if stock is None or slab not in stock.lent
            else self._lease_of(reclaim.lender, slab).borrower: None
            for slab in reclaim.pledged
        }

    def _report(self, reclaim: Reclaim, reason: str) -> None:
        reclaim.reported = True
        if (operator := reclaim.operator) is None:
            return
        operator.parts -= 1
        operator.yielded += reclaim.came * reclaim.slab_bytes
        operator.missing += len(reclaim.pledged) * reclaim.slab_bytes
        operator.holders |= self._holders(reclaim)
        operator.reason = operator.reason or reason
        if operator.parts == 0:
            self._book.answer(operator.door, answer(operator))


def answer(operator: OperatorReclaim) -> Answered:
    return Answered(
        operator.query, "done", operator.reason, operator.yielded, operator.missing, tuple(operator.holders)
    )


def choose(available: dict[int, int], need: int) -> list[tuple[int, int]]:
    """The fewest leases that cover the need, and how many slabs of each: the largest, until one alone covers what is
    left; of these the smallest, which is disturbed least. Ties go to the older lease."""
    chosen = []
    rest = dict(available)
    while need > 0 and rest:
        covering = [number for number in rest if rest[number] >= need]
        if covering:
            number = min(covering, key=lambda number: (rest[number], number))
        else:
            number = max(rest, key=lambda number: (rest[number], -number))
        taken = min(need, rest.pop(number))
        chosen.append((number, taken))
        need -= taken
    return chosen

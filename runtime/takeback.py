"""A lender's requests to have memory back, each until it is answered, its deadline passes, or the scheduler is away for
longer than that."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay.gpu.backend import MemorySlab
from forebay.runtime.lender_slabs import LentSlab, SlabTable
from forebay.runtime.party import Party
from forebay.transport.messages import TakeBack, Yielded

ANSWER_S = 1.0
"""A scheduler that is there yields free slabs at once; without any sign for so long it counts as away."""

GRACE_S = 1.0
"""How much later than the deadline the scheduler's account of what is missing may arrive."""


@dataclass(frozen=True)
class Reclaimed:
    """`bytes` are the lender's own again. Of slabs given to `offer_slabs`: `slabs` can be used, with whatever borrowers
    left in them; `kept` may still be mapped by a borrower (or one of another user): close them and make new ones.
    Slabs that the lender had made are closed already. `missing` bytes are still out, held by `holders` (parties)."""

    bytes: int
    slabs: tuple[MemorySlab, ...]
    kept: tuple[MemorySlab, ...]
    missing: int
    holders: tuple[str, ...]


@dataclass
class Wait:
    """One request: so many slabs `wanted` by `deadline` (loop time), and what has come."""

    wanted: int
    deadline: float
    answered: asyncio.Event
    done: asyncio.Event
    slabs: list[LentSlab] = field(default_factory=list)
    kept: list[LentSlab] = field(default_factory=list)
    missing: int | None = None
    holders: tuple[str, ...] = ()

    @property
    def left(self) -> int:
        """Slabs still to come."""
        return self.wanted - len(self.slabs) - len(self.kept)


class TakeBacks:
    """All requests of one lender that somebody waits for."""

    def __init__(self, party: Party, table: SlabTable, loop: asyncio.AbstractEventLoop) -> None:
        self._party = party
        self._table = table
        self._loop = loop
        self._waits: dict[int, Wait] = {}
        self._owed: dict[int, int] = {}
        """Slabs that had not come at their deadline, and still will, by request."""
        self._last = 0

    def open(self, slabs: int, deadline_s: float) -> Wait:
        return Wait(slabs, self._loop.time() + deadline_s, asyncio.Event(), asyncio.Event())

    async def run(self, wait: Wait) -> None:
        """Waits until so many slabs have come, or for what the scheduler says at the deadline."""
        self._last += 1
        number = self._last
        self._waits[number] = wait
        try:
            if self._party.attached:
                self._ask(number, wait)
                if self._table.of("free"):
                    await _within(wait.answered, ANSWER_S)
                    if not wait.answered.is_set():
                        self._party.unanswered("a request to have memory back")
            if not self._party.attached:
                # Nobody is there to promise them to anyone; a promise on its way meets a lender that refuses it.
                self.took(wait, self._table.of("free")[: wait.left], [])
            await _within(wait.done, max(0.0, wait.deadline - self._loop.time()) + GRACE_S)
        finally:
            for key in [key for key, value in self._waits.items() if value is wait]:
                del self._waits[key]
                if wait.left > 0:
                    self._owed[key] = wait.left

    def took(self, wait: Wait, slabs: Sequence[LentSlab], kept: Sequence[LentSlab]) -> None:
        self._table.remove([*slabs, *kept])
        wait.slabs += slabs
        wait.kept += kept
        if wait.left <= 0:
            wait.missing, wait.holders = 0, ()
            wait.done.set()

    def yielded(self, message: Yielded, slabs: Sequence[LentSlab], kept: Sequence[LentSlab]) -> bool:
        """False: nobody waits for them."""
        wait = self._waits.get(message.request)
        if wait is None:
            self._came(message.request, len(slabs) + len(kept))
            return False
        wait.answered.set()
        self.took(wait, slabs, kept)
        if message.complete:
            wait.missing, wait.holders = message.missing, message.holders
            wait.done.set()
        return True

    def _came(self, request: int, slabs: int) -> None:
        if request in self._owed:
            self._owed[request] -= slabs
            if self._owed[request] <= 0:
                del self._owed[request]

    def ask_again(self) -> None:
        """The scheduler has forgotten what was asked before the latest `Attach`."""
        waits, self._waits = self._waits, {}
        for wait in waits.values():
            if wait.left > 0 and not wait.done.is_set():
                self._last += 1
                self._waits[self._last] = wait
                self._ask(self._last, wait)
        owed, self._owed = sum(self._owed.values()), {}
        if owed:
            self._last += 1
            self._owed[self._last] = owed
            self._party.send(TakeBack(self._last, owed * self._table.slab_bytes, 0.0))

    def _ask(self, number: int, wait: Wait) -> None:
        left_s = max(0.0, wait.deadline - self._loop.time())
        self._party.send(TakeBack(number, wait.left * self._table.slab_bytes, left_s))

    def account(self, wait: Wait, slabs: Sequence[MemorySlab], kept: Sequence[MemorySlab]) -> Reclaimed:
        """What to say of a wait that is over. Without the scheduler's word, who holds the rest is what is known
        here."""
        size = self._table.slab_bytes
        missing, holders = wait.missing, wait.holders
        if missing is None:
            lent = sum(len(lease.slabs) for lease in self._table.leases.values())
            missing = min(wait.left, lent) * size
            holders = tuple(sorted({lease.borrower for lease in self._table.leases.values()})) if missing else ()
        return Reclaimed((len(wait.slabs) + len(wait.kept)) * size, tuple(slabs), tuple(kept), missing, holders)


async def _within(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(None if math.isinf(seconds) else seconds):
            await event.wait()
    except TimeoutError:
        pass

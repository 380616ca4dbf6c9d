"""Keeps a loan's memory where it belongs, in the library's event loop: fills it, moves what is asked back, and gives it
all back in the end. How slabs go in and out is in loan_memory.py; what apps see of it in loan.py.
"""

import asyncio
import math
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from forebay.gpu.errors import DeviceError
from forebay.runtime.background import MOVERS, log
from forebay.runtime.leases import HeldLease
from forebay.runtime.lending_errors import LendingError
from forebay.runtime.loan_memory import LoanMemory
from forebay.runtime.loan_parts import Revocation, Tools
from forebay.runtime.loan_slots import MOVE_WAIT_S, Peer

if TYPE_CHECKING:
    from forebay.runtime.loan import Loan

CLOSE_WAIT_S = 1.0
"""How long a borrower that closes waits for whoever holds a loan."""

RETRY_S = 0.05
"""Pause before a slot is tried again that its users hold, or for which there was no room."""

SHARE_OF_DEADLINE = 0.25
"""What of a revocation's deadline may be spent on finding another lender; the rest is for copying."""


class LoanKeeper:
    """`bytes` and `reason` are the loan's; `views` are the buffers given out, `holders` the threads in `hold`."""

    def __init__(self, tools: Tools, wanted: int, loan: "Loan") -> None:
        self.loan = loan
        self.bytes = 0
        self.views: list[weakref.ref[Any]] = []
        self.holders: list[int] = []
        self._wanted = wanted
        self._tools = tools
        self._memory = LoanMemory(tools)
        self.slots = self._memory.slots
        self._mutex = asyncio.Lock()
        """Held by whoever changes slots."""
        self._vacating = asyncio.Lock()
        """Held while something asked back is on its way out: the app is asked about each slot once."""
        self._ended = False
        self._closing: asyncio.Task[None] | None = None

    @property
    def reason(self) -> str:
        return self._memory.reason

    def ended(self) -> bool:
        """Whether it was released, or is about to be. From any thread."""
        closing = self._closing
        return closing is not None and (self.slots.closed or not closing.done())

    async def fill(self, leases: list[HeldLease], reason: str, host: bool) -> None:
        """Maps what was obtained and, where that is not enough, memory of the host."""
        tools, memory, slots = self._tools, self._memory, self.slots
        wanted = -(-self._wanted // tools.slab_bytes)
        memory.reason = reason
        with memory.arriving(leases):
            async with self._mutex:
                await tools.background.work(slots.open, wanted)
                for lease in leases:
                    await memory.map(lease)
                if host:
                    await memory.fill_with_host(wanted)
                self.bytes = min(self._wanted, len(slots.places) * tools.slab_bytes)
                self._say_need()
                if not slots.places:
                    slots.close()

    def revoked(self, lease: HeldLease, numbers: frozenset[int], deadline_s: float, reason: str) -> None:
        """Must not block: the move is a task of its own."""
        self._tools.background.spawn(self._vacate(lease, numbers, deadline_s, reason))

    async def _vacate(self, lease: HeldLease, numbers: frozenset[int], deadline_s: float, reason: str) -> None:
        """Empties slots that were asked back and lets go of their slabs, one by one."""
        async with self._vacating:
            async with self._mutex:  # what is being moved in is there afterwards
                slots = self._slots_of(lease, numbers)
            # Without the mutex: the app may release the loan there.
            moved = bool(slots) and await self._app_has_moved(slots, deadline_s, reason)
            async with self._mutex:
                slots = self._slots_of(lease, numbers)
                if not slots:
                    return
                if moved:
                    for slot in slots:
                        await self._drop(slot)
                else:
                    await self._move_out(slots, lease, deadline_s)
                self._say_need()

    def _slots_of(self, lease: HeldLease, numbers: frozenset[int]) -> list[int]:
        """None once the loan has ended: then whoever closes it empties them."""
        if self._ended:
            return []
        asked = {Peer(lease, number) for number in numbers}
        return [slot for slot, place in enumerate(self.slots.places) if place in asked]

    async def _move_out(self, slots: list[int], lease: HeldLease, deadline_s: float) -> None:
        """To other lenders, or to the host."""
        fresh = [] if lease.over else await self._elsewhere(lease.lender, len(slots), deadline_s)
        with self._memory.arriving(fresh) as targets:
            left = deque((slot, targets.popleft() if targets else None) for slot in slots)
            async with asyncio.TaskGroup() as movers:
                for _ in range(min(MOVERS, len(slots))):
                    movers.create_task(self._move_all(left))
        if any(self.slots.places[slot] == "host" for slot in slots):
            self._tools.fell_back()

    async def _move_all(self, left: "deque[tuple[int, Peer | None]]") -> None:
        """Moves one slot after the other; several do at once, since copying and mapping can overlap."""
        while left:
            slot, target = left.popleft()
            while not self._ended and not await self._memory.move(slot, target):  # noqa: ASYNC110 (other threads)
                await asyncio.sleep(RETRY_S)

    def _say_need(self) -> None:
        """How much of this loan may be asked back."""
        lent = sum(isinstance(place, Peer) for place in self.slots.places)
        self._tools.stock.need(self, 0 if self._ended else lent)

    async def _app_has_moved(self, slots: list[int], deadline_s: float, reason: str) -> bool:
        callback = self._tools.on_revoke()
        if callback is None:
            return False
        size = self._tools.slab_bytes
        revocation = Revocation(self.loan, tuple((slot * size, size) for slot in slots), deadline_s, reason)
        try:
            return bool(await self._tools.background.call(callback, revocation))
        except Exception:
            log.exception("%s: on_revoke raised; its memory is moved", self._tools.leasing.party.identity.party)
            return False

    async def _elsewhere(self, lender: str, count: int, deadline_s: float) -> list[HeldLease]:
        """Other lenders' slabs, if there are any to be had soon."""
        try:
            async with asyncio.timeout(None if math.isinf(deadline_s) else deadline_s * SHARE_OF_DEADLINE):
                size = count * self._tools.slab_bytes
                leases, _ = await self._tools.leasing.obtain(size, self.revoked, avoid=lender)
                return leases
        except TimeoutError:
            return []

    @property
    def on_host(self) -> int:
        """Slabs of this loan that are the host's."""
        return 0 if self._ended else self.slots.places.count("host")

    async def come_back(self, most: int) -> int:
        """Moves up to so many slabs from the host to lent memory, those that nobody uses at the moment, one by one.
        Returns how many."""
        leases, _ = await self._tools.leasing.obtain(most * self._tools.slab_bytes, self.revoked)
        moved = 0
        with self._memory.arriving(leases) as targets:
            async with self._mutex:
                for slot, place in list(enumerate(self.slots.places)):
                    if not targets or self._ended:
                        break
                    if place == "host" and await self._memory.move_back(slot, targets[0]):
                        targets.popleft()
                        moved += 1
                if not self.on_host:
                    self._memory.reason = ""
                self._say_need()
        return moved

    async def _emptied(self, slot: int) -> bool:
        """False: its users have not left it for `CLOSE_WAIT_S`."""
        for _ in range(int(CLOSE_WAIT_S / MOVE_WAIT_S)):
            if await self._tools.background.work(self.slots.empty, slot):
                return True
        return False

    async def _drop(self, slot: int) -> None:
        """Empties a slot whose contents nobody needs, unless the loan ends before its users leave it."""
        place = self.slots.places[slot]
        try:
            while not self._ended and not await self._tools.background.work(self.slots.empty, slot):  # noqa: ASYNC110
                await asyncio.sleep(RETRY_S)
        finally:
            await self._memory.left(slot, place)

    async def release(self) -> None:
        if self.in_use():
            raise LendingError("a buffer of this loan, or something made from it, is in use; drop it before `release`")
        while self.holders:  # noqa: ASYNC110 (they are other threads)
            await asyncio.sleep(RETRY_S)
        await self.close()

    def in_use(self) -> bool:
        return any(view() is not None for view in self.views)

    async def close(self) -> None:
        """Gives everything back. A buffer that is still in use, or a slot that somebody holds for longer than that,
        has zeros from then on. It goes on where whoever waits for it is cancelled. Raises DeviceError, OSError where
        memory can be neither unmapped nor replaced: that stays the loan's, and closing again tries again."""
        self._ended = True
        if self._closing is None or self._closing.done():
            self._closing = self._tools.background.spawn(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._say_need()
        problem: Exception | None = None
        async with self._mutex:
            in_use = self.in_use()
            for slot, place in enumerate(list(self.slots.places)):
                if place == "gone":
                    continue
                try:
                    if in_use or not await self._emptied(slot):
                        await self._tools.background.work(self.slots.blank, slot)
                except (DeviceError, OSError) as error:
                    problem = error
                finally:
                    await self._memory.left(slot, place)
            if problem is not None:
                raise problem
            self.bytes = 0
            self._tools.released(self.loan)
            self.slots.close()

"""Keeps a loan's memory where it belongs, in the library's event loop: fills it, moves what is asked back, and gives it
all back in the end. What it holds is in loan_slots.py; what apps see of it in loan.py.
"""

import asyncio
import math
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from forebay.gpu.backend import MemorySlab
from forebay.gpu.errors import DeviceError
from forebay.runtime.background import MOVERS, log
from forebay.runtime.leases import HeldLease
from forebay.runtime.lending_errors import LendingError
from forebay.runtime.loan_parts import Revocation, Tools
from forebay.runtime.loan_slots import MOVE_WAIT_S, LoanSlots, Peer, Place

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
        self.reason = ""
        self.slots = LoanSlots(tools.memory, tools.slab_bytes, tools.stock.keeps)
        self.views: list[weakref.ref[Any]] = []
        self.holders: list[int] = []
        self._wanted = wanted
        self._tools = tools
        self._mutex = asyncio.Lock()
        """Held by whoever changes slots."""
        self._ended = False

    def ended(self) -> bool:
        """Whether it was released, or is about to be."""
        return self._ended

    async def fill(self, leases: list[HeldLease], reason: str, host: bool) -> None:
        """Maps what was obtained and, where that is not enough, memory of the host."""
        tools, slots = self._tools, self.slots
        wanted = -(-self._wanted // tools.slab_bytes)
        self.reason = reason
        async with self._mutex:
            try:
                await tools.background.work(slots.open, wanted)
                for lease in leases:
                    await self._map(lease)
                if host:
                    await self._fill_with_host(wanted)
            except BaseException:
                mapped = {(place.lease, place.number) for place in slots.places if isinstance(place, Peer)}
                for lease in leases:
                    lease.release([number for number in lease.slabs if (lease, number) not in mapped])
                raise
            self.bytes = min(self._wanted, len(slots.places) * tools.slab_bytes)
            self._say_need()
            if not slots.places:
                slots.close()

    async def _fill_with_host(self, wanted: int) -> None:
        tools, slots = self._tools, self.slots
        while len(slots.places) < wanted:
            slab: MemorySlab | None = None
            before = len(slots.places)
            try:
                slab = await tools.stock.take(zero=True)
                if slab is not None:
                    await tools.background.work(slots.append_host, slab)
            except (DeviceError, OSError) as error:
                self.reason = f"{self.reason}; {error}"
                return
            finally:
                if slab is not None and len(slots.places) == before:
                    await tools.stock.give(slab)
            if slab is None:
                self.reason = f"{self.reason or 'no lender has enough'}; the host has no memory left for it either"
                return

    async def _map(self, lease: HeldLease) -> None:
        slabs = [(slab, Peer(lease, number)) for number, slab in sorted(lease.slabs.items()) if slab is not None]
        try:
            await self._tools.background.work(self.slots.append, slabs)
        except (DeviceError, OSError) as error:
            self._tools.leasing.give_up(lease, str(error), False)  # this process has no room for it
            return
        for number in list(lease.slabs):
            lease.close_handle(number)
        self._tools.leasing.mapped(lease)

    def revoked(self, lease: HeldLease, numbers: frozenset[int], deadline_s: float, reason: str) -> None:
        """Must not block: the move is a task of its own."""
        self._tools.background.spawn(self._vacate(lease, numbers, deadline_s, reason))

    async def _vacate(self, lease: HeldLease, numbers: frozenset[int], deadline_s: float, reason: str) -> None:
        """Empties slots that were asked back and lets go of their slabs, one by one."""
        async with self._mutex:
            places = dict(enumerate(self.slots.places))
            slots = [slot for slot, place in places.items() if _is_of(place, lease, numbers)]
            if not slots or self._ended:
                return
            if await self._app_has_moved(slots, deadline_s, reason):
                for slot in slots:
                    await self._drop(slot)
                self._say_need()
                return
            fresh = [] if lease.over else await self._elsewhere(lease.lender, len(slots), deadline_s)
            targets = deque(Peer(other, number) for other in fresh for number in sorted(other.slabs))
            left = deque((slot, targets.popleft() if targets else None) for slot in slots)
            async with asyncio.TaskGroup() as movers:
                for _ in range(min(MOVERS, len(slots))):
                    movers.create_task(self._move_all(left))
            self._say_need()
            if any(self.slots.places[slot] == "host" for slot in slots if slot < len(self.slots.places)):
                self._tools.fell_back()
            for other in fresh:
                other.release([target.number for target in targets if target.lease is other])
                self._tools.leasing.mapped(other)

    async def _move_all(self, left: "deque[tuple[int, Peer | None]]") -> None:
        """Moves one slot after the other; several do at once, since copying and mapping can overlap."""
        while left:
            slot, target = left.popleft()
            while not self.ended() and not await self._move(slot, target):  # noqa: ASYNC110 (other threads)
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

    async def _move(self, slot: int, target: Peer | None) -> bool:
        """To that slab, or to the host. False: not now. Users hold the slot, or the host has no memory left."""
        tools = self._tools
        place = self.slots.places[slot]
        assert isinstance(place, Peer), "only lent slabs are asked back"
        try:
            if target is None:
                moved = await self._move_to_host(slot)
            else:
                slab = target.lease.slabs[target.number]
                assert slab is not None, "slabs are open until they are mapped"
                moved = await tools.background.move(self.slots.move, slot, slab, target)
        except (DeviceError, OSError) as error:
            self._say(f"memory was asked back and cannot be moved yet: {error}")
            return False
        if moved:
            if target is not None:
                target.lease.close_handle(target.number)
            place.lease.release([place.number])
        return moved

    async def _move_to_host(self, slot: int) -> bool:
        """Raises DeviceError, OSError."""
        tools = self._tools
        slab = await tools.stock.take()
        if slab is None:
            self._say("memory was asked back, and the host has none left to put it; waiting for some")
            return False
        moved = False
        try:
            moved = await tools.background.move(self.slots.move_to_host, slot, slab)
        finally:
            if not moved:
                await tools.stock.give(slab)
        return moved

    @property
    def on_host(self) -> int:
        """Slabs of this loan that are the host's."""
        return 0 if self._ended else self.slots.places.count("host")

    async def come_back(self, most: int) -> int:
        """Moves up to so many slabs from the host to lent memory, those that nobody uses at the moment, one by one.
        Returns how many."""
        tools, slots = self._tools, self.slots
        leases, _ = await tools.leasing.obtain(most * tools.slab_bytes, self.revoked)
        targets = deque(Peer(lease, number) for lease in leases for number in sorted(lease.slabs))
        moved = 0
        async with self._mutex:
            try:
                for slot, place in list(enumerate(slots.places)):
                    if not targets or self._ended:
                        break
                    if place == "host" and await self._move_back(slot, targets[0]):
                        targets.popleft()
                        moved += 1
            finally:
                for lease in leases:
                    lease.release([target.number for target in targets if target.lease is lease])
                    tools.leasing.mapped(lease)
            if not self.on_host:
                self.reason = ""
            self._say_need()
        return moved

    async def _move_back(self, slot: int, target: Peer) -> bool:
        """False: somebody uses the slot, or the slab cannot be mapped."""
        tools = self._tools
        slab = target.lease.slabs.get(target.number)
        if slab is None:
            return False
        try:
            if not await tools.background.move(self.slots.move, slot, slab, target, 0.0):
                return False
        except (DeviceError, OSError) as error:
            log.debug("%s: a slab stays on the host: %s", tools.background.name, error)
            return False
        target.lease.close_handle(target.number)
        await tools.stock.give(self.slots.left_by(slot))
        return True

    def _say(self, text: str) -> None:
        """Once, however often it is tried."""
        if self.reason != text:
            self.reason = text
            log.warning("%s: %s", self._tools.leasing.party.identity.party, text)

    async def _emptied(self, slot: int) -> bool:
        """False: its users have not left it for `CLOSE_WAIT_S`."""
        for _ in range(int(CLOSE_WAIT_S / MOVE_WAIT_S)):
            if await self._tools.background.work(self.slots.empty, slot):
                return True
        return False

    async def _drop(self, slot: int) -> None:
        """Empties a slot whose contents nobody needs."""
        place = self.slots.places[slot]
        while not await self._tools.background.work(self.slots.empty, slot):  # noqa: ASYNC110 (other threads)
            await asyncio.sleep(RETRY_S)
        await self._give_back(slot, place)

    async def _give_back(self, slot: int, place: Place) -> None:
        """What the slot had."""
        if isinstance(place, Peer):
            place.lease.release([place.number])
        elif place == "host":
            await self._tools.stock.give(self.slots.left_by(slot))

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
        has zeros from then on."""
        self._ended = True
        self._say_need()
        async with self._mutex:
            if self.slots.closed:
                return
            in_use = self.in_use()
            for slot, place in enumerate(list(self.slots.places)):
                if place == "gone":
                    continue
                if in_use or not await self._emptied(slot):
                    await self._tools.background.work(self.slots.blank, slot)
                await self._give_back(slot, place)
            self.slots.close()
            self.bytes = 0
            self._tools.released(self.loan)


def _is_of(place: Place, lease: HeldLease, numbers: frozenset[int]) -> bool:
    return isinstance(place, Peer) and place.lease is lease and place.number in numbers

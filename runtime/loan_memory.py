"""What goes in and out of a loan's slots, in the library's event loop. When that happens is loan_keeper.py's business.

The slots say what the loan holds, and nothing else does: lent slabs come in through `arriving`, which lets go of those
that are in no slot at its end, and go out through `left`, which lets go of what is in its slot no longer. Both look at
the slots whatever has happened in between: success, an error, a cancellation, or the end of the loan.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from forebay.gpu.backend import MemorySlab
from forebay.gpu.errors import DeviceError
from forebay.runtime.background import log
from forebay.runtime.leases import HeldLease
from forebay.runtime.loan_parts import Tools
from forebay.runtime.loan_slots import LoanSlots, Peer, Place


class LoanMemory:
    """`reason`: why it is less, or elsewhere, than was asked for. Whoever calls what changes slots sees to it that
    nobody else changes them meanwhile."""

    def __init__(self, tools: Tools) -> None:
        self.slots = LoanSlots(tools.memory, tools.slab_bytes, tools.stock.keeps)
        self.reason = ""
        self._tools = tools

    @contextmanager
    def arriving(self, leases: list[HeldLease]) -> "Iterator[deque[Peer]]":
        """Their slabs, in order, on the way to slots. Those that are in none at the end of the block are let go of, and
        from then on the leases can be asked back."""
        try:
            yield deque(Peer(lease, number) for lease in leases for number in sorted(lease.slabs))
        finally:
            held = set(self.slots.places)
            for lease in leases:
                lease.release([number for number in lease.slabs if Peer(lease, number) not in held])
                for number in lease.slabs:
                    lease.close_handle(number)
                self._tools.leasing.mapped(lease)

    async def map(self, lease: HeldLease) -> None:
        slabs = [(slab, Peer(lease, number)) for number, slab in sorted(lease.slabs.items()) if slab is not None]
        try:
            await self._tools.background.work(self.slots.append, slabs)
        except (DeviceError, OSError) as error:
            self.reason = self.reason or f"this process cannot map what it was lent: {error}"
            return
        for number in list(lease.slabs):
            lease.close_handle(number)
        self._tools.leasing.mapped(lease)

    async def fill_with_host(self, wanted: int) -> None:
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

    async def move(self, slot: int, target: Peer | None) -> bool:
        """To that slab, or to the host. False: not now. Users hold the slot, or the host has no memory left."""
        place = self.slots.places[slot]
        try:
            if target is None:
                await self._move_to_host(slot)
            else:
                slab = target.lease.slabs[target.number]
                assert slab is not None, "slabs are open until they are mapped"
                await self._tools.background.move(self.slots.move, slot, slab, target)
        except (DeviceError, OSError) as error:
            self._say(f"memory was asked back and cannot be moved yet: {error}")
        finally:
            moved = await self.left(slot, place)
        return moved

    async def _move_to_host(self, slot: int) -> None:
        """If it can be. Raises DeviceError, OSError."""
        tools = self._tools
        slab = await tools.stock.take()
        if slab is None:
            self._say("memory was asked back, and the host has none left to put it; waiting for some")
            return
        try:
            await tools.background.move(self.slots.move_to_host, slot, slab)
        finally:
            if self.slots.places[slot] != "host":
                await tools.stock.give(slab)

    async def left(self, slot: int, place: Place) -> bool:
        """Lets go of what was in a slot, if that is elsewhere or nowhere now. Whether it is."""
        if self.slots.places[slot] == place:
            return False
        if isinstance(place, Peer):
            place.lease.release([place.number])
        elif place == "host":
            await self._tools.stock.give(self.slots.left_by(slot))
        return True

    async def move_back(self, slot: int, target: Peer) -> bool:
        """False: somebody uses the slot, or the slab cannot be mapped."""
        tools = self._tools
        slab = target.lease.slabs.get(target.number)
        if slab is None:
            return False
        try:
            await tools.background.move(self.slots.move, slot, slab, target, 0.0)
        except (DeviceError, OSError) as error:
            log.debug("%s: a slab stays on the host: %s", tools.background.name, error)
        finally:
            moved = await self.left(slot, "host")
        return moved

    def _say(self, text: str) -> None:
        """Once, however often it is tried."""
        if self.reason != text:
            self.reason = text
            log.warning("%s: %s", self._tools.leasing.party.identity.party, text)

"""What a borrower gets: one stretch of addresses, behind which memory of several lenders and of the host may lie, and
may change places, while offsets, addresses and contents stay the same.
"""

import asyncio
import math
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self

from forebay.gpu.errors import DeviceError
from forebay.runtime.background import log
from forebay.runtime.leases import HeldLease
from forebay.runtime.lending_errors import LendingError
from forebay.runtime.loan_parts import Piece, Revocation, Tools
from forebay.runtime.loan_slots import MOVE_WAIT_S, LoanSlots, Peer, Place

CLOSE_WAIT_S = 1.0
"""How long a borrower that closes waits for whoever holds a loan."""

RETRY_S = 0.05
"""Pause before a slot is tried again that its users hold, or for which there was no room."""

SHARE_OF_DEADLINE = 0.25
"""What of a revocation's deadline may be spent on finding another lender; the rest is for copying."""


class Loan:
    """Made by `Borrower.allocate`. `bytes` may be less than was asked for, even 0; `reason` then says why."""

    def __init__(self, tools: Tools, wanted: int) -> None:
        self.bytes = 0
        self.reason = ""
        self._wanted = wanted
        self._tools = tools
        self._slots = LoanSlots(tools.memory, tools.slab_bytes)
        self._mutex = asyncio.Lock()
        """Held, in the library's loop, by whoever changes slots."""
        self._released = False
        self._views: list[weakref.ref[Any]] = []
        self._holders: list[int] = []
        """Threads that are in `hold`."""

    # For whoever borrows -------------------------------------------------------------------------------------------

    @property
    def where(self) -> Literal["peer", "host", "mixed", "nowhere"]:
        """Whether the bytes are a lender's, the host's, or some of each."""
        kinds = {"host" if place == "host" else "peer" for place in list(self._slots.places) if place != "gone"}
        if not kinds:
            return "nowhere"
        return "mixed" if len(kinds) > 1 else "host" if kinds == {"host"} else "peer"

    def pieces(self) -> tuple[Piece, ...]:
        """Where each slab of it is at the moment, in order."""
        size = self._tools.slab_bytes
        return tuple(
            Piece(slot * size, size, place.lease.lender, place.lease.number)
            if isinstance(place, Peer)
            else Piece(slot * size, size, place)
            for slot, place in enumerate(list(self._slots.places))
        )

    @property
    def address(self) -> int:
        """First address of the loan; it never changes. See `hold`."""
        return self._slots.arena.base

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Raises ValueError outside of the loan, Closed for what was let go of."""
        view = memoryview(data).cast("B")
        if slots := self._touched(offset, len(view)):
            with self._slots.using(slots):
                self._slots.require(slots)
                self._tools.memory.write(self._slots.arena.base + offset, view)

    def read(self, offset: int, size: int) -> bytes:
        """Raises ValueError outside of the loan, Closed for what was let go of."""
        slots = self._touched(offset, size)
        if not slots:
            return b""
        with self._slots.using(slots):
            self._slots.require(slots)
            return self._tools.memory.read(self._slots.arena.base + offset, size)

    def _touched(self, offset: int, size: int) -> range:
        if offset < 0 or size < 0 or offset + size > self.bytes:
            raise ValueError(f"{size} bytes at {offset} are not within the loan's {self.bytes} bytes")
        slab = self._tools.slab_bytes
        return range(offset // slab, -(-(offset + size) // slab)) if size else range(0)

    def buffer(self) -> Any:
        """All of it to look at without a copy: on `cpu:N` a writable memoryview of `bytes` bytes, elsewhere an object
        with `__cuda_array_interface__` for the whole slabs. Drop it, and all that was made from it, before `release`.
        To write (on `cuda:N` also to read) through it, `hold` the loan meanwhile."""
        whole = self._slots.arena.buffer()
        self._views.append(weakref.ref(whole))
        if hasattr(whole, "__cuda_array_interface__"):
            return whole
        return memoryview(whole).cast("B")[: self.bytes]

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Nothing moves within the block: what is written through `buffer` or `address` outside of it may be lost to a
        move. Revocations wait, and their deadlines do not: keep it short. On `cuda:N` synchronise before its end."""
        with self._slots.using(range(len(self._slots.places))):
            self._holders.append(threading.get_ident())
            try:
                yield
            finally:
                self._holders.remove(threading.get_ident())

    def release(self) -> None:
        """Gives all of it back; it cannot be used any more. Releasing twice is fine. Waits for other threads that hold
        it. Raises LendingError within `hold`, and while a buffer of it is in use."""
        if not self._ended():
            self._require_let_go()
            self._tools.background.run(self._release())

    async def release_async(self) -> None:
        if not self._ended():
            self._require_let_go()
            await self._tools.background.wait(self._release())

    def _require_let_go(self) -> None:
        if threading.get_ident() in self._holders:
            raise LendingError("`release` within `hold` would wait for itself; leave the block first")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    # In the library's loop -----------------------------------------------------------------------------------------

    def _ended(self) -> bool:
        return self._released

    async def fill(self, leases: list[HeldLease], reason: str, host: bool) -> None:
        """Maps what was obtained and, where that is not enough, memory of the host."""
        tools, slots = self._tools, self._slots
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
            if not slots.places:
                slots.close()

    async def _fill_with_host(self, wanted: int) -> None:
        tools, slots = self._tools, self._slots
        while len(slots.places) < wanted:
            if not tools.budget.take(tools.slab_bytes):
                self.reason = f"{self.reason or 'no lender has enough'}; the host has no memory left for it either"
                return
            before = len(slots.places)
            try:
                await tools.background.work(slots.append_host)
            except (DeviceError, OSError) as error:
                self.reason = f"{self.reason}; {error}"
                return
            finally:
                if len(slots.places) == before:
                    tools.budget.give_back(tools.slab_bytes)

    async def _map(self, lease: HeldLease) -> None:
        slabs = [(slab, Peer(lease, number)) for number, slab in sorted(lease.slabs.items()) if slab is not None]
        try:
            await self._tools.background.work(self._slots.append, slabs)
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
            places = dict(enumerate(self._slots.places))
            slots = [slot for slot, place in places.items() if _is_of(place, lease, numbers)]
            if not slots or self._released:
                return
            if await self._app_has_moved(slots, deadline_s, reason):
                for slot in slots:
                    await self._drop(slot)
                return
            fresh = [] if lease.over else await self._elsewhere(lease.lender, len(slots), deadline_s)
            targets = [Peer(other, number) for other in fresh for number in sorted(other.slabs)]
            for slot in slots:
                target = targets.pop(0) if targets else None
                while not self._ended() and not await self._move(slot, target):  # noqa: ASYNC110 (other threads)
                    await asyncio.sleep(RETRY_S)
            for other in fresh:
                other.release([target.number for target in targets if target.lease is other])
                self._tools.leasing.mapped(other)

    async def _app_has_moved(self, slots: list[int], deadline_s: float, reason: str) -> bool:
        callback = self._tools.on_revoke()
        if callback is None:
            return False
        size = self._tools.slab_bytes
        revocation = Revocation(self, tuple((slot * size, size) for slot in slots), deadline_s, reason)
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
        place = self._slots.places[slot]
        assert isinstance(place, Peer), "only lent slabs are asked back"
        try:
            if target is None:
                moved = await self._move_to_host(slot)
            else:
                slab = target.lease.slabs[target.number]
                assert slab is not None, "slabs are open until they are mapped"
                moved = await tools.background.work(self._slots.move, slot, slab, target)
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
        if not tools.budget.take(tools.slab_bytes):
            self._say("memory was asked back, and the host has none left to put it; waiting for some")
            return False
        moved = False
        try:
            moved = await tools.background.work(self._slots.move_to_host, slot)
        finally:
            if not moved:
                tools.budget.give_back(tools.slab_bytes)
        return moved

    def _say(self, text: str) -> None:
        """Once, however often it is tried."""
        if self.reason != text:
            self.reason = text
            log.warning("%s: %s", self._tools.leasing.party.identity.party, text)

    async def _emptied(self, slot: int) -> bool:
        """False: its users have not left it for `CLOSE_WAIT_S`."""
        for _ in range(int(CLOSE_WAIT_S / MOVE_WAIT_S)):
            if await self._tools.background.work(self._slots.empty, slot):
                return True
        return False

    async def _drop(self, slot: int) -> None:
        """Empties a slot whose contents nobody needs."""
        place = self._slots.places[slot]
        while not await self._tools.background.work(self._slots.empty, slot):  # noqa: ASYNC110 (other threads)
            await asyncio.sleep(RETRY_S)
        self._give_back(place)

    def _give_back(self, place: Place) -> None:
        if isinstance(place, Peer):
            place.lease.release([place.number])
        elif place == "host":
            self._tools.budget.give_back(self._tools.slab_bytes)

    async def _release(self) -> None:
        if self._in_use():
            raise LendingError("a buffer of this loan, or something made from it, is in use; drop it before `release`")
        while self._holders:  # noqa: ASYNC110 (they are other threads)
            await asyncio.sleep(RETRY_S)
        await self.close()

    def _in_use(self) -> bool:
        return any(view() is not None for view in self._views)

    async def close(self) -> None:
        """Gives everything back. A buffer that is still in use, or a slot that somebody holds for longer than that,
        has zeros from then on."""
        self._released = True
        async with self._mutex:
            if self._slots.closed:
                return
            in_use = self._in_use()
            for slot, place in enumerate(list(self._slots.places)):
                if place == "gone":
                    continue
                if in_use or not await self._emptied(slot):
                    await self._tools.background.work(self._slots.blank, slot)
                self._give_back(place)
            self._slots.close()
            self.bytes = 0
            self._tools.released(self)


def _is_of(place: Place, lease: HeldLease, numbers: frozenset[int]) -> bool:
    return isinstance(place, Peer) and place.lease is lease and place.number in numbers

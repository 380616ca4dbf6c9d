"""What a borrower gets: one stretch of addresses, behind which memory of several lenders and of the host may lie, and
may change places, while offsets, addresses and contents stay the same.
"""

import builtins
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self

from forebay.runtime.lending_errors import LendingError
from forebay.runtime.loan_keeper import LoanKeeper
from forebay.runtime.loan_parts import Piece, Tools
from forebay.runtime.loan_slots import Peer

Data = bytes | bytearray | memoryview


class Loan:
    """Made by `Borrower.allocate`. `bytes` may be less than was asked for, even 0; `reason` then says why."""

    def __init__(self, tools: Tools, wanted: int) -> None:
        self._tools = tools
        self.keeper = LoanKeeper(tools, wanted, self)
        self._slots = self.keeper.slots

    @property
    def bytes(self) -> int:
        return self.keeper.bytes

    @property
    def reason(self) -> str:
        """Why it is less, or elsewhere, than was asked for; "" if it is not."""
        return self.keeper.reason

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

    def write(self, offset: int, data: Data) -> None:
        """Raises ValueError outside of the loan, Closed for what was let go of."""
        view = memoryview(data).cast("B")
        if slots := self._touched(offset, len(view)):
            with self._slots.using(slots):
                self._slots.require(slots)
                self._tools.memory.write(self._slots.arena.base + offset, view)

    def read(self, offset: int, size: int) -> builtins.bytes:
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
        self.keeper.views.append(weakref.ref(whole))
        if hasattr(whole, "__cuda_array_interface__"):
            return whole
        return memoryview(whole).cast("B")[: self.bytes]

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Nothing moves within the block: what is written through `buffer` or `address` outside of it may be lost to a
        move. Revocations wait, and their deadlines do not: keep it short. On `cuda:N` synchronise before its end."""
        with self._slots.using(range(len(self._slots.places))):
            self.keeper.holders.append(threading.get_ident())
            try:
                yield
            finally:
                self.keeper.holders.remove(threading.get_ident())

    def release(self) -> None:
        """Gives all of it back; it cannot be used any more. Releasing twice is fine. Waits for other threads that hold
        it. Raises LendingError within `hold`, and while a buffer of it is in use."""
        if not self.keeper.ended():
            self._require_let_go()
            self._tools.background.run(self.keeper.release())

    async def release_async(self) -> None:
        if not self.keeper.ended():
            self._require_let_go()
            await self._tools.background.wait(self.keeper.release())

    def _require_let_go(self) -> None:
        if threading.get_ident() in self.keeper.holders:
            raise LendingError("`release` within `hold` would wait for itself; leave the block first")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

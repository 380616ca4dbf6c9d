"""Copies of a device's weights in memory that other devices lend, seven times as fast to reach as the host's (H200).

A copy is a loan, so it stays at its addresses and keeps its bytes whatever its lenders do: where they want their memory
back it moves to another lender or to the host, and later comes back (runtime/borrower.py).
"""

import time
from collections.abc import Hashable

from forebay.gpu.errors import DeviceError
from forebay.gpu.weight_shelf import Copy
from forebay.runtime.borrower import Borrower
from forebay.runtime.lending_errors import LendingError
from forebay.runtime.loan import Loan

RELEASE_S = 1.0
"""How long memory that was given back may take to be lent again: its lender zeroes it first."""

PAUSE_S = 0.02


class LentShelf:
    """A Shelf; `borrower` is its owner's to close, after this. Copies of weights that are on the device go when lenders
    and host have no room for another one."""

    def __init__(self, borrower: Borrower) -> None:
        self._borrower = borrower
        self._loans: dict[Hashable, Loan] = {}
        self._loose: dict[Hashable, None] = {}

    def where(self, owner: Hashable) -> str:
        """Where its copy lies: peer, host, mixed or nowhere."""
        return self._loans[owner].where if owner in self._loans else "nowhere"

    def copy_of(self, owner: Hashable) -> Copy | None:
        loan = self._loans.get(owner)
        if loan is None:
            return None
        size = self._borrower.slab_bytes
        return Copy(tuple(range(loan.address, loan.address + loan.bytes, size)), loan.hold)

    def take(self, owner: Hashable, count: int) -> Copy:
        size = count * self._borrower.slab_bytes
        loan, reason = self._allocate(size)
        while loan is None and self._loose:
            self.drop(next(iter(self._loose)))
            deadline = time.monotonic() + RELEASE_S
            while loan is None and time.monotonic() < deadline:
                time.sleep(PAUSE_S)  # its lender zeroes it before it is to be had again
                loan, reason = self._allocate(size)
        if loan is None:
            raise DeviceError(f"no copy of {size} bytes of weights can be made in lent memory: {reason}")
        self._loans[owner] = loan
        copy = self.copy_of(owner)
        assert copy is not None
        return copy

    def _allocate(self, size: int) -> tuple[Loan | None, str]:
        """A loan of so many bytes, or why there is none."""
        try:
            loan = self._borrower.allocate(size)
        except LendingError as error:
            return None, str(error)
        if loan.bytes >= size:
            return loan, ""
        reason = loan.reason
        loan.release()
        return None, reason

    def hold(self, owner: Hashable) -> None:
        self._loose.pop(owner, None)

    def loosen(self, owner: Hashable) -> None:
        self._loose[owner] = None

    def drop(self, owner: Hashable) -> None:
        self._loose.pop(owner, None)
        loan = self._loans.pop(owner, None)
        if loan is not None:
            loan.release()

    def close(self) -> None:
        for owner in list(self._loans):
            self.drop(owner)

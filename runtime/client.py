"""The client library: memory for other processes, and of other processes, from any program.

    from forebay.runtime.client import Borrower, Lender

A `Lender` offers memory of a device and takes it back; a `Borrower` allocates what is offered, through the scheduler
(`python -m runtime.scheduler`). Both work from plain threads and from asyncio (each blocking method has a counterpart
`..._async` to await), reconnect by themselves, and need no torch. docs/lending.md shows them at work.
"""

from forebay.runtime.borrower import Borrower, BorrowerStatus, LeaseView
from forebay.runtime.facade import DEFAULT_SLAB_BYTES, default_scheduler
from forebay.runtime.leases import HeldLease
from forebay.runtime.lender import Lender
from forebay.runtime.lender_loop import LenderStatus
from forebay.runtime.lending_errors import Closed, HandoverFailed, LendingError
from forebay.runtime.loan import Loan
from forebay.runtime.loan_parts import Piece, Revocation
from forebay.runtime.takeback import Reclaimed

__all__ = [
    "DEFAULT_SLAB_BYTES",
    "Borrower",
    "BorrowerStatus",
    "Closed",
    "HandoverFailed",
    "HeldLease",
    "LeaseView",
    "Lender",
    "LenderStatus",
    "LendingError",
    "Loan",
    "Piece",
    "Reclaimed",
    "Revocation",
    "default_scheduler",
]

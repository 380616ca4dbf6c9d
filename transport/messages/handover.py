"""What a borrower and a lender say at the lender's Unix socket, where descriptors change hands. One packet each."""

from forebay.transport.messages.base import Message

MOST_DESCRIPTORS = 253
"""Descriptors that one packet can carry (SCM_MAX_FD of the Linux kernel)."""

LONGEST_ASK = 4096
"""Bytes of the longest packet that a lender reads."""


class Ask(Message, frozen=True):
    """From the borrower: the descriptors of this lease."""

    lease: int
    epoch: int
    token: str


class Handed(Message, frozen=True):
    """From the lender, beside the descriptors of `slabs`, in this order; so many (`left`) follow in other packets."""

    slabs: tuple[int, ...]
    left: int


class Denied(Message, frozen=True):
    """From the lender: nothing is handed over. With `again`, asking once more in a moment may help."""

    reason: str
    again: bool = False


FromBorrower = Ask
FromLender = Handed | Denied

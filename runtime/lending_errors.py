"""What can go wrong in the client library, as types."""


class LendingError(Exception):
    """Base of all; the message says what to do."""


class Closed(LendingError):
    """The object, or what was read or written, is no longer there."""


class HandoverFailed(LendingError):
    """A lender did not hand over what it had lent. `lender_fault`: whether it is the lender that did wrong, rather than
    this process (which may be out of descriptors)."""

    def __init__(self, reason: str, lender_fault: bool = True) -> None:
        super().__init__(reason)
        self.lender_fault = lender_fault

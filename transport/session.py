"""A peer's side of belonging to a scheduler: which of its messages are answers to the latest time that it joined.

A peer that was lost joins again while messages of its earlier membership are still on their way; those must not count.
"""

from forebay.transport.messages import (
    Attached,
    Opened,
    Refused,
    Rejoin,
    Stop,
    ToFrontDoor,
    ToPartyLink,
    ToWorker,
    Welcome,
)


class Session:
    """Numbered memberships; only what follows the scheduler's answer to the latest one is admitted."""

    def __init__(self) -> None:
        self.number = 0
        self.welcomed = False

    def renew(self) -> int:
        """The number to join with now. Until it is answered nothing else counts."""
        self.number += 1
        self.welcomed = False
        return self.number

    def admits(self, message: ToWorker | ToFrontDoor | ToPartyLink) -> bool:
        """Whether a message that came from the scheduler, in order, is to be heeded."""
        if isinstance(message, Welcome | Opened | Attached):
            self.welcomed = self.welcomed or message.session == self.number
        return self.welcomed or isinstance(message, Rejoin | Refused | Stop)

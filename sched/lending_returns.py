"""When a borrower asks again for lent memory, for what lies on the host in its place. Pure: times are handed in."""

MOST_DOUBLINGS = 5
"""Of the pause, while what was moved back is asked for again soon each time."""

KEPT_PAUSES = 10
"""What stays lent for so many pauses was worth the way, and the pause is the first one again."""

SOON = 0.125
"""Of a pause, until the next part is asked for, after all of one part was to be had."""


class Returns:
    """One borrower's pace: at most one question in a pause of `first_s` seconds, and none for a pause after memory was
    asked back. Where memory that had just moved back is asked for again, the pause doubles: a lender whose load comes
    and goes would otherwise have the borrower copy to and fro."""

    def __init__(self, now: float, first_s: float) -> None:
        self.pause_s = first_s
        self._first_s = first_s
        self._next = now + first_s
        self._returned: float | None = None

    def wait_s(self, now: float) -> float:
        """Seconds until something may be asked for."""
        return max(0.0, self._next - now)

    def asked_back(self, now: float) -> None:
        """Memory went to the host because its lender wants it."""
        if self._returned is not None:
            soon = now - self._returned < KEPT_PAUSES * self.pause_s
            longest = self._first_s * 2**MOST_DOUBLINGS
            self.pause_s = min(2 * self.pause_s, longest) if soon else self._first_s
            self._returned = None
        self._next = max(self._next, now + self.pause_s)

    def asked(self, now: float, wanted: int, moved: int) -> None:
        """Of so many slabs that were asked for, so many have moved back."""
        if moved:
            self._returned = now
        self._next = now + self.pause_s * (SOON if wanted and moved == wanted else 1.0)

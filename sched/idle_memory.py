"""How much of a pool is lent to others, and when it is taken back: by what its own load has needed lately.

Thresholds with hysteresis: what is lent must have been idle for a while, and is taken back at once when the pool fills.
Only numbers here; which slabs they are is the lane core's to say.
"""

import math
from collections import deque
from typing import Literal

IDLE_S = 10.0
"""How far back own need is looked at: memory that was needed within this time is not lent."""

BUCKET_S = 1.0
"""The past is kept as the highest need of each second."""

RESERVE = 0.25
"""Kept beyond the highest need, as a share of it: so much more load comes without a wait for memory that is lent."""

FULL = 0.9
"""Part of the slabs at hand in use above which lent ones are taken back."""

TAKE_BACK_S = 1.0
"""A borrower's time to move its blocks elsewhere. 10 GiB take 30 ms to a peer GPU and 200 ms to the host (one H200)."""


class IdleMemory:
    """For one pool of `slabs` slabs; `lent` counts those that are others' now, `asked` those of them that were asked
    back."""

    def __init__(self, slabs: int) -> None:
        self.slabs = slabs
        self.lent = 0
        self.asked = 0
        self._peaks: deque[tuple[float, int]] = deque()
        self._since: float | None = None

    def decide(
        self, now: float, used: int, lacking: int, short: bool = False
    ) -> tuple[Literal["lend", "take back"], int] | None:
        """What to do and with how many slabs, or nothing. `used`: slabs with a block in use; `lacking`: slabs more that
        all sequences would need; `short`: one of them could not get what it needs, whatever the numbers say (blocks
        that would straddle slabs may not fit where their bytes would)."""
        if self._since is None:
            self._since = now
        here = self.slabs - self.lent
        coming = here + self.asked
        need = max(used + lacking, here + 1 if short else 0)
        self._note(now, need)
        if need > FULL * coming:
            if (count := min(self.lent - self.asked, self._kept(need) - coming)) > 0:
                self.asked += count
                return "take back", count
            return None
        if self.asked or now - self._since < IDLE_S:
            return None
        count = here - self._kept(max(peak for _, peak in self._peaks))
        # Few at a time are not worth a message, unless they are all there is.
        if count > 0 and count >= min(here, self.slabs // 16):
            self.lent += count
            return "lend", count
        return None

    def withdrawn(self, count: int) -> None:
        """Of the slabs that were to be lent so many could not be: something is in them again."""
        self.lent -= count

    def returned(self, count: int) -> None:
        """So many came back, asked for or not."""
        self.lent -= count
        self.asked = max(0, min(self.asked - count, self.lent))

    def _kept(self, need: int) -> int:
        """Slabs to have at hand for that need: some more, and never none."""
        return min(self.slabs, max(1, math.ceil(need * (1 + RESERVE)), -(-self.slabs // 10)))

    def _note(self, now: float, need: int) -> None:
        second = now // BUCKET_S
        if self._peaks and self._peaks[-1][0] == second:
            self._peaks[-1] = (second, max(need, self._peaks[-1][1]))
        else:
            self._peaks.append((second, need))
        while self._peaks[0][0] < (now - IDLE_S) // BUCKET_S:
            self._peaks.popleft()

    def check(self) -> None:
        assert 0 <= self.asked <= self.lent <= self.slabs, (self.asked, self.lent, self.slabs)

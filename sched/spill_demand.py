"""How much spill space a worker borrows from other devices, and when it gives some back: what its sequences need beyond
its pool and its own host memory. Borrowing follows need at once, giving back waits until it has been over for a while.
"""

import math

RETRY_S = 1.0
"""How long an answer may take, and how soon it is asked again where there was nothing to borrow."""

HOLD_S = 10.0
"""How long borrowed memory must have been idle before it is given back: leases cost their owners a handover each."""


class SpillDemand:
    def __init__(self, slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self._ask_after = -math.inf
        self._idle_since: float | None = None

    def want(self, now: float, overflow: int, capacity: int) -> int:
        """Bytes to borrow now, in whole slabs; 0: none. `overflow`: what sequences need beyond the pool; `capacity` of
        the arena; both in bytes."""
        if overflow <= capacity or now < self._ask_after:
            return 0
        self._ask_after = now + RETRY_S
        return -(-(_ample(overflow) - capacity) // self.slab_bytes) * self.slab_bytes

    def surplus(self, now: float, overflow: int, capacity: int, lent_slots: int) -> int:
        """Slots to give back now: what is more than ample, once it was for HOLD_S."""
        spare = min(lent_slots, (capacity - _ample(overflow)) // self.slab_bytes)
        if spare <= 0:
            self._idle_since = None
            return 0
        if self._idle_since is None:
            self._idle_since = now
        if now - self._idle_since < HOLD_S:
            return 0
        self._idle_since = None
        return spare


def _ample(overflow: int) -> int:
    """Half as much again, so that a load that grows does not ask for one slab after the other."""
    return overflow + overflow // 2

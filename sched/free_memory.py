"""How much of a pool goes back to the device while another process takes its memory, and when it is taken again.

Thresholds with hysteresis, as for what is lent (idle_memory.py): memory is given at once, and taken again slowly. Only
numbers here; which slabs they are is the lane core's to say.
"""

import math

CALM_S = 5.0
"""So long there must have been room before slabs are taken again: a neighbour's memory comes and goes in bursts."""

TAKEN_AT_ONCE = 4
"""Slabs: each costs the worker 10 ms (256 MiB on one H200), beside its steps."""

MARGIN = 2
"""Slabs that are left free beyond the reserve: taking shall not lead to giving again."""

LEAST = 0.1
"""Of the pool, kept in any case."""


class FreeMemory:
    """For one pool of `slabs` slabs on a device of which `reserve` bytes are to stay free. `given` counts slabs that
    are the device's now, `asked` those of them that are being taken again."""

    def __init__(self, reserve: int, slabs: int, slab_bytes: int) -> None:
        self.slabs = slabs
        self.given = 0
        self.asked = 0
        self._reserve = reserve
        self._slab_bytes = slab_bytes
        self._calm_since: float | None = None

    def decide(self, now: float, free: int, idle: int) -> int:
        """Slabs to give (more than 0), or to take again (less than 0). `free`: bytes of the device; `idle`: slabs in
        which no block is in use, and that may go."""
        if self.asked:
            return 0
        if free < self._reserve:
            self._calm_since = None
            kept = max(1, math.ceil(self.slabs * LEAST))
            count = min(-(-(self._reserve - free) // self._slab_bytes), idle, self.slabs - self.given - kept)
            self.given += max(0, count)
            return max(0, count)
        room = min((free - self._reserve) // self._slab_bytes - MARGIN, self.given, TAKEN_AT_ONCE)
        if room < 1:
            self._calm_since = None
            return 0
        if self._calm_since is None:
            self._calm_since = now
        if now - self._calm_since < CALM_S:
            return 0
        self.asked = room
        return -room

    def taken(self, count: int) -> None:
        """Of those that were to be taken again so many are the pool's; for the others there was no memory after all."""
        if count < self.asked:
            self._calm_since = None
        self.given -= count
        self.asked = 0

    def check(self) -> None:
        assert 0 <= self.asked <= self.given < self.slabs, (self.asked, self.given, self.slabs)

"""How much host memory a borrower may put in the place of memory that it could not borrow."""

import threading

from forebay.gpu.machine_memory import available

RESERVE = 64 << 20
"""Bytes of the machine's memory that are left alone: a process that touches memory which is not there is killed."""

READY_SHARE = 0.5
"""What of the memory that is available may be kept ready; the rest is for those who have a use for it now."""


class HostBudget:
    """`limit` in bytes, None: what the machine has available. `used`: in the place of lent memory; `ready`: kept for
    that. From any thread."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._used = 0
        self._ready = 0

    @property
    def used(self) -> int:
        return self._used

    @property
    def ready(self) -> int:
        return self._ready

    def take(self, size: int) -> bool:
        """False: there is not that much left."""
        with self._lock:
            if not self._fits(size, available()):
                return False
            self._used += size
            return True

    def give_back(self, size: int) -> None:
        with self._lock:
            self._used -= size

    def set_aside(self, size: int) -> bool:
        """To be kept ready. False: there is not that much left, or too little beside it."""
        with self._lock:
            if not self._fits(size, int(available() * READY_SHARE)):
                return False
            self._ready += size
            return True

    def _fits(self, size: int, there: int) -> bool:
        within = self.limit is None or self._used + self._ready + size <= self.limit
        return within and size + RESERVE <= there

    def drop_ready(self, size: int) -> None:
        """It is no longer kept."""
        with self._lock:
            self._ready -= size

    def use_ready(self, size: int) -> None:
        with self._lock:
            self._ready -= size
            self._used += size

    def keep_used(self, size: int) -> None:
        """What was in use is ready for the next one."""
        with self._lock:
            self._used -= size
            self._ready += size

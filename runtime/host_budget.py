"""How much host memory a borrower may put in the place of memory that it could not borrow."""

import threading

RESERVE = 64 << 20
"""Bytes of the machine's memory that are left alone: a process that touches memory which is not there is killed."""


class HostBudget:
    """`limit` in bytes, None: what the machine has available. From any thread."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._used = 0

    @property
    def used(self) -> int:
        return self._used

    def take(self, size: int) -> bool:
        """False: there is not that much left."""
        with self._lock:
            if self.limit is not None and self._used + size > self.limit:
                return False
            if size + RESERVE > available():
                return False
            self._used += size
            return True

    def give_back(self, size: int) -> None:
        with self._lock:
            self._used -= size


def available() -> int:
    """Bytes that processes of this machine can still get without swapping (MemAvailable of /proc/meminfo)."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable; Linux 3.14 or newer is needed")

"""How much host memory a borrower may put in the place of memory that it could not borrow."""

import threading
from pathlib import Path

RESERVE = 64 << 20
"""Bytes of the machine's memory that are left alone: a process that touches memory which is not there is killed."""

READY_SHARE = 0.5
"""What of the memory that is available may be kept ready; the rest is for those who have a use for it now."""

CGROUPS = Path("/sys/fs/cgroup")


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


def available() -> int:
    """Bytes that this process can still get without swapping: what the machine has (MemAvailable of /proc/meminfo), or
    its container, where that has less."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return min([int(line.split()[1]) * 1024, *_left_in_groups()])
    raise OSError("/proc/meminfo has no MemAvailable; Linux 3.14 or newer is needed")


def _left_in_groups() -> list[int]:
    """What the control groups (version 2) that this process belongs to leave it; a group without a bound is not
    listed. Pages of files that were read count as free: they go when memory is short."""
    group = next((line[3:].strip() for line in _lines(Path("/proc/self/cgroup")) if line.startswith("0::")), "/")
    folder = CGROUPS / group.lstrip("/")
    left: list[int] = []
    for place in (folder, *folder.parents):
        if not place.is_relative_to(CGROUPS):
            break
        bound, used = _lines(place / "memory.max"), _lines(place / "memory.current")
        if bound and used and bound[0].strip().isdigit():
            files = next(
                (int(line.split()[1]) for line in _lines(place / "memory.stat") if "inactive_file " in line), 0
            )
            left.append(max(0, int(bound[0]) - int(used[0]) + files))
    return left


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []

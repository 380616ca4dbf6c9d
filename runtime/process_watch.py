"""Tells at once when a process ends that is not ours: by a descriptor that the kernel gives of it (pidfd)."""

import asyncio
import contextlib
import os
from collections.abc import Callable


class ProcessWatch:
    """In a running loop. `on_end(name)` is called once for each name whose process has ended."""

    def __init__(self, on_end: Callable[[str], None]) -> None:
        self._on_end = on_end
        self._watched: dict[str, tuple[int, int]] = {}

    def watch(self, name: str, pid: int) -> bool:
        """Watches a process of this process's own namespace, in place of an earlier one of that name. False: there is
        no such process (any more), or no descriptor to be had; then its silence has to tell."""
        if name in self._watched and self._watched[name][0] == pid:
            return True
        self.forget(name)
        try:
            descriptor = os.pidfd_open(pid)
        except (OSError, ValueError, OverflowError):
            return False
        self._watched[name] = pid, descriptor
        asyncio.get_running_loop().add_reader(descriptor, self._ended, name)
        return True

    def forget(self, name: str) -> None:
        _, descriptor = self._watched.pop(name, (0, -1))
        if descriptor >= 0:
            with contextlib.suppress(RuntimeError):  # of a loop that is closed
                asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)

    def keep_only(self, wanted: Callable[[str], bool]) -> None:
        """Forgets all others."""
        for name in [name for name in self._watched if not wanted(name)]:
            self.forget(name)

    def _ended(self, name: str) -> None:
        self.forget(name)
        self._on_end(name)

    def close(self) -> None:
        self.keep_only(lambda name: False)


def pid_namespace() -> str:
    """Names the namespace that this process's number is of: processes that have the same mean the same by a number."""
    try:
        return f"{os.readlink('/proc/self/ns/pid')} {_boot()}"
    except OSError:
        return ""


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()

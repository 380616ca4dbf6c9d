"""Who may touch which slot of an arena: many at once, or the one who moves it."""

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class SlotLocks:
    """Users come from any thread and never wait for each other, only for a move; a move waits for the users of its slot
    and keeps new ones out."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._users: Counter[int] = Counter()
        self._moving: set[int] = set()

    @contextmanager
    def using(self, slots: Iterable[int]) -> Iterator[None]:
        """The slots stay where they are, as far as the block goes."""
        wanted = tuple(slots)
        with self._changed:
            self._changed.wait_for(lambda: self._moving.isdisjoint(wanted))
            self._users.update(wanted)
        try:
            yield
        finally:
            with self._changed:
                self._users.subtract(wanted)
                self._changed.notify_all()

    @contextmanager
    def moving(self, slot: int, timeout_s: float) -> Iterator[bool]:
        """True: the slot is nobody else's within the block. False: its users did not leave in time."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            mine = self._changed.wait_for(lambda: slot not in self._moving, timeout_s)
            if mine:
                self._moving.add(slot)
                left = deadline - time.monotonic()
                free = self._changed.wait_for(lambda: self._users[slot] == 0, max(0.0, left))
                if not free:
                    self._moving.discard(slot)
                    self._changed.notify_all()
                mine = free
        try:
            yield mine
        finally:
            if mine:
                with self._changed:
                    self._moving.discard(slot)
                    self._changed.notify_all()

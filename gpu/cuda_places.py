"""What kind of memory lies at which of a cuda device's addresses: the copier goes by it."""

import threading
from collections import deque
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay.gpu.pieces import Addresses, Pieces


class Place(IntEnum):
    OWN = 0
    PEER = 1
    """Lent by another process: a neighbour's, over NVLink."""
    HOST = 2
    """The host's, over PCIe."""


Range = tuple[int, int, Place]
"""First address, the one behind the last, what is there."""


class Places:
    """Ranges of addresses that are not the device's own. From any thread. numpy is loaded by those who ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: dict[int, tuple[int, Place]] = {}
        self._ranges: list[Range] | None = []
        self._removed: deque[int] = deque()

    def add(self, begin: int, size: int, place: Place) -> None:
        with self._lock:
            self._forget()
            if place is not Place.OWN:
                self._sizes[begin] = (size, place)
                self._ranges = None

    def remove(self, begin: int) -> None:
        """Takes no lock: the garbage collector may call it, in a thread that holds the lock."""
        self._removed.append(begin)

    def _forget(self) -> None:
        """With the lock held."""
        while self._removed:
            self._sizes.pop(self._removed.popleft(), None)
            self._ranges = None

    def of(self, pieces: "Pieces") -> "Place | Addresses":
        """The farther of a piece's two ends: one for all pieces where they have the same, else one for each."""
        ranges = self._joined()
        longest = int(pieces.sizes.max(initial=0))
        target = _of_span(ranges, pieces.destinations, longest)
        source = _of_span(ranges, pieces.sources, longest)
        if target is not None and source is not None:
            return max(target, source)
        import numpy as np

        # A first range that holds nothing, for what lies before all others.
        begins, ends, places = np.array([(0, 0, 0), *ranges], np.uint64).T

        def place_of(addresses: "Addresses") -> "Addresses":
            at = np.searchsorted(begins, addresses, side="right") - 1
            return np.where(addresses < ends[at], places[at], np.uint64(0))

        return np.maximum(place_of(pieces.destinations), place_of(pieces.sources))

    def _joined(self) -> list[Range]:
        """In order; neighbours of one kind, such as the slots of an arena, as one."""
        with self._lock:
            self._forget()
            if self._ranges is None:
                joined: list[Range] = []
                for begin, (size, place) in sorted(self._sizes.items()):
                    if joined and joined[-1][1:] == (begin, place):
                        joined[-1] = (joined[-1][0], begin + size, place)
                    else:
                        joined.append((begin, begin + size, place))
                self._ranges = joined
            return self._ranges


def _of_span(ranges: list[Range], addresses: "Addresses", longest: int) -> Place | None:
    """What lies at all the addresses from the first to the last; None if it is not the same everywhere."""
    if not len(addresses):
        return Place.OWN
    first, last = int(addresses.min()), int(addresses.max()) + longest
    met = [found for found in ranges if found[0] < last and first < found[1]]
    if not met:
        return Place.OWN
    return met[0][2] if len(met) == 1 and met[0][0] <= first and last <= met[0][1] else None

"""Copies of weights elsewhere, made once, for models that come and go on a device: here in the host's memory; in memory
that other devices lend, runtime/lent_shelf.py.

Pinning memory takes longer than copying to it, so pieces of one size are pinned once and used by one model after the
other. A copy of weights that are on the device may go when another's need its memory; one of weights that are away is
all that there is of them, and stays.
"""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from forebay.gpu.backend import HostMemory, MemoryBackend
from forebay.gpu.errors import DeviceError
from forebay.gpu.handles import Closes


@dataclass(frozen=True, eq=False)
class Copy:
    """Where a copy lies: the address of each piece, in order, good within `hold()`."""

    bases: tuple[int, ...]
    hold: Callable[[], AbstractContextManager[None]]


class Shelf(Protocol):
    """Keeps copies in pieces of one size. An owner is whatever its copy is of. One thread at a time."""

    def copy_of(self, owner: Hashable) -> Copy | None:
        """If there is a copy of it."""

    def take(self, owner: Hashable, count: int) -> Copy:
        """So many pieces for a new copy. Raises DeviceError where there is no memory for it."""

    def hold(self, owner: Hashable) -> None:
        """The weights are away: their copy stays."""

    def loosen(self, owner: Hashable) -> None:
        """The weights are on the device: their copy may go."""

    def drop(self, owner: Hashable) -> None:
        """No copy of it is needed; there may be none."""

    def close(self) -> None: ...


class HostShelf(Closes):
    """A Shelf of at most `limit` bytes (0: as many as the host has) in pieces of `piece_bytes`."""

    def __init__(self, backend: MemoryBackend, piece_bytes: int, limit: int = 0) -> None:
        self.piece_bytes = piece_bytes
        self._backend = backend
        self._limit = limit
        self._spare: list[HostMemory] = []
        self._pieces: dict[Hashable, tuple[HostMemory, ...]] = {}
        self._loose: dict[Hashable, None] = {}
        """Owners whose copies may go, the one that was loosened first going first."""

    @property
    def bytes(self) -> int:
        """What is pinned, used or not."""
        return (len(self._spare) + sum(len(pieces) for pieces in self._pieces.values())) * self.piece_bytes

    def copy_of(self, owner: Hashable) -> Copy | None:
        pieces = self._pieces.get(owner)
        return None if pieces is None else Copy(tuple(piece.base for piece in pieces), nullcontext)

    def take(self, owner: Hashable, count: int) -> Copy:
        while len(self._spare) < count:
            try:
                self._spare.append(self._pin())
            except DeviceError as error:
                if not self._loose:
                    raise DeviceError(
                        f"no copy of {count * self.piece_bytes} bytes of weights can be made in the host's memory, "
                        f"where {self.bytes} bytes hold weights that are away: {error}"
                    ) from error
                self.drop(next(iter(self._loose)))
        self._pieces[owner] = tuple(self._spare.pop() for _ in range(count))
        return Copy(tuple(piece.base for piece in self._pieces[owner]), nullcontext)

    def _pin(self) -> HostMemory:
        if self._limit and self.bytes + self.piece_bytes > self._limit:
            raise DeviceError(f"weights_host is {self._limit} bytes; raise it")
        return self._backend.pinned(self.piece_bytes)

    def hold(self, owner: Hashable) -> None:
        self._loose.pop(owner, None)

    def loosen(self, owner: Hashable) -> None:
        self._loose[owner] = None

    def drop(self, owner: Hashable) -> None:
        self._loose.pop(owner, None)
        self._spare.extend(self._pieces.pop(owner, ()))

    def close(self) -> None:
        for pieces in self._pieces.values():
            self._spare.extend(pieces)
        self._pieces.clear()
        self._loose.clear()
        while self._spare:
            self._spare.pop().close()

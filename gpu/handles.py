"""What handles on memory have in common, whatever kind of memory it is: they live until they are closed, or forgotten.

No CUDA and no memfd here; gpu/memory.py and gpu/cuda_slabs.py say what is behind a handle.
"""

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Self, TypeVar

from forebay.gpu.backend import MemorySlab
from forebay.gpu.errors import DeviceError

Reserved = TypeVar("Reserved")


class Closes:
    """Ends with its `with` block."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class SlabHandle(Closes):
    """One slab. `release` gives back what is behind it: once, by `close` or when the handle is forgotten; it must not
    know the handle. `at_exit`: also when the interpreter ends."""

    def __init__(self, release: Callable[[], object], *, at_exit: bool = True) -> None:
        self._finalizer = weakref.finalize(self, release)
        self._finalizer.atexit = at_exit

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def require_open(self) -> None:
        """Raises DeviceError once it is closed."""
        if self.closed:
            raise DeviceError("this slab is closed")

    def close(self) -> None:
        """Gives up the handle. Mappings live on, here and elsewhere."""
        self._finalizer()


class SlotRange(Closes, Generic[Reserved]):
    """A range of `slots` places for slabs of `slab_bytes` each: which of them hold one, and what cannot be. Addresses
    are the subclass's, behind a reservation of its own, which views of the range keep beyond `close`."""

    NOUN = "range"

    def __init__(self, slab_bytes: int, slots: int) -> None:
        if slots <= 0:
            article = "an" if self.NOUN[0] in "aeiou" else "a"
            raise DeviceError(f"{article} {self.NOUN} needs at least one slot, not {slots}")
        self.slab_bytes = slab_bytes
        self.slots = slots
        self.size = slab_bytes * slots
        self._mapped: set[int] = set()
        self._reservation: Reserved | None = None

    @property
    def mapped(self) -> frozenset[int]:
        """The slots that hold a slab."""
        return frozenset(self._mapped)

    @property
    def closed(self) -> bool:
        return self._reservation is None

    def close(self) -> None:
        """Unmaps everything, once no buffer of the range is left. Closing twice is fine."""
        self._mapped.clear()
        self._reservation = None

    def _live(self) -> Reserved:
        if self._reservation is None:
            raise DeviceError(f"this {self.NOUN} is closed")
        return self._reservation

    def _require_empty(self, slot: int) -> None:
        self._require_slot(slot)
        if slot in self._mapped:
            raise DeviceError(f"slot {slot} already holds a slab; unmap it first")

    def _require_full(self, slot: int) -> None:
        self._require_slot(slot)
        if slot not in self._mapped:
            raise DeviceError(f"slot {slot} holds no slab")

    def _require_slot(self, slot: int) -> None:
        self._live()
        if not 0 <= slot < self.slots:
            raise DeviceError(f"slot {slot} is outside 0..{self.slots - 1}")

    def _require_size(self, slab: MemorySlab) -> None:
        if slab.size != self.slab_bytes:
            raise DeviceError(f"a slab of {slab.size} bytes does not fit slots of {self.slab_bytes}")

"""The memory behind a loan: an arena, and what lies in each of its slots. Called from the library's threads, never
two at once for one slot, while apps read and write in theirs; a slot changes under its lock alone."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

from forebay.gpu.backend import Arena, MemoryBackend, MemorySlab
from forebay.runtime.leases import HeldLease
from forebay.runtime.lending_errors import Closed
from forebay.runtime.slot_locks import SlotLocks

MOVE_WAIT_S = 0.1
"""How long a move waits for users of a slot before it lets them go on; whoever wants it tries again."""


@dataclass(frozen=True)
class Peer:
    """A lent slab."""

    lease: HeldLease
    number: int


Place = Peer | Literal["host", "gone"]
"""gone: the app has let go of it."""


class LoanSlots:
    """`keep_handles`: of host memory, for whoever gets it when its slot no longer needs it."""

    def __init__(self, memory: MemoryBackend, slab_bytes: int, keep_handles: bool) -> None:
        self.slab_bytes = slab_bytes
        self._keep_handles = keep_handles
        self._host: dict[int, MemorySlab] = {}
        self.places: list[Place] = []
        self._memory = memory
        self._arena: Arena | None = None
        self._locks = SlotLocks()

    @property
    def arena(self) -> Arena:
        """Raises Closed."""
        if self._arena is None:
            raise Closed("this loan holds nothing: it was released, or nothing could be had")
        return self._arena

    @property
    def closed(self) -> bool:
        return self._arena is None

    def using(self, slots: Iterable[int]) -> AbstractContextManager[None]:
        """The slots stay as they are within the block."""
        return self._locks.using(slots)

    def require(self, slots: Iterable[int]) -> None:
        """Raises Closed where a slot has been let go of."""
        for slot in slots:
            if self.places[slot] == "gone":
                at = slot * self.slab_bytes
                raise Closed(f"the {self.slab_bytes} bytes at {at} were given back when they were asked for")

    # For the thread that works on memory ---------------------------------------------------------------------------

    def open(self, slots: int) -> None:
        self._arena = self._memory.arena(self.slab_bytes, slots)

    def append(self, slabs: Sequence[tuple[MemorySlab, Place]]) -> None:
        """Maps slabs into the next slots, all or none. Raises DeviceError, OSError."""
        first = len(self.places)
        mapped = 0
        try:
            for slab, _ in slabs:
                self.arena.map(first + mapped, slab)
                mapped += 1
        except BaseException:
            for slot in range(first, first + mapped):
                self.arena.unmap(slot)
            raise
        self.places += [place for _, place in slabs]

    def append_host(self, slab: MemorySlab) -> None:
        """Memory of the host in the next slot. Raises DeviceError, OSError."""
        self.append([(slab, "host")])
        self._keep(len(self.places) - 1, slab)

    def move(self, slot: int, slab: MemorySlab, place: Place, wait_s: float = MOVE_WAIT_S) -> bool:
        """Copies a slot's contents to the slab and puts that in its place. False: its users did not let go of it in
        `wait_s`; nothing has changed."""
        with self._locks.moving(slot, wait_s) as mine:
            if mine:
                self._memory.fill(slab, self.arena.base + slot * self.slab_bytes)
                self.arena.replace(slot, slab)
                self.places[slot] = place
        return mine

    def move_to_host(self, slot: int, slab: MemorySlab) -> bool:
        moved = self.move(slot, slab, "host")
        if moved:
            self._keep(slot, slab)
        return moved

    def _keep(self, slot: int, slab: MemorySlab) -> None:
        if self._keep_handles:
            self._host[slot] = slab
        else:
            slab.close()  # the slot keeps the memory, and descriptors are few

    def left_by(self, slot: int) -> MemorySlab | None:
        """The host memory that this slot had before it was emptied, blanked or moved, where its handle was kept."""
        return self._host.pop(slot, None)

    def empty(self, slot: int) -> bool:
        """False: its users did not let go of it in time."""
        with self._locks.moving(slot, MOVE_WAIT_S) as mine:
            if mine:
                self.arena.unmap(slot)
                self.places[slot] = "gone"
        return mine

    def blank(self, slot: int) -> None:
        """Puts zeros in a slot that somebody may still look at."""
        with self._memory.host_slab(self.slab_bytes) as slab:
            self.arena.replace(slot, slab)
        self.places[slot] = "gone"

    def close(self) -> None:
        arena, self._arena = self._arena, None
        self.places = []
        if arena is not None:
            arena.close()

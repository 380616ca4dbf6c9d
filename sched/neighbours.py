"""What a device borrows from others for its spill arena and lends to others from its pool: how much, and which slabs.
And which slabs it gives back to the device while another process takes its memory.

Its own need is counted in bytes of KV blocks that its live sequences, waiting ones too, would hold if all were running.
"""

from collections.abc import Iterable, Sequence

from forebay.sched.free_memory import FreeMemory
from forebay.sched.idle_memory import TAKE_BACK_S, IdleMemory
from forebay.sched.lane_events import (
    DropSlabs,
    FillSlabs,
    LaneCommand,
    LendSlabs,
    Report,
    SpillFreed,
    TakeBackSlabs,
    WantSpill,
)
from forebay.sched.residency import Residency
from forebay.sched.sequence import Lane
from forebay.sched.spill_demand import SpillDemand
from forebay.transport.messages import PoolResized

LOOK_S = 0.05
"""How often need is added up; while sequences wait for memory, at every event."""


class Neighbours:
    """`reserve`: bytes of the device that are to stay free; 0: nothing is given for that."""

    def __init__(self, residency: Residency, lend: bool, reserve: int = 0) -> None:
        self._residency = residency
        self._pool = residency.memory.pool
        self._space = residency.swap.space
        self._borrows = self._space.slots > self._space.host_slots
        self._demand = SpillDemand(self._space.slab_bytes)
        self.idle = IdleMemory(self._pool.slabs) if lend else None
        self._lent: set[int] = set()
        self.free = FreeMemory(reserve, self._pool.slabs, self._pool.slab_bytes) if reserve else None
        self._given: list[int] = []
        self._next_look = 0.0

    def decide(self, now: float, lanes: Iterable[Lane]) -> list[LaneCommand]:
        lanes = list(lanes)
        if not (self._borrows or self.idle) or (now < self._next_look and not self._residency.short):
            return []
        self._next_look = now + LOOK_S
        need = to_spill = 0
        for lane in lanes:
            for sequence in lane:
                size = lane.block_bytes * (sequence.blocks_for(sequence.known + 1) + len(sequence.blocks))
                need += size
                if self._residency.fairness.exchanges or sequence.state != "waiting":
                    to_spill += size
        commands: list[LaneCommand] = []
        if self._borrows:
            self._borrow(now, to_spill, commands)
        if self.idle is not None:
            self._lend(now, need, self.idle, commands)
        self._residency.short = False
        return commands

    def _borrow(self, now: float, need: int, commands: list[LaneCommand]) -> None:
        # What is lent comes back before anything is borrowed for long.
        overflow = max(0, need - self._pool.size)
        if wanted := self._demand.want(now, overflow, self._space.capacity):
            commands.append(WantSpill(wanted))
        if count := self._demand.surplus(now, overflow, self._space.capacity, self._space.idle_slots):
            self._space.surplus(count)
            commands.append(SpillFreed(self._space.freed()))

    def _lend(self, now: float, need: int, idle: IdleMemory, commands: list[LaneCommand]) -> None:
        used = self._pool.busy_slabs
        lacking = max(0, -(-need // self._pool.slab_bytes) - used)
        match idle.decide(now, used, lacking, self._residency.short):
            case "lend", count:
                slabs = tuple(self._pool.emptiest()[:count])
                idle.withdrawn(count - len(slabs))
                for slab in slabs:
                    self._pool.close(slab)
                self._lent.update(slabs)
                if slabs:
                    commands.append(LendSlabs(slabs))
            case "take back", count:
                commands.append(TakeBackSlabs(count, TAKE_BACK_S))

    def back(self, slabs: Sequence[int]) -> None:
        """Slabs that were lent are the pool's own again. Raises ValueError for one that was not lent."""
        for slab in slabs:
            if self.idle is None or slab not in self._lent:
                raise ValueError(f"slab {slab} of the pool came back, but was not lent (lent: {sorted(self._lent)})")
            self._lent.remove(slab)
            self._pool.reopen(slab)
            self.idle.returned(1)

    def device_memory(self, now: float, free: int, largest_block: int) -> list[LaneCommand]:
        """The device has so many bytes free. The first block, of at most so many bytes, stays: graphs are captured with
        it."""
        if self.free is None:
            return []
        first = -(-largest_block // self._pool.slab_bytes)
        idle = [slab for slab in self._pool.emptiest() if slab >= max(1, first)]
        count = self.free.decide(now, free, len(idle))
        if count > 0:
            for slab in idle[:count]:
                self._pool.close(slab)
            self._given += idle[:count]
            return [DropSlabs(tuple(idle[:count])), *self._resized()]
        return [FillSlabs(tuple(self._given[count:]))] if count < 0 else []

    def filled(self, count: int) -> list[LaneCommand]:
        """Of the slabs that were to have memory again so many do. Raises ValueError for more than were asked for."""
        if self.free is None or not 0 <= count <= self.free.asked:
            raise ValueError(f"{count} slabs of the pool were filled, {self.free.asked if self.free else 0} asked for")
        wanted = self._given[-self.free.asked :]
        del self._given[-self.free.asked :]
        self.free.taken(count)
        for slab in wanted[:count]:
            self._pool.reopen(slab)
        self._given += wanted[count:]
        return self._resized() if count else []

    def _resized(self) -> list[LaneCommand]:
        given = len(self._given) * self._pool.slab_bytes
        self._residency.memory.resize(self._pool.size - given)
        if self.idle is not None:
            self.idle.slabs = self._pool.slabs - len(self._given)
        return [Report(PoolResized(self._pool.size - given, given))]

    def check(self) -> None:
        if self.free is not None:
            self.free.check()
            assert self.free.given == len(self._given), "slabs were given to the device and not noted"
            assert not self._lent.intersection(self._given)
        assert len(self._lent) + len(self._given) == self._pool.slabs - self._pool.open_slabs, (
            "slabs of the pool were lost or invented"
        )
        if self.idle is not None:
            self.idle.check()
            assert self.idle.lent == len(self._lent)

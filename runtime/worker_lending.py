"""What a worker lends of its pool: slabs that the lane core names go to the lender, and come back. Nothing here
waits."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from forebay.gpu.backend import MemoryBackend, MemorySlab
from forebay.gpu.errors import DeviceError
from forebay.gpu.pool import KVPool
from forebay.runtime.client import Lender, Reclaimed
from forebay.sched.lane_events import LaneEvent, LendSlabs, SlabsBack, TakeBackSlabs

LACK_S, LONGEST_LACK_S = 0.25, 30.0
"""Memory that the device lacks is asked for again after so long: at first, and at most."""


class WorkerLending:
    """Made in the event loop, and used there but for `replaced`; `tell` takes events for the lane core, `spawn` keeps a
    coroutine running. `lender` is set before anything is lent; it is its owner's to close, and after `close` nothing is
    told any more."""

    lender: Lender

    def __init__(
        self,
        pool: KVPool,
        memory: MemoryBackend,
        tell: Callable[[LaneEvent], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        log: Any,
    ) -> None:
        self._pool = pool
        self._memory = memory
        self._tell = tell
        self._spawn = spawn
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._closing = False

    def lend(self, command: LendSlabs) -> None:
        slabs = [self._pool.slabs[place] for place in command.slabs]
        self._log.info("lending what is idle", slabs=len(slabs))
        self._spawn(self.lender.offer_slabs_async(slabs))

    def take_back(self, command: TakeBackSlabs) -> None:
        self._spawn(self._reclaim(command.count * self._pool.slab_bytes, command.deadline_s))

    async def _reclaim(self, size: int, deadline_s: float) -> None:
        self.yielded(await self.lender.take_back_async(size, deadline_s))

    def yielded(self, reclaimed: Reclaimed) -> None:
        """Some of it has come back, asked for or not."""
        if self._closing:
            return
        if reclaimed.missing:
            self._log.warning("lent memory is not back yet", bytes=reclaimed.missing, holders=reclaimed.holders)
        self._back([self._place(slab) for slab in reclaimed.slabs])
        self._replace([self._place(slab) for slab in reclaimed.kept])

    def _back(self, places: Sequence[int]) -> None:
        if places:
            self._log.info("lent memory is back", slabs=len(places))
            self._tell(SlabsBack(tuple(places)))

    def _replace(self, places: Sequence[int], pause_s: float = LACK_S) -> None:
        """Somebody may still map what lies there: its memory must not be ours. Where the device has no other now, it
        may have later, and until then the slab counts as lent."""
        there: list[int] = []
        try:
            for place in places:
                self._pool.replace(place, self._memory.slab(self._pool.slab_bytes))
                there.append(place)
        except (DeviceError, OSError) as error:
            left = places[len(there) :]
            self._log.warning("no memory for slabs of the pool", slabs=len(left), again_in_s=pause_s, error=str(error))
            self._loop.call_later(pause_s, self._replace_later, left, min(LONGEST_LACK_S, 2 * pause_s))
        self._back(there)

    def _replace_later(self, places: Sequence[int], pause_s: float) -> None:
        if not self._closing:
            self._replace(places, pause_s)

    def replaced(self, old: MemorySlab, new: MemorySlab) -> None:
        """In the lender's thread. Nobody touches the pool where it is lent."""
        self._pool.replace(self._place(old), new)

    def _place(self, slab: MemorySlab) -> int:
        """Which slab of the pool this is."""
        return next(place for place, mine in enumerate(self._pool.slabs) if mine is slab)

    def close(self) -> None:
        self._closing = True

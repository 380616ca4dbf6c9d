"""What other processes leave of a worker's device: the lane core hears of it, and the pool gives slabs back to the
device or takes them again, as the core decides.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from forebay.gpu.errors import DeviceError
from forebay.gpu.pool import KVPool
from forebay.sched.lane_events import DeviceMemory, DropSlabs, FillSlabs, LaneEvent, SlabsFilled


class WorkerNeighbour:
    """In the worker's event loop. `free` says how many bytes of the device are free, of which `reserve` are to stay so;
    `tell` takes events for the lane core."""

    def __init__(
        self, pool: KVPool, free: Callable[[], int], reserve: int, tell: Callable[[LaneEvent], None], log: Any
    ) -> None:
        self._pool = pool
        self._free = free
        self._reserve = reserve
        self._tell = tell
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._dropped = 0

    def look(self) -> None:
        """At each heartbeat."""
        if self._reserve:
            self._tell(DeviceMemory(self._free()))

    def drop(self, command: DropSlabs) -> None:
        for place in command.slabs:
            self._pool.drop(place)
        if not self._dropped:
            self._log.warning(
                "another process takes the device's memory: KV memory is given back to it until there is room again",
                slabs=len(command.slabs), bytes=len(command.slabs) * self._pool.slab_bytes, reserve=self._reserve,
            )  # fmt: skip
        self._dropped += len(command.slabs)

    def fill(self, command: FillSlabs) -> None:
        count = 0
        try:
            for place in command.slabs:
                self._pool.fill(place)
                count += 1
        except (DeviceError, OSError) as error:
            self._log.debug("no memory for slabs that were given back", error=str(error))
        self._dropped -= count
        if not self._dropped:
            self._log.info("all KV memory that was given back to the device is there again")
        self._loop.call_soon(self._tell, SlabsFilled(count))

"""Slabs that a worker lent and that come back: also where the device has no memory for them at the time."""

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
import structlog

from forebay.gpu.device_name import DeviceName
from forebay.gpu.errors import DeviceError
from forebay.gpu.memfd_backend import MemfdBackend
from forebay.gpu.memory import Slab
from forebay.gpu.pool import KVPool
from forebay.runtime.client import Reclaimed
from forebay.runtime.worker_lending import WorkerLending
from forebay.sched.lane_events import LaneEvent, SlabsBack

SLAB = 64 << 10


class Scarce(MemfdBackend):
    """Has memory for so many slabs, until there is more."""

    def __init__(self, room: int) -> None:
        super().__init__(DeviceName("cpu", 0))
        self.room = room
        self.refused = asyncio.Event()

    def slab(self, size: int) -> Slab:
        if not self.room:
            self.refused.set()
            raise DeviceError("cuda:0: a CUDA call failed: CUDA_ERROR_OUT_OF_MEMORY: out of memory")
        self.room -= 1
        return super().slab(size)


def never(work: Coroutine[Any, Any, None]) -> None:
    raise AssertionError("nothing is lent here")


@pytest.fixture
def pool() -> Iterator[KVPool]:
    found = KVPool(4 * SLAB, SLAB)
    yield found
    found.close()


async def test_memory_that_the_device_lacks_is_waited_for_and_the_rest_comes_at_once(pool: KVPool) -> None:
    memory, told = Scarce(1), list[LaneEvent]()
    came = asyncio.Event()

    def tell(event: LaneEvent) -> None:
        told.append(event)
        came.set()

    lending = WorkerLending(pool, memory, tell, never, structlog.get_logger())
    before = pool.slabs
    lending.yielded(Reclaimed(3 * SLAB, (before[2],), (before[0], before[3]), 0, ()))
    assert told == [SlabsBack((2,)), SlabsBack((0,))], "what there is memory for is back"
    assert memory.refused.is_set()
    assert pool.slabs[0] is not before[0]
    assert pool.slabs[3] is before[3], "nobody touches it, and it is still there"
    memory.refused.clear()
    await asyncio.wait_for(memory.refused.wait(), 20)
    assert len(told) == 2
    came.clear()
    memory.room = 1
    await asyncio.wait_for(came.wait(), 20)
    assert told[2:] == [SlabsBack((3,))]
    assert pool.slabs[3] is not before[3]


async def test_a_worker_that_ends_asks_no_more(pool: KVPool) -> None:
    memory = Scarce(0)
    lending = WorkerLending(pool, memory, lambda event: None, never, structlog.get_logger())
    lending.yielded(Reclaimed(SLAB, (), (pool.slabs[1],), 0, ()))
    lending.close()
    memory.refused.clear()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(memory.refused.wait(), 0.6)

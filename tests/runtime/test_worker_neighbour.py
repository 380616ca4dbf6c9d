"""A real process takes the machine's memory: a pool gives slabs back, and has them again when that process is gone."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import structlog
from structlog.testing import capture_logs

from forebay.gpu.backend import memory_backend
from forebay.gpu.pool import KVPool
from forebay.runtime.recording import LaneSettings, make_lane_core
from forebay.runtime.worker_neighbour import WorkerNeighbour
from forebay.sched.free_memory import CALM_S
from forebay.sched.lane_events import DropSlabs, FillSlabs, LaneEvent, ModelOpened, Report

MIB = 1 << 20
SLAB, SLABS = 8 * MIB, 32
TAKEN = 512 * MIB
MACHINE = 4096 * MIB
BOUND_S = 40.0


class Worker:
    """A pool, its core and what is between them; time passes as fast as it is looked at."""

    def __init__(self, pool: KVPool, free: Callable[[], int], reserve: int) -> None:
        self.pool = pool
        self.core = make_lane_core(LaneSettings(SLABS, SLAB, "adbs", True, reserve=reserve))
        self.neighbour = WorkerNeighbour(pool, free, reserve, self.decide, structlog.get_logger()
        )  # fmt: skip
        self.given = 0
        self.now = 0.0

    def decide(self, event: LaneEvent) -> None:
        for command in self.core.handle(self.now, event):
            match command:
                case DropSlabs():
                    self.neighbour.drop(command)
                case FillSlabs():
                    self.neighbour.fill(command)
                case Report(message):
                    self.given = message.given  # type: ignore[union-attr]
        self.core.check()

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + BOUND_S
        while not condition():
            assert time.monotonic() < deadline, f"{self.given} bytes given, {self.pool.resident} resident"
            self.now += CALM_S / 3
            self.neighbour.look()
            await asyncio.sleep(0)


async def test_a_process_that_takes_memory_gets_it_from_the_pool_and_the_pool_has_it_back() -> None:
    pool = KVPool(SLAB * SLABS, SLAB)
    with memory_backend("cpu:0") as memory:
        memory.write(pool.base, b"k" * pool.capacity)
    assert pool.resident == pool.capacity
    hogs: list[psutil.Process] = []

    def free() -> int:
        """Of a machine that only the pool and the other process use."""
        return MACHINE - pool.resident - sum(hog.memory_info().rss for hog in hogs)

    worker = Worker(pool, free, MACHINE - pool.capacity - TAKEN // 2)
    worker.decide(ModelOpened("a", MIB, 4, 64))
    worker.decide(ModelOpened("b", MIB // 2, 4, 64))
    with capture_logs() as logs:
        hog = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.runtime.memory_hog", str(TAKEN), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert hog.stdout is not None
            assert await hog.stdout.readline() == b"taken\n"
            hogs.append(psutil.Process(hog.pid))
            await worker.until(lambda: worker.given >= pool.capacity // 2)
            assert pool.resident == pool.capacity - worker.given
            quotas = worker.core.memory.pool.quota("a") * MIB + worker.core.memory.pool.quota("b") * MIB // 2
            assert pool.capacity - worker.given - 2 * MIB < quotas <= pool.capacity - worker.given
            hogs.clear()
            await hog.communicate(b"")
        finally:
            if hog.returncode is None:
                hog.kill()
                await hog.wait()
        await worker.until(lambda: worker.given == 0)
        await asyncio.sleep(0)
    assert pool.resident < pool.capacity, "fresh slabs are there, and nothing was written to them"
    warnings = [line for line in logs if line["log_level"] == "warning"]
    assert len(warnings) == 1, "said once"
    assert warnings[0]["event"].startswith("another process takes the device's memory")
    assert "there again" in logs[-1]["event"]
    pool.close()

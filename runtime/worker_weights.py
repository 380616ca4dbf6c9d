"""A worker's weights that come and go: the lane core decides, here it is done, in a thread of its own while steps of
other models go on, and what became of it is told to the core as an event.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from forebay.gpu.device import Device
from forebay.gpu.errors import DeviceLost
from forebay.runtime.borrower import Borrower
from forebay.runtime.lent_shelf import LentShelf
from forebay.sched.lane_events import LaneEvent
from forebay.transport.messages import (
    DeviceSettings,
    EvictWeights,
    RestoreWeights,
    WeightsBack,
    WeightsFailed,
    WeightsGone,
)


class WeightMover:
    """Made in the event loop; `decide` takes events for the lane core, `lost` hears that the device is beyond repair,
    both in the loop. Where `settings` say so the weights that are away lie in memory that is borrowed through the
    scheduler at the endpoint `scheduler`. Raises DeviceError, RefusedAddress, OSError."""

    def __init__(
        self,
        device: Device,
        settings: DeviceSettings,
        scheduler: str,
        credential: str,
        decide: Callable[[LaneEvent], None],
        lost: Callable[[DeviceLost], None],
        log: Any,
    ) -> None:
        self._device = device
        self._borrower: Borrower | None = None
        if settings.weights_borrow:
            name = device.name
            self._borrower = Borrower(
                scheduler, name.index, str(name), slab_bytes=settings.slab_bytes, credential=credential
            )
            device.keep_weights(LentShelf(self._borrower))
        self._decide = decide
        self._lost = lost
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._closing = False
        # One after the other: two loads at once would share the link and both be late.
        self._thread = ThreadPoolExecutor(1, f"weights-{device.name}")

    def move(self, command: EvictWeights | RestoreWeights) -> None:
        self._thread.submit(self._move, command).add_done_callback(lambda done: self._moved(command, done))

    def _move(self, command: EvictWeights | RestoreWeights) -> float:
        started = time.perf_counter()
        if isinstance(command, RestoreWeights):
            self._log.info("weights come", model=command.model)
            self._device.restore(command.model)
        else:
            self._device.evict(command.model)
        return time.perf_counter() - started

    def _moved(self, command: EvictWeights | RestoreWeights, done: "Future[float]") -> None:
        """In the mover's thread."""
        if not self._closing and not done.cancelled():
            self._loop.call_soon_threadsafe(self._tell, command, done)

    def _tell(self, command: EvictWeights | RestoreWeights, done: "Future[float]") -> None:
        if self._closing:
            return
        model, error = command.model, done.exception()
        if isinstance(error, DeviceLost):
            self._lost(error)
        elif error is not None:
            comes = isinstance(command, RestoreWeights)
            self._log.error("weights do not move", model=model, direction="in" if comes else "out", error=str(error))
            self._decide(WeightsFailed(model, str(error) or repr(error)))
        elif isinstance(command, RestoreWeights):
            self._log.info("weights are there", model=model, seconds=round(done.result(), 3))
            self._decide(WeightsBack(model, done.result()))
        else:
            self._log.info("weights are gone", model=model, seconds=round(done.result(), 3))
            self._decide(WeightsGone(model))

    def close(self) -> None:
        """Waits for what has begun; blocks. Then close the device, and then `give_back`."""
        self._closing = True
        self._thread.shutdown(wait=True, cancel_futures=True)

    def give_back(self) -> None:
        """All that was borrowed; blocks."""
        if self._borrower is not None:
            self._borrower.close()

"""Copies of `cuda:N` in the background, on a stream of their own: large pieces by the copy engines, which leave the SMs
to the models; small ones by one kernel for all of them, since a call for each would cost more than the copy."""

import contextlib
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from forebay.gpu.cuda_engine import ENGINE_STREAMS, CopyEngine
from forebay.gpu.cuda_kernel import CopyKernel
from forebay.gpu.cuda_places import Place
from forebay.gpu.errors import DeviceError
from forebay.gpu.job_queue import JobQueue
from forebay.gpu.pieces import Pieces, plan

if TYPE_CHECKING:
    from forebay.gpu.cuda_memory import CudaBackend

ENGINE_BYTES = {Place.OWN: 16 << 20, Place.PEER: 1 << 20, Place.HOST: 64 << 10}
"""From here on a piece goes to the copy engines, by what is at its farther end. Measured on H200: within the device
they take 4 us a piece, more than the kernel up to megabytes; to the host 0.6 us, so that pieces of 64 KiB run at 0.9
of the link and leave products beside them 0.99 of their speed, to which the kernel leaves 0.4 to 0.9."""

BLOCKS_BESIDE_COMPUTE = 16
"""Thread blocks of the kernel beside products: measured on H200 over NVLink, 8 / 16 / 32 / 64 leave the products 0.90 /
0.98 / 0.93 / 0.87 of their speed and copy at 129 / 187 / 185 / 181 GB/s."""

HOST_BLOCKS = 4
HOST_BLOCKS_BESIDE_COMPUTE = 2
"""4 fill PCIe as well as 132 do (measured on H200: 46 GB/s of 16 KiB pieces); beside products 4 / 2 / 1 leave them
0.77 / 0.88 / 0.91 of their speed and copy at 28 / 30 / 18 GB/s."""

INLINE_PIECES = 1024
"""A list of at most so many is launched by whoever asks, where nothing else is on its way: that thread would only wait
for another one to do it."""

ASLEEP = 0.6
WORTH_SLEEPING_S = 0.0005
RATE_BYTES = 16 << 20
"""Of the time that a copy takes at best (as fast as the fastest one of RATE_BYTES or more so far) its waiter sleeps, if
that is worth it; then it spins: the driver wakes a thread up to 1 ms late (measured), in which NVLink moves 0.4 GB."""


@dataclass(frozen=True)
class _Job:
    pieces: Pieces
    beside_compute: bool
    after: Any
    done: "Future[None]"


@dataclass(frozen=True)
class _Launched:
    event: Any
    bytes: int
    at: float
    done: "Future[None]"


class CudaCopier:
    """One thread launches, another waits for what was launched. `engine_bytes`, `engine_streams` and the numbers of
    thread blocks are for measuring; `blocks` is otherwise one for each SM."""

    def __init__(
        self,
        backend: "CudaBackend",
        *,
        engine_bytes: int | None = None,
        engine_streams: int = ENGINE_STREAMS,
        blocks: int | None = None,
        blocks_beside_compute: int = BLOCKS_BESIDE_COMPUTE,
        host_blocks: int = HOST_BLOCKS,
        host_blocks_beside_compute: int = HOST_BLOCKS_BESIDE_COMPUTE,
    ) -> None:
        self._context = context = backend.context
        limits = [engine_bytes if engine_bytes is not None else ENGINE_BYTES[place] for place in Place]
        self._engine_bytes = np.array(limits, np.uint64)
        processors = context.driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        alone = {Place.OWN: blocks or context.attribute(processors), Place.HOST: host_blocks}
        beside = {Place.OWN: blocks_beside_compute, Place.HOST: host_blocks_beside_compute}
        self._blocks = {False: alone, True: beside}
        self._best_rate = 0.0
        self._last_done = 0.0
        self._events: deque[Any] = deque()
        """Those that nobody uses at the moment: to make one takes longer than to record it."""
        self._lock = threading.Lock()
        """Held by whoever puts a copy in line, or launches it at once."""
        self._counting = threading.Lock()
        self._unfinished = 0
        self._closed = False
        with contextlib.ExitStack() as undo:
            self._stream = context.stream()
            undo.callback(self._destroy, "cuStreamDestroy", self._stream)
            undo.callback(self._destroy_events)
            self._engine = CopyEngine(context, self._stream, engine_streams)
            undo.callback(self._engine.close)
            self._kernel = CopyKernel(backend, self._stream)
            undo.callback(self._kernel.close)
            name = f"copies-{context.device}"
            self._waiting = JobQueue[_Launched](f"{name}-wait", self._wait)
            undo.callback(self._waiting.close)
            self._launching = JobQueue[_Job](name, self._launch)
            undo.callback(self._launching.close)
            self._undo = undo.pop_all()

    def copy(self, pieces: Pieces, *, beside_compute: bool = False, after_stream: int = 0) -> "Future[None]":
        done: Future[None] = Future()
        with self._lock:
            if self._closed:
                raise DeviceError(f"the copier of {self._context.device} is closed")
            after = self._recorded(after_stream) if after_stream else None
            job = _Job(pieces, beside_compute, after, done)
            if self._count(1) > 1 or not 0 < pieces.sizes.size <= INLINE_PIECES:
                self._launching.put(job)
            else:
                self._launch(job)
        return done

    def _launch(self, job: _Job) -> None:
        if not job.done.set_running_or_notify_cancel():
            if job.after is not None:
                self._events.append(job.after)
            self._count(-1)
            return
        try:
            planned = plan(job.pieces)
            with self._context.current() as driver:
                if job.after is not None:
                    self._context.call(driver.cuStreamWaitEvent(self._stream, job.after, 0))
                    self._events.append(job.after)
                self._dispatch(planned, job.beside_compute)
                event = self._recorded(self._stream)
            self._waiting.put(_Launched(event, planned.bytes, time.perf_counter(), job.done))
        except Exception as error:
            # What was launched of it goes on, and its memory may be used otherwise from now on.
            with contextlib.suppress(DeviceError), self._context.current() as driver:
                driver.cuStreamSynchronize(self._stream)
            self._count(-1)
            job.done.set_exception(error)

    def _dispatch(self, planned: Pieces, beside_compute: bool) -> None:
        """Launches every piece, by the engines or the kernel. Most lists are of one kind: those are not divided."""
        if not len(planned):
            return
        places, sizes, blocks = self._context.places.of(planned), planned.sizes, self._blocks[beside_compute]
        if isinstance(places, Place):
            limit = self._engine_bytes[places]
            near = Place.HOST if places is Place.HOST else Place.OWN
            if sizes.max() < limit:
                self._kernel.copy(planned, blocks[near])
                return
            if sizes.min() >= limit:
                self._engine.copy(planned, beside_compute)
                return
            places = np.full(len(planned), places, np.uint64)
        large = sizes >= self._engine_bytes[places.astype(np.int64)]
        far = places == Place.HOST
        self._engine.copy(planned.part(large), beside_compute)
        self._kernel.copy(planned.part(~large & ~far), blocks[Place.OWN])
        self._kernel.copy(planned.part(~large & far), blocks[Place.HOST])

    def _wait(self, job: _Launched) -> None:
        begun = max(job.at, self._last_done)
        try:
            with self._context.current() as driver:
                waited = int(driver.cuEventQuery(job.event)[0]) != 0
                if waited and self._best_rate:
                    left = begun + ASLEEP * job.bytes / self._best_rate - time.perf_counter()
                    if left > WORTH_SLEEPING_S:
                        time.sleep(left)
                self._context.call(driver.cuEventSynchronize(job.event))
        except Exception as error:
            self._count(-1)
            job.done.set_exception(error)
            return
        self._events.append(job.event)
        self._last_done = time.perf_counter()
        if waited and job.bytes >= RATE_BYTES:
            self._best_rate = max(self._best_rate, job.bytes / (self._last_done - begun))
        self._count(-1)
        job.done.set_result(None)

    def _count(self, more: int) -> int:
        with self._counting:
            self._unfinished += more
            return self._unfinished

    def _recorded(self, stream: Any) -> Any:
        """An event behind the stream's work so far."""
        with self._context.current() as driver:
            try:
                event = self._events.pop()
            except IndexError:
                event = self._context.call(driver.cuEventCreate(int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)))
            self._context.call(driver.cuEventRecord(event, stream))
        return event

    def _destroy_events(self) -> None:
        for event in self._events:
            self._destroy("cuEventDestroy", event)

    def _destroy(self, function: str, handle: Any) -> None:
        with self._context.current() as driver:
            getattr(driver, function)(handle)

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

"""Copies in the background: any list of pieces between arenas, pools and pinned host memory. Needs numpy, not torch."""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from forebay.gpu.backend import Closing
from forebay.gpu.errors import DeviceError
from forebay.gpu.job_queue import JobQueue
from forebay.gpu.native_copy import copy_pieces
from forebay.gpu.pieces import Pieces, cut, plan, shares

MAX_THREADS = 4
"""More threads than that hardly add to the bandwidth of a machine's memory."""

BYTES_WORTH_A_THREAD = 1 << 20
"""About 0.1 ms of copying, ten times what it costs to hand work to another thread."""


class Copier(Closing, Protocol):
    """Copies one list after the other, in the order in which they were given; within a list there is no order."""

    def copy(self, pieces: Pieces, *, beside_compute: bool = False, after_stream: int = 0) -> "Future[None]":
        """Begins a copy, without blocking; the future is done once all bytes are there. From asyncio, await
        `asyncio.wrap_future(...)`. The memory must stay mapped until then.

        A future that is cancelled before its copy has begun means that nothing is copied; afterwards `cancel()`
        returns False and the copy goes on. Cancelling a task that awaits the wrapped future does not tell which it
        was: before the memory is used otherwise, wait for the future itself.

        `beside_compute`: models compute meanwhile; leave them the threads or SMs, at the cost of some bandwidth.
        `after_stream`: CUDA stream whose work so far comes first (0: nothing to wait for; on `cpu:N` nobody has one).

        Raises DeviceError if the copier is closed. The future fails with DeviceError, and nothing has been copied, if
        a destination overlaps another piece."""

    def close(self) -> None:
        """Waits until all copies are done. Closing twice is fine."""


@dataclass(frozen=True)
class _Job:
    pieces: Pieces
    threads: int
    done: "Future[None]"


class CpuCopier:
    """A thread of its own, and helpers for large copies when nothing computes."""

    def __init__(self, name: str = "cpu:0", threads: int | None = None) -> None:
        self._threads = threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._queue = JobQueue[_Job](f"copies-{name}", self._run)
        self._helpers = ThreadPoolExecutor(max(1, self._threads - 1), f"copy-helper-{name}")

    def copy(self, pieces: Pieces, *, beside_compute: bool = False, after_stream: int = 0) -> "Future[None]":
        if after_stream:
            raise DeviceError(f"after_stream is {after_stream:#x}, but a cpu device has no streams; leave it out")
        done: Future[None] = Future()
        self._queue.put(_Job(pieces, 1 if beside_compute else self._threads, done))
        return done

    def _run(self, job: _Job) -> None:
        if not job.done.set_running_or_notify_cancel():
            return
        try:
            planned = plan(job.pieces)
            threads = min(job.threads, max(1, planned.bytes // BYTES_WORTH_A_THREAD))
            if threads > 1:
                planned = cut(planned, BYTES_WORTH_A_THREAD)
            first, *others = shares(planned, threads) or [planned]
            helping = [self._helpers.submit(copy_pieces, share) for share in others]
            copy_pieces(first)
            for share in helping:
                share.result()
        except Exception as error:
            job.done.set_exception(error)
        else:
            job.done.set_result(None)

    @property
    def closed(self) -> bool:
        return self._queue.closed

    def close(self) -> None:
        self._queue.close()
        self._helpers.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

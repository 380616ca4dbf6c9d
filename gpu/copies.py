"""Copies in the background: any list of pieces between arenas, pools and pinned host memory. Needs numpy, not torch."""

import os
import threading
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

AT_ONCE_BYTES, AT_ONCE_PIECES = 1 << 20, 1024
"""A copy of no more than that is done by whoever asks for it, who is held up for no more than 0.2 ms. To hand it over
and to hear that it is done takes 0.12 ms (two virtual cores of an AMD EPYC), as long as copying 512 KiB."""


class Copier(Closing, Protocol):
    """Copies one list after the other, in the order in which they were given; within a list there is no order."""

    def copy(self, pieces: Pieces, *, beside_compute: bool = False, after_stream: int = 0) -> "Future[None]":
        """Begins a copy, without waiting for another one; the future is done once all bytes are there, and a small copy
        may be done on return. From asyncio, await
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
    """A thread of its own, and helpers for large copies when nothing computes. A small copy that nothing is before is
    done at once, in the thread of the caller."""

    def __init__(self, name: str = "cpu:0", threads: int | None = None) -> None:
        self._threads = threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._queue = JobQueue[_Job](f"copies-{name}", self._run_next)
        self._order = threading.Lock()
        self._waiting = 0
        self._helpers = ThreadPoolExecutor(max(1, self._threads - 1), f"copy-helper-{name}")

    def copy(self, pieces: Pieces, *, beside_compute: bool = False, after_stream: int = 0) -> "Future[None]":
        if after_stream:
            raise DeviceError(f"after_stream is {after_stream:#x}, but a cpu device has no streams; leave it out")
        job = _Job(pieces, 1 if beside_compute else self._threads, Future())
        # Also while a small one is copied: another thread's small one may write what it reads.
        with self._order:
            if self._waiting or self._queue.closed or not _is_small(pieces):
                self._queue.put(job)
                self._waiting += 1
            else:
                _finish(job, self._problem(pieces, 1))
        return job.done

    def _run_next(self, job: _Job) -> None:
        runs = job.done.set_running_or_notify_cancel()
        problem = self._problem(job.pieces, job.threads) if runs else None
        with self._order:
            self._waiting -= 1
        if runs:
            _finish(job, problem)

    def _problem(self, pieces: Pieces, threads: int) -> Exception | None:
        """Copies; returns what was wrong with it."""
        try:
            planned = plan(pieces)
            if threads > 1 and (threads := min(threads, planned.bytes // BYTES_WORTH_A_THREAD)) > 1:
                self._share(cut(planned, BYTES_WORTH_A_THREAD), threads)
            else:
                copy_pieces(planned)
        except Exception as error:
            return error
        return None

    def _share(self, planned: Pieces, threads: int) -> None:
        first, *others = shares(planned, threads)
        helping = [self._helpers.submit(copy_pieces, share) for share in others]
        copy_pieces(first)
        for share in helping:
            share.result()

    @property
    def closed(self) -> bool:
        return self._queue.closed

    def close(self) -> None:
        self._queue.close()
        with self._order:  # one that another thread does at once may not be done yet
            self._helpers.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _is_small(pieces: Pieces) -> bool:
    return len(pieces) <= AT_ONCE_PIECES and pieces.bytes <= AT_ONCE_BYTES


def _finish(job: _Job, problem: Exception | None) -> None:
    if problem is None:
        job.done.set_result(None)
    else:
        job.done.set_exception(problem)

"""A thread that takes jobs one after the other."""

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from forebay.gpu.errors import DeviceError

Job = TypeVar("Job")


class JobQueue(Generic[Job]):
    """`run` is called for each job in the thread `name`, in the order of `put`, and must not raise."""

    def __init__(self, name: str, run: Callable[[Job], None]) -> None:
        self._name = name
        self._run = run
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        # A daemon, so that a program that forgot to close still ends.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Raises DeviceError once the queue is closed."""
        with self._lock:
            if self._closed:
                raise DeviceError(f"{self._name} is closed")
            self._jobs.put(job)

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Returns when all jobs are done and the thread has ended. Not from the thread itself."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._run(job)
            del job  # what it holds is not to live until the next one comes

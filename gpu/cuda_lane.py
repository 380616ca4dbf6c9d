"""A lane of a CUDA device: steps of one stream, one after the other, while other lanes' steps run beside them.

Its first thread takes steps to the stream and does not wait for them; its second waits for their ends and tells of
them. So the next step is prepared while one runs.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from forebay.gpu.cuda_staging import DEPTH

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Flight:
    """A step. `start` takes it to the current stream and gives what `land` gets once it is over, with the seconds that
    it took on the device. Either `land` or `fail` is called, in the lane's second thread, in the order of the steps."""

    start: Callable[[], Any]
    land: Callable[[Any, float], None]
    fail: Callable[[BaseException], None]
    share: int = 0


class CudaLane:
    """`stream` gives the stream for a share of the SMs (0: all); it is asked once for each, in the lane's thread."""

    def __init__(self, name: str, device: torch.device, stream: Callable[[int], torch.cuda.Stream]) -> None:
        self.name = name
        self.device = device
        self._new_stream = stream
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._last: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None
        self._room = threading.Semaphore(DEPTH)
        self._floats: torch.Tensor | None = None

        def use_device() -> None:
            torch.cuda.set_device(device)

        self._starting = ThreadPoolExecutor(1, f"lane-{name}", initializer=use_device)
        self._landing = ThreadPoolExecutor(1, f"landing-{name}", initializer=use_device)

    @property
    def whole_stream(self) -> torch.cuda.Stream | None:
        """Its stream for all SMs, if it was ever used."""
        return self._streams.get(0)

    def floats(self, size: int) -> torch.Tensor:
        """At least `size` bytes for results that last no longer than a launch; shared by all that runs in this lane."""
        if self._floats is None or len(self._floats) < size:
            self._floats = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._floats

    def launch(self, flight: Flight) -> None:
        """Queues a step and returns at once."""
        self._starting.submit(self._start, flight)

    def call(self, job: Callable[[], Result]) -> Result:
        """Runs a job in the first thread, after all steps so far have landed, and waits for it."""

        def alone() -> Result:
            self._landing.submit(lambda: None).result()
            return job()

        return self._starting.submit(alone).result()

    def _start(self, flight: Flight) -> None:
        self._room.acquire()
        try:
            stream = self._stream(flight.share)
            began, ended = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
            with torch.inference_mode(), torch.cuda.stream(stream):
                if self._last is not None and self._last[0] != stream:
                    stream.wait_event(self._last[1])
                began.record(stream)
                try:
                    result = flight.start()
                except BaseException:
                    stream.synchronize()  # what was launched may still read what the next step would write
                    raise
                ended.record(stream)
                self._last = stream, ended
        except BaseException as error:
            self._landing.submit(self._failed, flight, error)
        else:
            self._landing.submit(self._land, flight, result, began, ended)

    def _stream(self, share: int) -> torch.cuda.Stream:
        if share not in self._streams:
            self._streams[share] = self._new_stream(share)
        return self._streams[share]

    def _land(self, flight: Flight, result: Any, began: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        try:
            ended.synchronize()
            seconds = began.elapsed_time(ended) / 1e3
        except BaseException as error:
            self._failed(flight, error)
        else:
            try:
                flight.land(result, seconds)
            finally:
                self._room.release()

    def _failed(self, flight: Flight, error: BaseException) -> None:
        self._room.release()
        flight.fail(error)

    def close(self) -> None:
        """After all steps so far have landed. Closing twice is fine."""
        self._starting.shutdown(wait=True)
        self._landing.shutdown(wait=True)
        self._floats = None
        self._last = None

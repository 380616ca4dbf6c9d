"""Devices by name: what a worker opens, loads models on, and closes. The kind of device is known only below this line
of the import table; callers see `Device`."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from forebay.gpu.attention import Scratch
from forebay.gpu.device_name import DeviceName as DeviceName
from forebay.gpu.device_name import parse_device as parse_device
from forebay.gpu.errors import DeviceError, ModelLoadError
from forebay.gpu.pool import KVPool
from forebay.gpu.runner import ModelRunner
from forebay.gpu.weights import WeightCache
from forebay.transport.messages.common import DeviceSettings, ModelSpec

Result = TypeVar("Result")


@dataclass(frozen=True)
class Telemetry:
    """`memory_total` is the pool's capacity in bytes, `memory_resident` what of it was ever written. `busy_seconds` is
    how long the lane has worked since the device was opened, `jobs` how many jobs that were."""

    memory_total: int
    memory_resident: int
    busy_seconds: float
    jobs: int


class Device(Protocol):
    """One device of a worker. Opened by `open_device`; whoever opened it closes it."""

    @property
    def name(self) -> DeviceName: ...

    @property
    def pool(self) -> KVPool: ...

    def load(self, spec: ModelSpec) -> ModelRunner:
        """Loads a model; blocks for seconds, so call it from a thread of its own. Steps of other models go on
        meanwhile. Raises ModelLoadError."""

    def unload(self, name: str) -> None:
        """Forgets a model after the steps launched so far; blocks until then. Raises KeyError if it is not loaded."""

    def telemetry(self) -> Telemetry: ...

    def close(self) -> None:
        """Ends the lane after what was launched so far, and gives all memory back. Closing twice is fine."""


def open_device(name: str, settings: DeviceSettings) -> Device:
    """Opens a device and takes its memory. Raises DeviceError."""
    parsed = parse_device(name)
    if parsed.kind != "cpu":
        raise DeviceError(f"{name} cannot be opened: this build has only the cpu backend; use cpu:N")
    return CpuDevice(parsed, settings)


class CpuDevice:
    """A share of the machine's memory and one thread, the lane, that runs all model work in order."""

    def __init__(self, name: DeviceName, settings: DeviceSettings) -> None:
        if settings.threads < 0:
            raise DeviceError(f"threads is {settings.threads}; use 1 or more, or 0 for the library's own choice")
        self.name = name
        self.scratch = Scratch()
        self.pool = KVPool(settings.memory, settings.slab_bytes)
        self._threads = settings.threads
        self._weights = WeightCache()
        self._runners: dict[str, ModelRunner] = {}
        self._busy_seconds = 0.0
        self._jobs = 0
        self._lane = ThreadPoolExecutor(1, f"lane-{name}", initializer=self._use_threads)

    def _use_threads(self) -> None:
        """The number is kept for each calling thread."""
        if self._threads:
            torch.set_num_threads(self._threads)

    def submit(self, job: Callable[[], Result]) -> "Future[Result]":
        """Runs a job in the lane, after all jobs before it."""
        return self._lane.submit(self._timed, job)

    def _timed(self, job: Callable[[], Result]) -> Result:
        started = time.perf_counter()
        try:
            return job()
        finally:
            self._busy_seconds += time.perf_counter() - started
            self._jobs += 1

    def load(self, spec: ModelSpec) -> ModelRunner:
        if spec.name in self._runners:
            raise ModelLoadError(spec.name, spec.path, f"{self.name} has a model of this name already; unload it first")
        self._use_threads()
        weights = self._weights.acquire(spec)
        try:
            runner = ModelRunner(spec, weights, self.pool, self)
        except ModelLoadError:
            self._weights.release(spec)
            raise
        self._runners[spec.name] = runner
        return runner

    def unload(self, name: str) -> None:
        runner = self._runners.pop(name)
        self.submit(runner.forget).result()
        self._weights.release(runner.spec)

    def telemetry(self) -> Telemetry:
        return Telemetry(self.pool.capacity, self.pool.resident, self._busy_seconds, self._jobs)

    def close(self) -> None:
        self._lane.shutdown(wait=True)
        self._runners.clear()
        self.pool.close()

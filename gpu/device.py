"""Devices by name: what a worker opens, loads models on, and closes. The kind of device is known only below this line
of the import table; callers see `Device`."""

import gc
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
from forebay.gpu.movable import MovableRunner, describe, require_room
from forebay.gpu.pool import KVPool
from forebay.gpu.runner import ModelRunner, Runner
from forebay.gpu.weight_shelf import Shelf
from forebay.gpu.weights import WeightCache, load_weights
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

    def load(self, spec: ModelSpec) -> Runner:
        """Loads a model; blocks for seconds, so call it from a thread of its own. Steps of other models go on
        meanwhile. Raises ModelLoadError."""

    def unload(self, name: str) -> None:
        """Forgets a model after the steps launched so far; blocks until then. Raises KeyError if it is not loaded."""

    def introduce(self, spec: ModelSpec) -> MovableRunner:
        """As `load`, but without the weights, which come with the first `restore`. Raises ModelLoadError, also for
        weights that are more than `weights_memory`."""

    def restore(self, name: str) -> None:
        """Brings the weights of a model that was introduced (back) onto the device; blocks. Raises ModelLoadError,
        DeviceError: they are away then. One `restore` or `evict` at a time."""

    def evict(self, name: str) -> None:
        """Gives up the memory of such weights, which no step in flight may need; blocks. Sequences stay open. Raises
        DeviceError: they are still there then."""

    def keep_weights(self, shelf: Shelf) -> None:
        """Weights that are evicted go there instead of to the host's memory. Before any are; the shelf is closed after
        the device. Raises DeviceError where evicted weights are not kept at all."""

    def telemetry(self) -> Telemetry: ...

    def close(self) -> None:
        """Ends the lane after what was launched so far, and gives all memory back. Closing twice is fine."""


def open_device(name: str, settings: DeviceSettings) -> Device:
    """Opens a device and takes its memory. Raises DeviceError."""
    parsed = parse_device(name)
    if parsed.kind == "cpu":
        return CpuDevice(parsed, settings)
    from forebay.gpu.cuda_device import CudaDevice

    return CudaDevice(parsed, settings)


class CpuDevice:
    """A share of the machine's memory and one thread, the lane, that runs all model work in order."""

    def __init__(self, name: DeviceName, settings: DeviceSettings) -> None:
        if settings.threads < 0:
            raise DeviceError(f"threads is {settings.threads}; use 1 or more, or 0 for the library's own choice")
        self.name = name
        self.scratch = Scratch()
        self.pool = KVPool(settings.memory, settings.slab_bytes)
        self._threads = settings.threads
        self._weights = WeightCache(load_weights)
        self._runners: dict[str, ModelRunner] = {}
        self._weights_memory = settings.weights_memory
        self._movable: dict[str, MovableRunner] = {}
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
        if spec.name in self._movable:
            raise ModelLoadError(spec.name, spec.path, f"{self.name} has a model of this name already; unload it first")
        return self._load(spec)

    def _load(self, spec: ModelSpec) -> ModelRunner:
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

    def introduce(self, spec: ModelSpec) -> MovableRunner:
        if spec.name in self._movable or spec.name in self._runners:
            raise ModelLoadError(spec.name, spec.path, f"{self.name} has a model of this name already; unload it first")
        described = describe(spec)
        require_room(spec, described.weight_bytes, self._weights_memory)
        runner = MovableRunner(spec, described, self.pool, described.weight_bytes)
        self._movable[spec.name] = runner
        return runner

    def restore(self, name: str) -> None:
        movable = self._movable[name]
        runner = self._runners.get(name)
        if runner is None:
            runner = self._load(movable.spec)
            try:
                movable.arrive(runner)
            except ModelLoadError:
                self._forget(runner)
                raise
        elif runner.away:
            self._use_threads()
            weights = self._weights.acquire(movable.spec)
            self.submit(lambda: runner.use(weights)).result()

    def evict(self, name: str) -> None:
        runner = self._runners.get(name)
        if runner is not None and not runner.away:
            self.submit(lambda: runner.use(None)).result()
            self._weights.release(runner.spec)
            gc.collect()  # modules refer to each other in circles

    def keep_weights(self, shelf: Shelf) -> None:
        raise DeviceError(f"{self.name} drops weights and reads their files again: there is nothing to keep elsewhere")

    def unload(self, name: str) -> None:
        movable = self._movable.pop(name, None)
        if movable is not None and movable.runner is None:
            return
        self._forget(self._runners[name])

    def _forget(self, runner: ModelRunner) -> None:
        del self._runners[runner.spec.name]
        self.submit(runner.forget).result()
        if not runner.away:
            self._weights.release(runner.spec)

    def telemetry(self) -> Telemetry:
        return Telemetry(self.pool.capacity, self.pool.resident, self._busy_seconds, self._jobs)

    def close(self) -> None:
        self._lane.shutdown(wait=True)
        self._runners.clear()
        self._movable.clear()
        self.pool.close()

"""A GPU as a worker's device: the pool, the lanes, and the models that use them."""

import contextlib
import gc
import threading
import traceback
from collections.abc import Iterator
from contextlib import ExitStack

import torch

from forebay.gpu.cuda_lanes import CudaLanes
from forebay.gpu.cuda_loading import CudaWeights, is_fast, load_on_cuda, rotary_bytes, weight_bytes
from forebay.gpu.cuda_memory import CudaBackend
from forebay.gpu.cuda_model import LastTokens, ModelOnDevice
from forebay.gpu.cuda_runner import CudaRunner
from forebay.gpu.decoder import FAMILIES
from forebay.gpu.decoder_weights import on_device
from forebay.gpu.device import Telemetry
from forebay.gpu.device_name import DeviceName
from forebay.gpu.errors import DeviceError, DeviceLost, ModelLoadError, StepError, is_lack
from forebay.gpu.movable import MovableRunner, describe, require_room
from forebay.gpu.pool import KVPool
from forebay.gpu.runner import blocks_of_pool, context_limit
from forebay.gpu.weight_range import WeightPlaces, WeightRange
from forebay.gpu.weight_shelf import Shelf
from forebay.transport.messages.common import DeviceSettings, ModelSpec
from forebay.transport.messages.steps import LaneKind

DIVIDED: tuple[LaneKind, ...] = ("decode", "prefill")
UNDIVIDED: tuple[LaneKind, ...] = ("mixed",)
"""Kinds of lanes that a model's steps go to."""

SLOTS = 1 << 16
"""Sequences of one model that may have drawn a token and not be forgotten yet."""


class CudaDevice:
    """Opened by `open_device`. Raises DeviceError where there is no such GPU, or not so much memory on it."""

    def __init__(self, name: DeviceName, settings: DeviceSettings) -> None:
        self.name = name
        self.torch_device = torch.device("cuda", name.index)
        self._divided = settings.partition != "none"
        self._weights_memory = settings.weights_memory
        self._runners: dict[str, CudaRunner] = {}
        self._movable: dict[str, MovableRunner] = {}
        self._ranges: dict[str, WeightRange] = {}
        self._loading = threading.Lock()
        self._counting = threading.Lock()
        self._busy_seconds = 0.0
        self._jobs = 0
        self._lost: DeviceLost | None = None
        with _opening(name), ExitStack() as undo:
            self._backend = undo.enter_context(CudaBackend(name))
            torch.cuda.set_device(self.torch_device)
            self._processors = torch.cuda.get_device_properties(self.torch_device).multi_processor_count
            self.pool = self._open_pool(settings)
            undo.callback(self.pool.close)
            self._places: WeightPlaces | None = None
            if settings.weights_memory:
                places = WeightPlaces(self._backend, settings.slab_bytes, settings.weights_host)
                self._places = undo.enter_context(places)
            self._lanes = CudaLanes(self.torch_device, self._backend.context)
            undo.callback(self._lanes.close)
            undo.callback(self._drop_all)
            self._undo = undo.pop_all()

    def _open_pool(self, settings: DeviceSettings) -> KVPool:
        free = self._backend.memory().free
        if settings.memory > free:
            raise DeviceError(
                f"{self.name} has {free} bytes free, its memory is to be {settings.memory} for the KV pool alone, and "
                "weights come beside it; lower memory, or end what else uses the GPU"
            )
        return KVPool(settings.memory, settings.slab_bytes, self._backend)

    def _landed(self, seconds: float) -> None:
        with self._counting:
            self._busy_seconds += seconds
            self._jobs += 1

    def _diagnose(self, error: BaseException) -> BaseException:
        """What a step fails with. An error that CUDA cannot recover from is every later call's answer, too."""
        if isinstance(error, StepError | DeviceError) and not is_lack(error):
            return error
        if (lost := self._loss(error)) is not None:
            return lost
        return StepError(f"{self.name} has no memory left for it: {error}") if is_lack(error) else error

    def _loss(self, error: BaseException) -> DeviceLost | None:
        """Whether that error was one that CUDA cannot recover from."""
        if self._lost is None:
            try:
                torch.cuda.synchronize(self.torch_device)
            except Exception as lost:
                self._lost = DeviceLost(
                    f"{self.name} is lost to this process, which must be started again: {error} (then: {lost})"
                )
                self._lost.__cause__ = error
        return self._lost

    @contextlib.contextmanager
    def _noticing_loss(self) -> Iterator[None]:
        """What fails because the device is lost raises DeviceLost: it is neither the model's fault nor a lack."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, DeviceLost) and (lost := self._loss(error)) is not None:
                raise lost from error
            raise

    # Models ----------------------------------------------------------------------------------------------------------

    def load(self, spec: ModelSpec) -> CudaRunner:
        with self._loading, self._noticing_loss():
            self._require_new(spec)
            torch.cuda.set_device(self.torch_device)
            return self._load(spec, None)

    def _require_new(self, spec: ModelSpec) -> None:
        if spec.name in self._runners or spec.name in self._movable:
            raise ModelLoadError(spec.name, spec.path, f"{self.name} has a model of this name already; unload it first")

    def _load(self, spec: ModelSpec, place: WeightRange | None) -> CudaRunner:
        """Onto `place`, or else into memory of torch's own. Leaves nothing behind where it raises."""
        try:
            with self._telling_of_memory(spec):
                runner = self._prepared(spec, place)
        except BaseException as error:
            self._lanes.end_model(spec.name)
            _forget_frames(error)
            raise
        finally:
            self._give_back()
        self._runners[spec.name] = runner
        return runner

    def _prepared(self, spec: ModelSpec, place: WeightRange | None) -> CudaRunner:
        allocate = on_device(self.torch_device) if place is None else place.allocate
        runner = self._runner(spec, load_on_cuda(spec, self.torch_device, allocate))
        try:
            for kind in DIVIDED if self._divided else UNDIVIDED:
                runner.prepare(kind)
        except BaseException:
            runner.forget()  # its streams are used again
            raise
        return runner

    def _runner(self, spec: ModelSpec, weights: CudaWeights) -> CudaRunner:
        blocks = blocks_of_pool(spec, weights.shape, self.pool)
        view = self.pool.view(weights.shape)
        shared = ModelOnDevice(
            name=spec.name,
            model=weights.model,
            attention=weights.attention,
            layers=[view[:, layer] for layer in range(weights.shape.layers)],
            last_tokens=LastTokens(SLOTS, self.torch_device),
            vocabulary=weights.vocabulary,
            end_of_sequence=weights.end_of_sequence,
            max_context=context_limit(spec, weights.max_positions, blocks),
            max_sequences=spec.max_sequences,
            step_tokens=spec.step_tokens,
            processors=self._processors,
        )
        return CudaRunner(
            spec,
            weights.shape,
            blocks,
            shared,
            lanes=self._lanes,
            diagnose=self._diagnose,
            landed=self._landed,
        )

    @contextlib.contextmanager
    def _telling_of_memory(self, spec: ModelSpec) -> Iterator[None]:
        """Refuses what cannot fit before anything is read, and says the same where it does not fit in the end."""
        needed = weight_bytes(spec)
        memory = self._backend.memory()
        problem = (
            f"its weights take {needed} bytes of {self.name}, of whose {memory.total} bytes {memory.free} are free "
            f"beside a KV pool of {self.pool.capacity}; lower the device's memory, or place the model elsewhere"
        )
        spare = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        if self._places is not None:
            spare += self._places.stock.spare_bytes  # what evicted weights have left
        if needed > memory.free + spare:
            raise ModelLoadError(spec.name, spec.path, problem)
        try:
            yield
        except DeviceError as error:
            raise ModelLoadError(spec.name, spec.path, str(error)) from error
        except RuntimeError as error:
            if not is_lack(error):
                raise
            raise ModelLoadError(spec.name, spec.path, f"{problem} ({error})") from error

    def unload(self, name: str) -> None:
        with self._loading:
            movable = self._movable.pop(name, None)
            if movable is None or movable.runner is not None:
                self._forget(self._runners.pop(name))
            place = self._ranges.pop(name, None)
            if place is not None:
                place.close()

    def _forget(self, runner: CudaRunner) -> None:
        self._lanes.wait(runner.spec.name)
        self._lanes.end_model(runner.spec.name)
        runner.forget()
        del runner
        self._give_back()

    def _give_back(self) -> None:
        """Modules refer to each other in circles, and torch keeps what is free for itself."""
        gc.collect()
        if self._lost is None:
            torch.cuda.empty_cache()

    # Weights that come and go ----------------------------------------------------------------------------------------

    def introduce(self, spec: ModelSpec) -> MovableRunner:
        with self._loading:
            self._require_new(spec)
            assert self._places is not None, "introduced where weights_memory is bounded"
            described = describe(spec)
            if not is_fast(spec):
                raise ModelLoadError(
                    spec.name,
                    spec.path,
                    f"its weights cannot come and go on {self.name}: it is none of {', '.join(FAMILIES)}",
                )
            # Two rotary tables lie among the weights.
            size = described.weight_bytes + rotary_bytes(spec)
            taken = self._places.taken(size, described.tensors + 2)
            require_room(spec, taken, self._weights_memory)
            runner = MovableRunner(spec, described, self.pool, taken)
            self._movable[spec.name] = runner
            return runner

    def restore(self, name: str) -> None:
        with self._loading, self._noticing_loss():
            torch.cuda.set_device(self.torch_device)
            movable = self._movable[name]
            if movable.runner is not None:
                self._ranges[name].restore()
                return
            assert self._places is not None, "introduced where weights_memory is bounded"
            place = self._places.range(movable.weight_bytes)
            try:
                movable.arrive(self._load(movable.spec, place))
            except BaseException:
                runner = self._runners.pop(name, None)
                if runner is not None:
                    self._forget(runner)
                del runner
                gc.collect()
                place.close()
                raise
            self._ranges[name] = place

    def evict(self, name: str) -> None:
        with self._loading, self._noticing_loss():
            if name in self._ranges:
                self._lanes.wait(name)
                self._ranges[name].evict()

    def keep_weights(self, shelf: Shelf) -> None:
        if self._places is None:
            raise DeviceError(f"{self.name} has no weights that come and go: its weights_memory is 0")
        self._places.shelf = shelf

    # ------------------------------------------------------------------------------------------------------------------

    def telemetry(self) -> Telemetry:
        with self._counting:
            return Telemetry(self.pool.capacity, self.pool.resident, self._busy_seconds, self._jobs)

    def close(self) -> None:
        self._undo.close()

    def _drop_all(self) -> None:
        self._lanes.end_lanes()
        for runner in self._runners.values():
            runner.forget()
        self._runners.clear()
        self._movable.clear()
        self._give_back()
        for place in self._ranges.values():
            place.close()
        self._ranges.clear()


@contextlib.contextmanager
def _opening(name: DeviceName) -> Iterator[None]:
    """torch's own errors (RuntimeError) become DeviceError, too."""
    try:
        yield
    except RuntimeError as error:
        raise DeviceError(f"{name} cannot be opened: {error}") from error


def _forget_frames(error: BaseException | None) -> None:
    """What the functions that raised it held on to, tensors among it, would live as long as the error does."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__

"""A model that is known to a device before its weights are there, and while they are away: what can be said of it, and
the runner that stands in its place.
"""

import threading
from concurrent.futures import Future
from dataclasses import dataclass

from forebay.gpu.errors import ModelLoadError, StepError
from forebay.gpu.pool import KVPool, KVShape
from forebay.gpu.runner import Runner, blocks_of_pool, context_limit
from forebay.gpu.sequences import OpenSequences
from forebay.gpu.weights import dtype_of, kv_shape, read_empty_model, require_loadable
from forebay.transport.messages.common import ModelSpec
from forebay.transport.messages.steps import CloseSequence, OpenSequence, StepDone, StepPlan


@dataclass(frozen=True)
class Description:
    """What config.json says of a model. `weight_bytes`: of its parameters, which are so many `tensors`, in
    the type in which it is served."""

    shape: KVShape
    vocabulary: int
    max_positions: int
    weight_bytes: int
    tensors: int


def describe(spec: ModelSpec) -> Description:
    """Reads no weights. Raises ModelLoadError for what can be seen to be unloadable without them."""
    require_loadable(spec)
    dtype = dtype_of(spec)
    model = read_empty_model(spec, dtype)
    config = model.config
    parameters = list(model.parameters())
    size = sum(parameter.numel() for parameter in parameters) * dtype.itemsize
    return Description(
        kv_shape(config, dtype), config.vocab_size, config.max_position_embeddings, size, len(parameters)
    )  # fmt: skip


def require_room(spec: ModelSpec, weight_bytes: int, budget: int) -> None:
    """Raises ModelLoadError for weights that the device can never hold."""
    if weight_bytes > budget:
        raise ModelLoadError(
            spec.name,
            spec.path,
            f"its weights take {weight_bytes} bytes, the device's weights_memory is {budget}: raise it",
        )


class MovableRunner:
    """A Runner from the beginning, though the one that computes is made when the weights come first: sequences may be
    opened and closed before. `weight_bytes` is what the weights take on the device."""

    def __init__(self, spec: ModelSpec, described: Description, pool: KVPool, weight_bytes: int) -> None:
        self.spec = spec
        self.shape = described.shape
        self.block_bytes = self.shape.block_bytes
        self.blocks = blocks_of_pool(spec, self.shape, pool)
        self.max_context = context_limit(spec, described.max_positions, self.blocks)
        self.weight_bytes = weight_bytes
        self._lock = threading.Lock()
        self._checks = OpenSequences(spec.name, described.vocabulary, self.max_context, self.blocks)
        self._early: dict[int, OpenSequence] = {}
        self._runner: Runner | None = None

    @property
    def runner(self) -> Runner | None:
        """The one that computes, once there is one."""
        return self._runner

    def arrive(self, runner: Runner) -> None:
        """The one that computes is made; all that was opened is opened there. Raises ModelLoadError where it is not
        what the configuration promised."""
        if (runner.block_bytes, runner.blocks) != (self.block_bytes, self.blocks):
            raise ModelLoadError(
                self.spec.name,
                self.spec.path,
                f"its weights have KV blocks of {runner.block_bytes} bytes, its configuration says {self.block_bytes}",
            )
        with self._lock:
            for message in self._early.values():
                runner.open(message)
            self._early.clear()
            self._runner = runner

    def open(self, message: OpenSequence) -> None:
        with self._lock:
            if self._runner is not None:
                return self._runner.open(message)
            self._checks.open(message)
            self._early[message.sequence] = message

    def close(self, message: CloseSequence) -> None:
        with self._lock:
            if self._runner is not None:
                return self._runner.close(message)
            self._checks.close(message)
            del self._early[message.sequence]

    def launch(self, plan: StepPlan) -> "Future[StepDone]":
        if self._runner is None:
            future: Future[StepDone] = Future()
            future.set_exception(StepError(f"step {plan.step} of model {self.spec.name!r}: its weights are away"))
            return future
        return self._runner.launch(plan)

    def forget(self) -> None:
        with self._lock:
            if self._runner is not None:
                self._runner.forget()
            self._early.clear()
            self._checks.clear()

"""Captured steps: what a step launches, recorded once and replayed over the addresses that it was captured with; and
which steps of a lane that is done for.

A replay costs the host one call instead of hundreds of launches. What changes from step to step lies in arrays at fixed
places, among them the attention's plan; how many programs each kernel has is part of the graph.
"""

import contextlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forebay.gpu.cuda_mixed import GraphShapes
from forebay.gpu.cuda_model import ModelOnDevice
from forebay.gpu.errors import DeviceError
from forebay.transport.messages.steps import LaneKind

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Rows of the captured decode steps, as far as a model's `max_sequences` goes."""

PREFILL_DRAWS = 16
"""At most so many rows sample in the captured steps of the prefill lane: further logits would take memory there."""


@dataclass(frozen=True)
class Captures:
    """Which steps of a lane are captured: decode steps of so many rows, mixed ones of these shapes."""

    decodes: tuple[int, ...]
    mixed: GraphShapes | None

    @classmethod
    def of(cls, shared: ModelOnDevice, kind: LaneKind) -> "Captures":
        """For a lane. A prefill lane has no decode steps."""
        if not shared.model.graphs:
            return cls((), None)
        rows, draws = shared.max_sequences, shared.max_sequences
        decodes = [bucket for bucket in BUCKETS if bucket < rows] + [rows]
        if kind == "prefill":
            decodes, draws = [], min(rows, PREFILL_DRAWS)
        shapes = GraphShapes(max(shared.step_tokens, rows), draws, shared.attention.shape.group)
        return cls(tuple(bucket for bucket in decodes if bucket <= BUCKETS[-1]), shapes)

    def float_bytes(self, shared: ModelOnDevice) -> int:
        """The memory that a lane has for attention."""
        plans = self.mixed.plans if self.mixed else ()
        shape = shared.attention.shape
        return shape.float_workspace_bytes(shared.processors, max(self.decodes, default=0), plans)


@dataclass(frozen=True, eq=False)
class _Captured:
    """`info` is that of the attention's plans, which has to be the same for every step that replays the graph."""

    graph: torch.cuda.CUDAGraph
    info: list[int]


class StepGraphs:
    """Those of one lane, whose results lie in the same memory: one step of a lane runs at a time. That memory belongs
    to a stream, so all are captured on the same one as far as possible, the largest first: smaller ones need no more
    then."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, _Captured] = {}
        self._memory: Any = None

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    @property
    def held(self) -> list[Hashable]:
        """Of what was captured so far."""
        return list(self._graphs)

    def capture(
        self, key: Hashable, info: Sequence[int], launches: Callable[[], None], stream: torch.cuda.Stream | None = None
    ) -> None:
        """Records what `launches` launches, which is not run. It must have run before: kernels are built and libraries
        make up their minds then. Without `stream` on the current one: on the SMs that it has."""
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            self._graphs[key] = _Captured(captured(self._memory, launches), list(info))

    def replay(self, key: Hashable, info: Sequence[int]) -> None:
        """Queues a captured step. Raises DeviceError where its plan is not the captured one's."""
        found = self._graphs[key]
        if list(info) != found.info:
            raise DeviceError(
                f"the attention's plan for {key} changed from {found.info} to {list(info)}: the captured step cannot "
                f"be used for it; this version of FlashInfer is not supported"
            )
        found.graph.replay()


def captured(memory: Any, launches: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """In the current stream, with results in the pool `memory`."""
    # cuBLAS' memory for this thread and stream outlives the graph, so it must not come from the graph's.
    torch.cuda.current_blas_handle()
    graph = torch.cuda.CUDAGraph()
    # Other threads may call what a capture forbids: it concerns this thread alone.
    graph.capture_begin(pool=memory, capture_error_mode="thread_local")
    try:
        launches()
    except BaseException:
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        raise
    graph.capture_end()
    return graph

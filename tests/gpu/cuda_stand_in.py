"""A CUDA device to try the host's part of the engine without one: the same runner, lanes and steps over plain torch.

What stands in keeps the rules: kernels see only what was staged for the device, a graph replays its launches over the
addresses that it was captured with, and everything of a stream happens in order (here: at once).
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from forebay.gpu.cuda_attention import AttentionShape, Pages
from forebay.gpu.cuda_draws import BARRED, IGNORE_END, DrawSettings
from forebay.gpu.cuda_lane import CudaLane
from forebay.gpu.cuda_model import LastTokens, ModelOnDevice
from forebay.gpu.cuda_runner import CudaRunner
from forebay.gpu.cuda_step import FastModel
from forebay.gpu.decoder import fast_shape
from forebay.gpu.decoder_weights import merged_weights, on_device
from forebay.gpu.pool import KVPool
from forebay.gpu.runner import blocks_of_pool, context_limit
from forebay.gpu.torch_operators import TorchOperators, rotate_and_write
from forebay.gpu.weights import end_of_sequence, read_model
from forebay.transport.messages.common import ModelSpec
from forebay.transport.messages.steps import LaneKind

CPU = torch.device("cpu")


class Event:
    def __init__(self, **_: bool) -> None:
        self._at = 0.0

    def record(self, stream: object = None) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: "Event") -> float:
        return (other._at - self._at) * 1e3


class Stream:
    def wait_event(self, event: Event) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Graph:
    captured = 0

    def __init__(self, memory: object, launches: Callable[[], None]) -> None:
        Graph.captured += 1
        self._launches = launches

    def replay(self) -> None:
        self._launches()


class Attention:
    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        self.planned: list[tuple[bool, int]] = []

    def plan(
        self, queries: Any, starts: Any, lengths: Any, workspace: Any, pinned: torch.Tensor, *, graph: bool,
        room: int | None = None,
    ) -> Sequence[int]:  # fmt: skip
        there = int(queries[-1])
        assert len(pinned) == len(workspace.plan) >= self.shape.plan_bytes(room or there, len(lengths), 132)
        assert np.array_equal(-(-lengths // 16), np.diff(starts))
        if room is not None:
            assert graph
            assert max(there, len(lengths)) <= room
            assert len(workspace.floats) >= self.shape.float_workspace_bytes(132, 0, [(room, len(lengths))])
        elif graph:
            assert np.array_equal(queries, np.arange(len(lengths) + 1))
        self.planned.append((graph, len(lengths)))
        return [graph, room or -1, len(lengths)] if graph else [there, int(starts[-1])]

    def run(
        self,
        info: Any,
        queries: torch.Tensor,
        cache: torch.Tensor,
        pages: Pages,
        workspace: Any,
        *,
        causal: bool,
        scale: float | None = None,
    ) -> torch.Tensor:
        out = torch.full_like(queries, torch.nan)
        for i in range(len(pages.starts) - 1):
            begin, end = int(pages.queries[i]), int(pages.queries[i + 1])
            if begin == end:
                continue
            blocks = pages.indices[int(pages.starts[i]) : int(pages.starts[i + 1])].long()
            length = 16 * (len(blocks) - 1) + int(pages.last_tokens[i])
            keys, values = (cache[blocks, side].flatten(0, 1)[:length].transpose(0, 1) for side in (0, 1))
            mask = torch.ones(end - begin, length, dtype=torch.bool)
            if causal:
                mask = mask.tril(length - (end - begin))
            out[begin:end] = scaled_dot_product_attention(
                queries[begin:end].transpose(0, 1).unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0),
                attn_mask=mask, scale=scale or self.shape.scale, enable_gqa=True,
            )[0].transpose(0, 1)  # fmt: skip
        return out


class Sampler:
    """Greedy draws only."""

    def __init__(self, vocabulary: int, ends: frozenset[int], device: torch.device, max_rows: int) -> None:
        self._ends = torch.tensor(sorted(ends), dtype=torch.int32)
        self.prepare = DrawSettings().prepare

    def run_greedy(self, logits: torch.Tensor, settings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flags = settings[3, : len(logits)]
        finite = logits.isfinite().all(-1)
        logits = logits.clone()
        logits[:, self._ends.long()] += torch.where((flags & BARRED > 0).unsqueeze(1), -torch.inf, 0.0)
        tokens = torch.where(finite, logits.argmax(-1), 0).int()
        ended = torch.isin(tokens, self._ends) & (flags & IGNORE_END == 0)
        return tokens, torch.where(finite, ended.byte(), 2).byte()

    run = run_greedy


def rope_and_append(
    qkv: torch.Tensor, queries: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor, cache: torch.Tensor, *, heads: int, kv_heads: int, head_size: int, q_norm: Any, k_norm: Any,
    eps: float,
) -> None:  # fmt: skip
    sizes = (heads, kv_heads, head_size)
    queries.copy_(rotate_and_write(qkv, positions.long(), rows, cos, sin, cache, sizes, (q_norm, k_norm), eps))


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """Puts the stand-ins in the places of what needs a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.Event", Event)
        patch.setattr("torch.cuda.current_stream", lambda device: Stream())
        patch.setattr("torch.cuda.set_device", lambda device: None)
        patch.setattr("torch.cuda.stream", lambda stream: contextlib.nullcontext())
        patch.setattr("torch.cuda.graph_pool_handle", lambda: None)
        patch.setattr("forebay.gpu.cuda_staging.pinned", lambda size: torch.full((size,), 255, dtype=torch.uint8))
        patch.setattr("forebay.gpu.cuda_stepper.DeviceSampler", Sampler)
        patch.setattr("forebay.gpu.cuda_step.CudaOperators", TorchOperators)
        patch.setattr("forebay.gpu.cuda_step.rope_and_append", rope_and_append)
        patch.setattr("forebay.gpu.cuda_graphs.captured", Graph)
        yield


class StandIn:
    """A device with one pool. Its models are float32, and their tokens those of `generate`."""

    def __init__(self, memory: int, slab_bytes: int) -> None:
        self.pool = KVPool(memory, slab_bytes)
        self.lanes: dict[str, CudaLane] = {}
        self.seconds: list[float] = []
        self.streams = 0

    def load(self, spec: ModelSpec, lanes: Sequence[LaneKind] = ("mixed",)) -> CudaRunner:
        loaded = read_model(spec, torch.float32)
        shape = fast_shape(loaded.config)
        assert shape is not None
        ends = end_of_sequence(loaded)
        kept = shape.kv_shape(torch.float32)
        blocks = blocks_of_pool(spec, kept, self.pool)
        view = self.pool.view(kept)
        attention: Any = Attention(
            AttentionShape(shape.heads, shape.kv_heads, shape.head_size, torch.float32, shape.head_size**-0.5)
        )
        shared = ModelOnDevice(
            spec.name, FastModel(merged_weights(loaded, shape, on_device(CPU), 512)), attention,
            [view[:, layer] for layer in range(shape.layers)], LastTokens(64, CPU), shape.vocabulary, ends,
            context_limit(spec, 512, blocks), spec.max_sequences, spec.step_tokens, 132,
        )  # fmt: skip
        runner = CudaRunner(spec, kept, blocks, shared, self, lambda error: error, self.seconds.append)
        for kind in lanes:
            runner.prepare(kind)
        return runner

    def lane(self, kind: LaneKind, model: str) -> CudaLane:
        key = f"decode {model}" if kind == "decode" else kind
        if key not in self.lanes:
            self.lanes[key] = CudaLane(key, CPU, lambda share: self.stream(kind, share))
        return self.lanes[key]

    def stream(self, kind: LaneKind, share: int = 0) -> Any:
        self.streams += 1
        return Stream()

    def give_back(self, kind: LaneKind, stream: Any) -> None:
        self.streams -= 1

    def close(self) -> None:
        for lane in self.lanes.values():
            lane.close()
        self.pool.close()


def spec_of(folder: Path, name: str = "m", **fields: Any) -> ModelSpec:
    return ModelSpec(name, str(folder), **fields)

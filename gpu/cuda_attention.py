"""Attention over the paged pool on CUDA: FlashInfer's FA2 kernel, for prefill, decode and steps with both.

One module serves all: decode on tensor cores is a prefill of one query a sequence. Its functions are called without
FlashInfer's wrapper classes, which keep one pinned buffer and so cannot plan a step while the one before it is copied.

The kernel reads keys and values up to a sequence's length only; what lies behind in its last block is masked, and
values there are taken as zero, so blocks need not be cleared before use (seen in prefill.cuh of 0.6.13, and tested).
"""

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from forebay.gpu.cuda_linear import dependent_launch
from forebay.gpu.errors import DeviceError
from forebay.transport.messages.steps import BLOCK_TOKENS

HEAD_SIZES = (64, 128, 256)

_NO_POSITIONS, _CAUSAL, _ALL, _NHD = 0, 1, 0, 0
"""FlashInfer's numbers for: no position encoding of its own; causal mask; no mask; tokens before heads."""

_TILES = (16, 64, 128)
"""Rows of queries (times the heads that share a KV head) of one program of the FA2 kernel."""

_BLOCKS_PER_SM = 2
"""FlashInfer splits a step's keys among at most so many programs of an SM (PrefillPlan in scheduler.cuh)."""

_BUILD = threading.Lock()


@dataclass(frozen=True)
class AttentionShape:
    """What the kernel is built for, and `scale`, by which scores are multiplied."""

    heads: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    scale: float

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    def float_workspace_bytes(self, processors: int, decode_rows: int, graphs: Iterable[tuple[int, int]] = ()) -> int:
        """What a step's partial results need at most, in a graph of up to `decode_rows` rows, in graphs of so many
        tokens and sequences, or in a step of any size launch by launch (PrefillPlan in scheduler.cuh: one float a query
        head, row and element, and one more a row)."""
        split = _BLOCKS_PER_SM * processors // self.kv_heads
        rows = split * _TILES[-1]
        for tokens, sequences in ((decode_rows, decode_rows), *graphs):
            # PrefillSplitQOKVIndptr there: the longest sequence that there could be decides on the tiles.
            tile = _tile((tokens - sequences + 1) * self.group, self.head_size)
            programs = -(-tokens * self.group // tile) + sequences - 1
            rows = max(rows, max(split, programs) * tile)
        return self.heads * rows * (self.head_size + 1) * 4 + (1 << 16)

    def plan_bytes(self, tokens: int, sequences: int, processors: int) -> int:
        """What the plan of a step of so many tokens of so many sequences needs at most."""
        programs = -(-tokens * self.group // _TILES[0]) + sequences + _BLOCKS_PER_SM * processors
        return 13 * programs + 4 * (tokens + sequences + 2) + 4096


def _tile(packed: int, head_size: int) -> int:
    """FA2DetermineCtaTileQ (utils.cuh) for so many rows."""
    return _TILES[0] if packed <= 16 else _TILES[2] if packed > 64 and head_size < 256 else _TILES[1]


@dataclass(frozen=True, eq=False)
class Workspace:
    """Memory of the kernel: `floats` may be shared by all that runs on one stream, `plan` belongs to one plan, which
    the stream copies there from pinned memory."""

    floats: torch.Tensor
    plan: torch.Tensor


@dataclass(frozen=True, eq=False)
class Pages:
    """Which blocks the sequences of a batch have, on the device, all int32: those of sequence i are `indices` from
    `starts[i]` to `starts[i + 1]`, the last of which holds `last_tokens[i]`. Its queries are the rows from `queries[i]`
    to `queries[i + 1]`."""

    queries: torch.Tensor
    starts: torch.Tensor
    last_tokens: torch.Tensor
    indices: torch.Tensor


class PagedAttention:
    """Builds the kernel if need be, which takes minutes once: the result is kept under $FLASHINFER_WORKSPACE_BASE.
    Raises DeviceError where FlashInfer is missing or the shape is none of its."""

    def __init__(self, shape: AttentionShape, processors: int) -> None:
        if shape.head_size not in HEAD_SIZES:
            sizes = ", ".join(map(str, HEAD_SIZES))
            raise DeviceError(
                f"attention with heads of {shape.head_size} elements is not supported on cuda: {sizes} are"
            )
        self.shape = shape
        self._most_split = _BLOCKS_PER_SM * processors // shape.kv_heads
        self._module = _module(shape.dtype, shape.head_size)

    def plan(
        self,
        queries: NDArray[np.int32],
        starts: NDArray[np.int32],
        lengths: NDArray[np.int32],
        workspace: Workspace,
        pinned: torch.Tensor,
        *,
        graph: bool,
        room: int | None = None,
    ) -> Sequence[int]:
        """Divides a batch among the SMs; on the host, from arrays of the host: `queries` and `starts` as in Pages,
        `lengths` in tokens. The current stream copies the plan from `pinned`, which must not change until then.
        Sequences may have no queries, and no blocks then.

        With `graph` a captured kernel takes later plans: with `room` they depend on the number of sequences and on
        `room` alone, which is how many queries there may be together, and no less than there are sequences; without it
        every sequence has one query, and they depend on the number of sequences."""
        rows = len(lengths)
        # With more rows than that keys are never split, so an ordinary plan has always the same numbers, and is better
        # than a graph's, which has up to a quarter of idle programs and merges what was not split.
        padded = graph and (room is not None or rows <= self._most_split)
        shape = self.shape
        info: Sequence[int] = self._module.plan(
            workspace.floats,
            workspace.plan,
            pinned,
            torch.from_numpy(queries),
            torch.from_numpy(starts),
            torch.from_numpy(lengths),
            int(queries[-1]) if room is None else room,
            rows,
            shape.heads,
            shape.kv_heads,
            BLOCK_TOKENS,
            padded,
            shape.head_size,
            shape.head_size,
            room is not None or not graph,  # causal
            -1,  # no window
            -1,  # no fixed size of splits
            False,  # splits are allowed
            0,
        )
        return info

    def run(
        self,
        info: Sequence[int],
        queries: torch.Tensor,
        cache: torch.Tensor,
        pages: Pages,
        workspace: Workspace,
        *,
        causal: bool,
        scale: float | None = None,
    ) -> torch.Tensor:
        """`queries` [T, heads, head_size] over one layer's `cache` [blocks, 2, 16, kv_heads, head_size]: [T, heads,
        head_size]. Without `causal` every query sees all of its sequence. `scale` other than the shape's."""
        out = torch.empty_like(queries)
        self._module.paged_run(
            workspace.floats,
            workspace.plan,
            info,
            queries,
            cache[:, 0],
            cache[:, 1],
            pages.queries,
            pages.starts,
            pages.indices,
            pages.last_tokens,
            out,
            None,  # no log-sum-exp
            _CAUSAL if causal else _ALL,
            _NHD,
            -1,
            dependent_launch(queries.device),
            None,
            None,
            None,
            None,
            None,
            None,
            0.0,  # no cap on scores
            self.shape.scale if scale is None else scale,
            None,
            None,
            None,
            1.0,
            1.0,
            0,
            0,
        )
        return out


def _module(dtype: torch.dtype, head_size: int) -> Any:
    try:
        from flashinfer.jit.attention import gen_batch_prefill_module
        from flashinfer.prefill import get_batch_prefill_module
    except ImportError as error:
        raise DeviceError(f"models on cuda need the package flashinfer-python ({error}); install it") from error
    kind = (dtype, dtype, dtype, torch.int32, head_size, head_size, _NO_POSITIONS, False, False, False)
    with _BUILD:
        log = structlog.get_logger()
        built = gen_batch_prefill_module("fa2", *kind).is_compiled
        name = str(dtype).removeprefix("torch.")
        if not built:
            log.info("building the attention kernel, once; it is kept", head_size=head_size, dtype=name)
        begin = time.perf_counter()
        module = get_batch_prefill_module("fa2", *kind)
        if not built:
            log.info("built the attention kernel", seconds=round(time.perf_counter() - begin, 1))
        return module

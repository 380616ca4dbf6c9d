"""Loads a model folder onto a CUDA device: the fast families as our own forward pass, any other decoder as transformers
has it. What would be computed wrongly is refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from forebay.gpu.cuda_attention import AttentionShape, PagedAttention, Pages, Workspace
from forebay.gpu.cuda_model import Model
from forebay.gpu.cuda_staging import pinned
from forebay.gpu.cuda_step import ATTENTION_NAME, CudaStep, FastModel, Planned, TransformersModel
from forebay.gpu.decoder import DecoderShape, fast_shape
from forebay.gpu.decoder_weights import Allocate, made_up_weights, merged_weights
from forebay.gpu.errors import DeviceError, ModelLoadError
from forebay.gpu.pool import KVShape
from forebay.gpu.probing import PROBE_TOKENS, probe, probe_cuts
from forebay.gpu.weights import (
    dtype_of,
    end_of_sequence,
    kv_shape,
    read_config,
    read_empty_model,
    read_model,
    refusal,
    require_context,
)
from forebay.transport.messages.common import ModelSpec
from forebay.transport.messages.steps import BLOCK_TOKENS


@dataclass(frozen=True, eq=False)
class CudaWeights:
    """A loaded model. `max_positions` in tokens; `config` as transformers reads it."""

    model: Model
    attention: PagedAttention
    shape: KVShape
    vocabulary: int
    max_positions: int
    end_of_sequence: frozenset[int]
    config: Any


def is_fast(spec: ModelSpec) -> bool:
    """Whether our own forward pass runs it. Raises ModelLoadError."""
    return fast_shape(read_config(spec)) is not None


def rotary_bytes(spec: ModelSpec) -> int:
    """What the rotary tables of a fast family take beside its parameters. Raises ModelLoadError."""
    config = read_config(spec)
    return 8 * int(config.max_position_embeddings) * kv_shape(config, dtype_of(spec)).head_size


def weight_bytes(spec: ModelSpec) -> int:
    """What the parameters take on a device, from config.json alone. Raises ModelLoadError."""
    dtype = dtype_of(spec)
    empty = read_empty_model(spec, dtype)
    return sum(int(parameter.numel()) for parameter in empty.parameters()) * int(dtype.itemsize)


def load_on_cuda(spec: ModelSpec, device: torch.device, allocate: Allocate) -> CudaWeights:
    """Loads without touching the network; `allocate` makes the tensors of a fast family's weights. Raises
    ModelLoadError, torch.OutOfMemoryError."""
    refuse = refusal(spec)
    dtype = dtype_of(spec)
    if dtype not in (torch.bfloat16, torch.float16):
        raise refuse(f"dtype {spec.dtype!r} is not supported on {device}; use bfloat16 or float16")
    config = read_config(spec)
    require_context(spec, config)
    fast = fast_shape(config)
    kept = kv_shape(config, dtype)
    heads = config.num_attention_heads
    try:
        attention = PagedAttention(
            AttentionShape(heads, kept.kv_heads, kept.head_size, dtype, scale=kept.head_size**-0.5),
            torch.cuda.get_device_properties(device).multi_processor_count,
        )
    except DeviceError as error:
        raise refuse(str(error)) from error
    with torch.inference_mode():
        model: Model
        if fast is None:
            model, ends = _other(spec, kept, dtype, device, attention, refuse)
        else:
            model, ends = _fast(spec, fast, dtype, allocate)
            _require_finite(model, kept, config, attention, device, refuse)
    torch.cuda.current_stream(device).synchronize()
    return CudaWeights(model, attention, kept, config.vocab_size, config.max_position_embeddings, ends, config)


def _fast(
    spec: ModelSpec, shape: DecoderShape, dtype: torch.dtype, allocate: Allocate
) -> tuple[FastModel, frozenset[int]]:
    if spec.load_format == "dummy":
        empty = read_empty_model(spec, dtype)
        positions = empty.config.max_position_embeddings
        return FastModel(made_up_weights(empty, shape, dtype, allocate, positions)), end_of_sequence(empty)
    loaded = read_model(spec, dtype)
    ends = end_of_sequence(loaded)
    return FastModel(merged_weights(loaded, shape, allocate, loaded.config.max_position_embeddings)), ends


def _other(
    spec: ModelSpec,
    shape: KVShape,
    dtype: torch.dtype,
    device: torch.device,
    attention: PagedAttention,
    refuse: Callable[[str], ModelLoadError],
) -> tuple[TransformersModel, frozenset[int]]:
    loaded = read_model(spec, dtype).to(device)
    model = TransformersModel(loaded)

    def run(tokens: torch.Tensor) -> tuple[torch.Tensor, dict[int, frozenset[str]]]:
        loaded.set_attn_implementation(ATTENTION_NAME)
        seen: dict[int, frozenset[str]] = {}
        return probe_logits(model, shape, attention, tokens[0].int(), seen), seen

    probe(loaded, shape, run, refuse)
    return model, end_of_sequence(loaded)


def _require_finite(
    model: Model,
    shape: KVShape,
    config: Any,
    attention: PagedAttention,
    device: torch.device,
    refuse: Callable[[str], ModelLoadError],
) -> None:
    """Runs a short text, which also builds the kernels."""
    length = min(PROBE_TOKENS, config.max_position_embeddings)
    tokens = torch.arange(1, length + 1, device=device).mul_(7919).remainder_(config.vocab_size).int()
    logits = probe_logits(model, shape, attention, tokens)
    if not bool(torch.isfinite(logits).all()):
        dtype = str(shape.dtype).removeprefix("torch.")
        other = "float16" if shape.dtype == torch.bfloat16 else "bfloat16"
        raise refuse(f"its logits are not finite in {dtype}; try {other}, or look for damage in its weights")


def probe_logits(
    model: Model,
    shape: KVShape,
    attention: PagedAttention,
    tokens: torch.Tensor,
    seen: dict[int, frozenset[str]] | None = None,
) -> torch.Tensor:
    """Logits [T, vocabulary] of one text `tokens` int32 [T], cut as `probe_cuts` does, over blocks of its own. For
    `seen` see CudaStep. Synchronises."""
    device, length = tokens.device, len(tokens)
    blocks = -(-length // BLOCK_TOKENS)
    pool = torch.zeros(blocks, *shape.block, dtype=shape.dtype, device=device)
    layers = [pool[:, layer] for layer in range(shape.layers)]
    table = np.arange(blocks, dtype=np.int32)[::-1].copy()
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    bytes_needed = attention.shape.plan_bytes(length, 1, processors)
    floats = torch.empty(attention.shape.float_workspace_bytes(processors, 0), dtype=torch.uint8, device=device)
    workspace = Workspace(floats, torch.empty(bytes_needed, dtype=torch.uint8, device=device))
    host = pinned(bytes_needed)
    logits = []
    for start, end in probe_cuts(length):
        used = -(-end // BLOCK_TOKENS)
        queries, starts, lengths = (np.array(values, np.int32) for values in ([0, end - start], [0, used], [end]))
        info: Sequence[int] = attention.plan(queries, starts, lengths, workspace, host, graph=False)
        last = np.array([(end - 1) % BLOCK_TOKENS + 1], np.int32)
        pages = Pages(*(torch.from_numpy(array).to(device) for array in (queries, starts, last, table[:used])))
        positions = np.arange(start, end)
        rows = table[positions // BLOCK_TOKENS].astype(np.int64) * BLOCK_TOKENS + positions % BLOCK_TOKENS
        step = CudaStep(
            positions=torch.from_numpy(positions.astype(np.int32)).to(device),
            rows=torch.from_numpy(rows).to(device),
            kept=None,
            layers=layers,
            attention=attention,
            planned=Planned(info, pages, workspace, causal=True),
            seen=seen,
        )
        found = model.logits(tokens[start:end], step)
        assert found is not None, "all rows are kept"
        logits.append(found)
        torch.cuda.current_stream(device).synchronize()  # the next plan is written where this one is read from
    return torch.cat(logits)

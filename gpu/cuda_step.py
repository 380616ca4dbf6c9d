"""One packed step on CUDA as forward passes see it: where tokens are, where keys go, and attention over the pool."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from forebay.gpu.cuda_attention import PagedAttention, Pages, Workspace
from forebay.gpu.cuda_kernels import rope_and_append
from forebay.gpu.cuda_operators import CudaOperators
from forebay.gpu.decoder import DecoderWeights, forward
from forebay.transport.messages.steps import BLOCK_TOKENS

ATTENTION_NAME = "forebay_paged_cuda"


@dataclass(frozen=True, eq=False)
class Planned:
    """A plan of the attention (see PagedAttention.plan) with the pages and the memory that it is for."""

    info: Sequence[int]
    pages: Pages
    workspace: Workspace
    causal: bool


@dataclass(frozen=True, eq=False)
class CudaStep:
    """T tokens: `positions` int32 [T]; `rows` int64 [T], where each token's keys go: block * 16 + offset, -1: nowhere.
    `kept` int64 [n] are the rows that sample, None: all. `layers` are the pool as the model's layers see it, each
    [blocks, 2, 16, kv_heads, head_size]. `planned` is for all rows, `planned_kept` for those kept, where they differ.
    With `seen` each layer of a model of transformers leaves there the names of its attention's further arguments."""

    positions: torch.Tensor
    rows: torch.Tensor
    kept: torch.Tensor | None
    layers: Sequence[torch.Tensor]
    attention: PagedAttention
    planned: Planned
    planned_kept: Planned | None = None
    seen: dict[int, frozenset[str]] | None = None

    def append(self, layer: int, qkv: torch.Tensor, weights: DecoderWeights) -> torch.Tensor:
        shape, here = weights.shape, weights.layers[layer]
        queries = torch.empty(len(qkv), shape.heads, shape.head_size, dtype=qkv.dtype, device=qkv.device)
        rope_and_append(
            qkv, queries, self.positions, self.rows, weights.cos, weights.sin, self.layers[layer],
            heads=shape.heads, kv_heads=shape.kv_heads, head_size=shape.head_size,
            q_norm=here.query_norm, k_norm=here.key_norm, eps=shape.epsilon,
        )  # fmt: skip
        return queries

    def attend(self, layer: int, queries: torch.Tensor, kept: bool, scale: float | None = None) -> torch.Tensor:
        planned = self.planned_kept if kept else self.planned
        assert planned is not None, "a step whose rows are not all kept has a plan for those that are"
        cache = self.layers[layer]
        out = self.attention.run(
            planned.info, queries, cache, planned.pages, planned.workspace, causal=planned.causal, scale=scale
        )
        return out.flatten(1)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keys and values [T, kv_heads, head_size] that are rotated already, or need it not, to the pool."""
        cache = self.layers[layer]
        blocks, offsets = self.rows // BLOCK_TOKENS, self.rows % BLOCK_TOKENS
        cache[:, 0].index_put_((blocks, offsets), keys)
        cache[:, 1].index_put_((blocks, offsets), values)


class FastModel:
    """A model of the fast families. `graphs`: its decode steps can be captured."""

    graphs = True

    def __init__(self, weights: DecoderWeights) -> None:
        self._weights = weights
        self._operators = CudaOperators()

    def logits(self, tokens: torch.Tensor, step: CudaStep) -> torch.Tensor | None:
        """[n, vocabulary] of the rows that sample, None if there are none. `tokens` int32 [T]."""
        return forward(self._weights, tokens, step, self._operators)


class TransformersModel:
    """Any other decoder, as transformers has it, with our attention plugged in."""

    graphs = False

    def __init__(self, model: Any) -> None:
        self._model = model

    def logits(self, tokens: torch.Tensor, step: CudaStep) -> torch.Tensor | None:
        """As FastModel's."""
        sampled = step.kept is None or len(step.kept) > 0
        out = (self._model if sampled else self._model.base_model)(
            input_ids=tokens.long().unsqueeze(0),
            position_ids=step.positions.long().unsqueeze(0),
            use_cache=False,
            paged=step,
            **({"logits_to_keep": step.kept} if sampled and step.kept is not None else {}),
        )
        return out.logits[0] if sampled else None


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: CudaStep,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """`query` [1, heads, T, head_size], `key` and `value` [1, kv_heads, T, head_size] -> [1, T, heads, head_size]."""
    layer: int = module.layer_idx
    if paged.seen is not None:
        given = (name for name, argument in others.items() if argument is not None and argument is not False)
        paged.seen[layer] = frozenset(given)
    paged.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    queries = query[0].transpose(0, 1).contiguous()
    out = paged.attend(layer, queries, False, scaling)
    return out.view(queries.shape).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)

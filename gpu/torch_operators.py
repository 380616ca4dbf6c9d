"""The operators of gpu/decoder.py in plain torch, for any device: what the fused kernels are checked against."""

from dataclasses import dataclass

import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from forebay.gpu.decoder import DecoderWeights


class TorchOperators:
    def norm(self, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        wide = hidden.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(hidden.dtype) * weight

    def norm_linear(
        self,
        hidden: torch.Tensor,
        norm: torch.Tensor,
        epsilon: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return linear(self.norm(hidden, norm, epsilon), weight, bias)

    def norm_gate_up(
        self, hidden: torch.Tensor, norm: torch.Tensor, epsilon: float, weight: torch.Tensor
    ) -> torch.Tensor:
        gate, up = linear(self.norm(hidden, norm, epsilon), weight).chunk(2, -1)
        return silu(gate) * up

    def add_linear(self, hidden: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return hidden + linear(rows, weight)


@dataclass(frozen=True, eq=False)
class TorchShare:
    """One sequence's rows of a step: `count` of them, of which the last is position `length` - 1; `blocks` [pages]."""

    count: int
    length: int
    blocks: torch.Tensor


@dataclass(frozen=True, eq=False)
class TorchStep:
    """A packed batch over `pool` [blocks, layers, 2, 16, kv_heads, head_size]. `positions` and `rows` [T]: where each
    token is in its text, and where its keys go (block * 16 + offset; -1: nowhere). Rows are kept if they are a share's
    last and listed in `kept` [n], in the shares' order; None keeps all."""

    pool: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    shares: tuple[TorchShare, ...]
    kept: torch.Tensor | None

    def append(self, layer: int, qkv: torch.Tensor, weights: DecoderWeights) -> torch.Tensor:
        shape, here = weights.shape, weights.layers[layer]
        sizes = (shape.heads, shape.kv_heads, shape.head_size)
        norms = (here.query_norm, here.key_norm)
        return rotate_and_write(
            qkv, self.positions, self.rows, weights.cos, weights.sin, self.pool[:, layer], sizes, norms, shape.epsilon
        )

    def attend(self, layer: int, queries: torch.Tensor, kept: bool) -> torch.Tensor:
        cache = self.pool[:, layer]
        kept_rows = set(self.kept.tolist()) if kept and self.kept is not None else None
        parts = []
        first = packed = 0
        for share in self.shares:
            packed += share.count
            if kept_rows is not None and packed - 1 not in kept_rows:
                continue
            count = share.count if kept_rows is None else 1
            pages = cache[share.blocks]
            keys, values = (pages[:, i].flatten(0, 1)[: share.length].transpose(0, 1) for i in (0, 1))
            hidden = torch.arange(share.length, device=queries.device) > torch.arange(
                share.length - count, share.length, device=queries.device
            ).unsqueeze(1)
            mask = torch.zeros(hidden.shape, dtype=queries.dtype, device=queries.device).masked_fill_(
                hidden, -torch.inf
            )
            out = scaled_dot_product_attention(
                queries[first : first + count].transpose(0, 1).unsqueeze(0),
                keys.unsqueeze(0),
                values.unsqueeze(0),
                attn_mask=mask,
                enable_gqa=True,
            )
            parts.append(out[0].transpose(0, 1).flatten(1))
            first += count
        return torch.cat(parts)


def rotate_and_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    sizes: tuple[int, int, int],
    norms: tuple[torch.Tensor | None, torch.Tensor | None],
    epsilon: float,
) -> torch.Tensor:
    """What cuda_kernels.rope_and_append does: the queries [T, heads, head_size], and keys and values in one layer's
    `cache` [blocks, 2, 16, kv_heads, head_size]. `sizes`: heads, kv_heads, head_size."""
    heads, kv_heads, size = sizes
    queries, keys, values = qkv.view(len(qkv), -1, size).split([heads, kv_heads, kv_heads], 1)
    if norms[0] is not None and norms[1] is not None:
        operators = TorchOperators()
        queries, keys = operators.norm(queries, norms[0], epsilon), operators.norm(keys, norms[1], epsilon)
    turn = [table[positions].unsqueeze(1) for table in (cos, sin)]
    queries, keys = _rotated(queries, *turn), _rotated(keys, *turn)
    written = rows >= 0
    blocks, offsets = rows[written] // cache.shape[2], rows[written] % cache.shape[2]
    cache[blocks, 0, offsets] = keys[written]
    cache[blocks, 1, offsets] = values[written]
    return queries


def _rotated(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[T, heads, head_size] turned by [T, 1, head_size], in float32: halves, as Llama has them, not pairs."""
    wide = rows.float()
    first, second = wide.chunk(2, -1)
    return (wide * cos + torch.cat((-second, first), -1) * sin).to(rows.dtype)

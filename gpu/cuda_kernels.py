"""Our own kernels of a forward pass on CUDA; cuda_sampling.py has those that choose tokens."""

import torch

from forebay.gpu.cuda_linear import dependent_launch, linear_small, supports
from forebay.gpu.triton_launch import launch

__all__ = ["linear_small", "rope_and_append", "supports"]

_HEADS_EACH = 8
"""Heads that one program turns: at decode many small programs start at once, at prefill each still moves kilobytes."""


def rope_and_append(
    qkv: torch.Tensor,
    q_out: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_size: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    pdl: bool | None = None,
) -> None:
    """Turns queries and keys to their positions and writes keys and values into the paged cache, in one launch.

    qkv [T, (heads + 2 kv_heads) * head_size], rows of any stride; q_out [T, heads, head_size], contiguous heads; cos
    and sin [max positions, head_size] float32; cache [blocks, 2, block tokens, kv_heads, head_size], one layer of the
    pool, of any strides but the last. positions [T] (int32 or int64) must be within the tables, those of padding too;
    rows [T] int64: block * block tokens + offset, -1 for padding, whose keys and values go nowhere (its query is
    written).
    With q_norm and k_norm [head_size] each head's query and key first gets an RMS norm of `eps` (Qwen3). Arithmetic in
    float32. Synchronises nothing and works under graph capture. Raises ValueError for shapes that do not fit."""
    tokens = qkv.shape[0]
    if (
        qkv.shape[1] != (heads + 2 * kv_heads) * head_size
        or q_out.shape != (tokens, heads, head_size)
        or cache.shape[3:] != (kv_heads, head_size)
        or cos.shape[1] != head_size
        or cos.shape != sin.shape
        or head_size % 2
        or (q_norm is None) != (k_norm is None)
    ):
        raise ValueError(
            f"rope_and_append got qkv {list(qkv.shape)}, q_out {list(q_out.shape)}, cos {list(cos.shape)}, sin "
            f"{list(sin.shape)}, cache {list(cache.shape)} for {heads} heads and {kv_heads} KV heads of {head_size}"
        )
    if (qkv.stride(1), q_out.stride(2), q_out.stride(1), cache.stride(4)) != (1, 1, head_size, 1) or cos.stride() != (
        head_size,
        1,
    ) != sin.stride():
        raise ValueError("rope_and_append needs contiguous heads in qkv, q_out and cache, and contiguous cos and sin")
    if not tokens:
        return
    from forebay.gpu import triton_rope

    dependent = dependent_launch(qkv.device) if pdl is None else pdl
    half = head_size // 2
    launch(
        triton_rope.rope_and_append,
        (tokens, -(-(heads + 2 * kv_heads) // _HEADS_EACH)),
        (
            qkv,
            q_out,
            positions,
            rows,
            cos,
            sin,
            cache,
            cos if q_norm is None else q_norm,
            cos if k_norm is None else k_norm,
        ),
        (eps, qkv.stride(0), q_out.stride(0), *cache.stride()[:4], cos.stride(0)),
        {
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "HALF": half,
            "HALF_PADDED": 1 << (half - 1).bit_length(),
            "HEADS_EACH": _HEADS_EACH,
            "BLOCK_TOKENS": cache.shape[2],
            "NORM": q_norm is not None,
            "PDL": dependent,
        },
        num_warps=2,
        pdl=dependent,
    )

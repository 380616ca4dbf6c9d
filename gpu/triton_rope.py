"""The kernel behind `cuda_kernels.rope_and_append`. Imports Triton: import it only where a kernel is launched."""
# mypy: ignore-errors
# What stands in a kernel is Triton's language, which has no types that Python's checkers know.

import triton
import triton.language as tl


@triton.jit
def rope_and_append(
    qkv,
    q_out,
    positions,
    rows,
    cos,
    sin,
    cache,
    q_norm,
    k_norm,
    eps,
    qkv_stride,
    q_stride,
    block_stride,
    side_stride,
    token_stride,
    head_stride,
    table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    HEADS_EACH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, group of heads). Query, key and value heads are numbered through, as they lie in `qkv`."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_EACH + tl.arange(0, HEADS_EACH)[:, None]
    place = tl.arange(0, HALF_PADDED)[None, :]
    inside = place < HALF
    is_query = head < HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    known = (head < HEADS + 2 * KV_HEADS) & inside
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.load(rows + token)
    position = tl.load(positions + token).to(tl.int64)
    at = qkv + token * qkv_stride + head * (2 * HALF) + place
    low_raw = tl.load(at, known, 0.0)
    high_raw = tl.load(at + HALF, known, 0.0)
    low, high = low_raw.to(tl.float32), high_raw.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + eps)[:, None]
        low_norm = tl.where(is_query, tl.load(q_norm + place, inside, 0.0), tl.load(k_norm + place, inside, 0.0)).to(
            tl.float32
        )
        high_norm = tl.where(
            is_query, tl.load(q_norm + HALF + place, inside, 0.0), tl.load(k_norm + HALF + place, inside, 0.0)
        ).to(tl.float32)
        low, high = low * scale * low_norm, high * scale * high_norm
    angle = position * table_stride + place
    low_cos, high_cos = tl.load(cos + angle, inside, 0.0), tl.load(cos + angle + HALF, inside, 0.0)
    low_sin, high_sin = tl.load(sin + angle, inside, 0.0), tl.load(sin + angle + HALF, inside, 0.0)
    low_turned = (low * low_cos - high * low_sin).to(low_raw.dtype)
    high_turned = (high * high_cos + low * high_sin).to(low_raw.dtype)
    to_query = q_out + token * q_stride + head * (2 * HALF) + place
    tl.store(to_query, low_turned, known & is_query)
    tl.store(to_query + HALF, high_turned, known & is_query)
    # Padding has row -1: its block 0 is an address that is never used.
    kept = known & (row >= 0)
    block = tl.maximum(row, 0) // BLOCK_TOKENS
    offset = tl.maximum(row, 0) % BLOCK_TOKENS
    key_head = tl.where(is_key, head - HEADS, head - HEADS - KV_HEADS)
    side = tl.where(is_value, side_stride, 0)
    to_cache = cache + block * block_stride + side + offset * token_stride + key_head * head_stride + place
    tl.store(to_cache, tl.where(is_value, low_raw, low_turned), kept & (is_key | is_value))
    tl.store(to_cache + HALF, tl.where(is_value, high_raw, high_turned), kept & (is_key | is_value))

"""The kernels behind `cuda_operators`. Imports Triton: import it only where a kernel is launched."""
# mypy: ignore-errors
# What stands in a kernel is Triton's language, which has no types that Python's checkers know.

import triton
import triton.language as tl


@triton.jit
def rms_norm(hidden, weight, out, width, epsilon, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A program a row of `width` elements; BLOCK is a power of two that holds them all."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < width
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    scale = tl.load(weight + place, inside, 0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    raw = tl.load(hidden + row * width + place, inside, 0.0)
    wide = raw.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, 0) / width + epsilon)
    tl.store(out + row * width + place, (wide * scale).to(raw.dtype), inside)


@triton.jit
def silu_times(gate_up, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (row, part of it): silu of the first `width` elements of a row times its second `width`."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    raw = tl.load(gate_up + row * (2 * width) + place, inside, 0.0)
    gate = raw.to(tl.float32)
    up = tl.load(gate_up + row * (2 * width) + width + place, inside, 0.0).to(tl.float32)
    tl.store(out + row * width + place, (gate / (1.0 + tl.exp(-gate)) * up).to(raw.dtype), inside)

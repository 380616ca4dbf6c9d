"""The kernel behind `cuda_linear.linear_small`. Imports Triton: import it only where a kernel is launched."""
# mypy: ignore-errors
# What stands in a kernel is Triton's language, which has no types that Python's checkers know.

import triton
import triton.language as tl


@triton.jit
def _tile(weight, columns, n, k, begin, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """Weights [columns, begin to begin + WIDTH], read once and by nobody else: not kept in the L1 cache."""
    place = begin + tl.arange(0, WIDTH)[None, :]
    at = weight + columns[:, None].to(tl.int64) * k + place
    if WHOLE:
        return tl.load(at, eviction_policy="evict_first")
    return tl.load(at, (columns[:, None] < n) & (place < k), 0.0, eviction_policy="evict_first")


@triton.jit
def _added(total, tile, row, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Adds a tile's products to `total` [COLUMNS, WIDTH / 8]: the eight of one access meet in the thread it was by."""
    product = tile.to(tl.float32) * row
    return total + tl.sum(tl.reshape(product, [COLUMNS, WIDTH // 8, 8]), 2)


@triton.jit
def _row(x, norm, squares, begin, k, WIDTH: tl.constexpr, NORM: tl.constexpr):
    """Values of x, times the norm's weights, and the sums of squares that the norm divides by at the end."""
    # [1, WIDTH], so that it gets the tile's own layout and needs no way through shared memory.
    place = begin + tl.arange(0, WIDTH)[None, :]
    row = tl.load(x + place, place < k, 0.0).to(tl.float32)
    if NORM:
        squares += row * row
        row *= tl.load(norm + place, place < k, 0.0).to(tl.float32)
    return row, squares


@triton.jit
def linear_one_row(
    x,
    weight,
    norm,
    residual,
    out,
    n,
    k,
    up_offset,
    eps,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    WHOLE: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATE_UP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of x. In flight of the weight is what fits in registers: the tile at hand and the next one. STEPS x WIDTH
    covers k. With GATE_UP the weights of the up half lie `up_offset` elements on."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # Nobody writes weights: with programmatic dependent launch the first ones arrive while the launch before ends.
    tile = _tile(weight, columns, n, k, 0, WIDTH, WHOLE)
    if GATE_UP:
        up_tile = _tile(weight + up_offset, columns, n, k, 0, WIDTH, WHOLE)
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([COLUMNS, WIDTH // 8], tl.float32)
    up_total = tl.zeros([COLUMNS, WIDTH // 8], tl.float32)
    squares = tl.zeros([1, WIDTH], tl.float32)
    for step in range(1, STEPS):
        next_tile = _tile(weight, columns, n, k, step * WIDTH, WIDTH, WHOLE)
        if GATE_UP:
            next_up = _tile(weight + up_offset, columns, n, k, step * WIDTH, WIDTH, WHOLE)
        row, squares = _row(x, norm, squares, (step - 1) * WIDTH, k, WIDTH, NORM)
        total = _added(total, tile, row, COLUMNS, WIDTH)
        tile = next_tile
        if GATE_UP:
            up_total = _added(up_total, up_tile, row, COLUMNS, WIDTH)
            up_tile = next_up
    row, squares = _row(x, norm, squares, (STEPS - 1) * WIDTH, k, WIDTH, NORM)
    y = tl.sum(_added(total, tile, row, COLUMNS, WIDTH), 1)
    if NORM:
        factor = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / k + eps)
        y *= factor
    if GATE_UP:
        up = tl.sum(_added(up_total, up_tile, row, COLUMNS, WIDTH), 1)
        if NORM:
            up *= factor
        y = y / (1.0 + tl.exp(-y)) * up
    if RESIDUAL:
        y += tl.load(residual + columns, columns < n, 0.0).to(tl.float32)
    tl.store(out + columns, y.to(out.dtype.element_ty), columns < n)

"""Linear layers of one row on CUDA, at the speed at which their weights can be read.

A decode step of one sequence does nothing but read weights, so what cuBLAS cannot give counts: the norm before a layer,
the residual after it and the activation are part of its launch, and with programmatic dependent launch a kernel asks
for its first weights while the one before it still ends. For several rows cuBLAS between separate norms is as fast.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

ALIGNMENT = 8
"""Elements of 2 bytes in one access of 16 bytes."""


@dataclass(frozen=True)
class Tiles:
    """How the kernel cuts its weight. Each program computes `columns` outputs (with gate_up: of each half), `width` of
    the inputs at a time, by `warps` warps."""

    columns: int
    width: int
    warps: int


CANDIDATES = (
    Tiles(8, 2048, 4),
    Tiles(8, 4096, 8),
    Tiles(4, 4096, 4),
    Tiles(4, 2048, 4),
    Tiles(4, 1024, 4),
    Tiles(8, 1024, 4),
    Tiles(2, 4096, 4),
    Tiles(16, 1024, 8),
    Tiles(4, 2048, 8),
    Tiles(8, 2048, 8),
)
"""What `python -m bench.kernels` tries; `tiles` holds what it found best."""


def supports(rows: int, weight: torch.Tensor) -> bool:
    """Whether `linear_small` takes `rows` rows and this weight [n, k]: one row only."""
    return bool(
        rows == 1
        and weight.is_cuda
        and weight.ndim == 2
        and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.is_contiguous()
        and weight.shape[1] % ALIGNMENT == 0
        and weight.data_ptr() % 16 == 0
    )


def tiles(n: int, k: int, gate_up: bool) -> Tiles:
    """The tiles for `k` inputs and `n` outputs.

    Measured on an H200 that reads 4,473 GB/s, at the layers of Llama-3.1-8B in bf16, in microseconds:

        layer      n       k  bound  cuBLAS  best  by              chosen
        qkv     6144    4096  11.25   15.67  13.07 Tiles(4, 2048, 8)
        o       4096    4096   7.50   13.35   8.71 Tiles(4, 1024, 4)
        gate_up 14336   4096  52.51   56.37  54.67 Tiles(4, 4096, 4)
        down    4096   14336  26.25   31.42  28.78 Tiles(16, 1024, 8)  28.86 Tiles(8, 2048, 8)
        lm_head 128256  4096 234.88  238.75 230.43 Tiles(4, 2048, 8)

    What that says for other shapes, where nothing was measured: with up to about 4,096 outputs small programs fit onto
    all SMs at once (1,024 of them there; with 1,536, for qkv, they take 16.65); long rows want more in flight in each;
    and gate_up wants its whole row at once, as far as its two tiles fit into registers."""
    padded = max(256, 1 << (k - 1).bit_length())
    if gate_up:
        # At most a quarter of the threads may idle at a row's end.
        return Tiles(4, padded if padded <= 4096 and 4 * k > 3 * padded else min(padded, 1024), 4)
    if k >= 8192:
        return Tiles(8, 2048, 8)
    if k < 2048 and n > 16384:
        # Programs of a few kilobytes would end before they are worth their start.
        return Tiles(8, min(padded, 1024), 4)
    if k < 2048 or n <= 4096:
        return Tiles(4, min(padded, 1024), 4)
    return Tiles(4, 2048, 8)


@cache
def dependent_launch(device: torch.device) -> bool:
    """Whether kernels on this device may start before those ahead of them have ended (from Hopper on)."""
    return device.type == "cuda" and bool(torch.cuda.get_device_capability(device) >= (9, 0))


def linear_small(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    gate_up: bool = False,
    out: torch.Tensor | None = None,
    choice: Tiles | None = None,
    pdl: bool | None = None,
) -> torch.Tensor:
    """rmsnorm(x, norm, eps) @ weight.T + residual in one launch; with `gate_up` silu(first half) * second half of it.

    x [1, k], weight [n, k], norm [k], residual and the result [1, n], with gate_up [1, n / 2]; all contiguous, bf16 or
    fp16, sums in float32. `out` takes the result, of any floating dtype. Not for residual with gate_up. `choice` and
    `pdl` (programmatic dependent launch) are for measuring. Synchronises nothing and works under
    graph capture. Raises ValueError for shapes that it does not take."""
    rows, k = x.shape
    columns = weight.shape[0]
    n = columns // 2 if gate_up else columns
    if weight.shape[1] != k or rows != 1 or k % ALIGNMENT or (gate_up and (columns % 2 or residual is not None)):
        raise ValueError(
            f"linear_small got x {list(x.shape)}, weight {list(weight.shape)}, gate_up {gate_up}, residual "
            f"{residual is not None}; it takes x [1, k] and weight [n, k], k a multiple of {ALIGNMENT}, "
            "n even and no residual with gate_up; call torch.nn.functional.linear for others"
        )
    for name, tensor in (("x", x), ("weight", weight), ("norm", norm), ("residual", residual), ("out", out)):
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(
                f"linear_small's {name} {list(tensor.shape)} is not contiguous; make it so once, not a step"
            )
    if out is None:
        out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    _launch(x, weight, norm, eps, residual, gate_up, out, choice or tiles(n, k, gate_up), pdl)
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    gate_up: bool,
    out: torch.Tensor,
    choice: Tiles,
    pdl: bool | None,
) -> None:
    from forebay.gpu import triton_linear

    n, k = out.shape[1], x.shape[1]
    dependent = dependent_launch(x.device) if pdl is None else pdl
    options: dict[str, Any] = {"launch_pdl": True} if dependent else {}
    triton_linear.linear_one_row[-(-n // choice.columns),](
        x,
        weight,
        # A pointer that is not used still needs a value.
        weight if norm is None else norm,
        x if residual is None else residual,
        out,
        n,
        k,
        n * k,
        eps,
        COLUMNS=choice.columns,
        WIDTH=choice.width,
        STEPS=-(-k // choice.width),
        WHOLE=n % choice.columns == 0 and k % choice.width == 0,
        NORM=norm is not None,
        RESIDUAL=residual is not None,
        GATE_UP=gate_up,
        PDL=dependent,
        num_warps=choice.warps,
        **options,
    )

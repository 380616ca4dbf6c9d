"""The operators of gpu/decoder.py on CUDA: our own small kernels around cuBLAS' products; for one row, when a step
does nothing but read weights, layers of one launch each (gpu/cuda_linear.py)."""

import torch

from forebay.gpu.cuda_linear import dependent_launch, linear_small, supports
from forebay.gpu.triton_launch import launch

_SILU_BLOCK = 1024
"""Elements of one program of the activation."""


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, pdl: bool | None = None) -> torch.Tensor:
    """[rows, width] over the root of its mean square, times `weight` [width]; both contiguous."""
    from forebay.gpu import triton_norms

    rows, width = hidden.shape
    out = torch.empty_like(hidden)
    if rows:
        dependent = dependent_launch(hidden.device) if pdl is None else pdl
        block = 1 << (width - 1).bit_length()
        launch(
            triton_norms.rms_norm, (rows, 1), (hidden, weight, out), (width, epsilon),
            {"BLOCK": block, "PDL": dependent}, num_warps=min(16, max(1, block // 512)), pdl=dependent,
        )  # fmt: skip
    return out


def silu_times(gate_up: torch.Tensor, pdl: bool | None = None) -> torch.Tensor:
    """silu of the first half of each row [rows, 2 * width] times the second: [rows, width]."""
    from forebay.gpu import triton_norms

    rows, width = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        dependent = dependent_launch(gate_up.device) if pdl is None else pdl
        launch(
            triton_norms.silu_times, (rows, -(-width // _SILU_BLOCK)), (gate_up, out), (width,),
            {"BLOCK": _SILU_BLOCK, "PDL": dependent}, num_warps=4, pdl=dependent,
        )  # fmt: skip
    return out


class CudaOperators:
    """`small`: use the kernel for one row where it fits."""

    def __init__(self, *, small: bool = True) -> None:
        self._small = small

    def norm(self, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        return rms_norm(hidden, weight, epsilon)

    def norm_linear(
        self,
        hidden: torch.Tensor,
        norm: torch.Tensor,
        epsilon: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self._small and supports(len(hidden), weight):
            out = linear_small(hidden, weight, norm=norm, eps=epsilon)
            return out if bias is None else out.add_(bias)
        return torch.nn.functional.linear(rms_norm(hidden, norm, epsilon), weight, bias)

    def norm_gate_up(
        self, hidden: torch.Tensor, norm: torch.Tensor, epsilon: float, weight: torch.Tensor
    ) -> torch.Tensor:
        if self._small and supports(len(hidden), weight):
            return linear_small(hidden, weight, norm=norm, eps=epsilon, gate_up=True)
        return silu_times(torch.nn.functional.linear(rms_norm(hidden, norm, epsilon), weight))

    def add_linear(self, hidden: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self._small and supports(len(hidden), weight):
            return linear_small(rows, weight, residual=hidden)
        # The sum is part of the product's own launch, and is not rounded in between.
        return hidden.addmm_(rows, weight.T)

"""Linear layers for the CPU with their weights laid out for oneDNN once, at loading.

Measured on one core of an AMD EPYC in float32, SmolLM2-135M: a decode step takes the same time for one row, a fifth
less for 8 rows, a quarter less for 32; prefill is half as fast again. On two cores of an Intel Xeon with AMX in
bfloat16 prefill is a third to a half as fast again, decode of 32 rows up to a third.
"""

from typing import Any

import torch

_EXPECTED_ROWS = {torch.float32: 16, torch.bfloat16: 64}
"""The layout is chosen for this many rows. In float32 one chosen for 16 is good from 1 to 512, one for 1 or 64 is not;
in bfloat16 one for 64 is better than one for 16 or 512, at 32 rows as at 512."""


def packed_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """In what a layer with weights of `dtype` is computed here when it is packed; None where it cannot be.

    A processor without instructions for bfloat16 computes such a layer in float32, at twice the memory of its weights:
    plain bfloat16 is many times slower there (AVX2: 7 GFLOP/s against 27 and more)."""
    names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    if not torch.backends.mkldnn.is_available() or not all(hasattr(torch.ops.mkldnn, name) for name in names):
        return None
    if dtype == torch.bfloat16:
        return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    return torch.float32 if dtype == torch.float32 else None


class PackedLinear(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """What a `torch.nn.Linear` computes, up to rounding, in `dtype`; for inference only."""

    def __init__(self, linear: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        weight = linear.weight.detach().to(dtype).contiguous()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _EXPECTED_ROWS[dtype])
        self._bias = None if linear.bias is None else linear.bias.detach().to(dtype)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        out = torch.ops.mkldnn._linear_pointwise(rows.to(self._dtype), self._weight, self._bias, "none", [], "")
        return out.to(rows.dtype)


def pack_linear_layers(model: Any) -> None:
    """Replaces the linear layers of `model`, in place. Weights that other layers use too (tied embeddings) stay for
    them as they are. Leaves those whose dtype cannot be packed here."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and (dtype := packed_dtype(child.weight.dtype)) is not None:
                setattr(parent, name, PackedLinear(child, dtype))

"""The kernels of gpu/cuda_operators.py beside plain torch, by Triton's interpreter on the CPU; on a GPU where one is.

TRITON_INTERPRET=1 python -m pytest tests/gpu/test_cuda_operators.py
"""

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from forebay.gpu.cuda_operators import rms_norm, silu_times
from forebay.gpu.torch_operators import TorchOperators

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 576), (17, 4096), (300, 513), (0, 64)])
def test_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    hidden = (torch.randn(rows, width) * 3).to(DEVICE, dtype)
    weight = torch.randn(width).to(DEVICE, dtype)
    found = rms_norm(hidden, weight, 1e-5)
    expected = TorchOperators().norm(hidden.double(), weight.double(), 1e-5)
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-2, atol=1e-2)
    # Later launches go another way (gpu/triton_launch.py), and another one where 16 does not divide an address.
    assert torch.equal(rms_norm(hidden, weight, 1e-5), found)
    odd = torch.zeros(rows * width + 1, dtype=dtype, device=DEVICE)[1:].view(rows, width).copy_(hidden)
    assert torch.equal(rms_norm(odd, weight, 1e-5), found)
    assert torch.equal(rms_norm(hidden, weight, 1e-5), found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 1536), (17, 2049), (0, 64)])
def test_silu_times(rows: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    both = (torch.randn(rows, 2 * width) * 3).to(DEVICE, dtype)
    gate, up = both.double().chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    for _ in range(3):
        torch.testing.assert_close(silu_times(both).double(), expected, rtol=1e-2, atol=1e-2)

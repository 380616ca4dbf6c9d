"""Packed linear layers against torch's own."""

import pytest
import torch

from forebay.gpu.linear import PackedLinear, can_pack, pack_linear_layers

pytestmark = pytest.mark.skipif(not can_pack(), reason="this build of torch has no oneDNN operators")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 48), (1, 1, 48), (1, 37, 48), (2, 16, 48)])
def test_same_result_up_to_rounding(shape, bias) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(48, 80, bias=bias)
    rows = torch.randn(shape)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(linear)(rows), linear(rows), rtol=1e-5, atol=1e-5)


def test_only_plain_float32_layers_are_replaced() -> None:
    class Special(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.Sequential(torch.nn.Linear(8, 8)), Special(8, 8), torch.nn.Linear(8, 8).half()
    )
    pack_linear_layers(model)
    kinds = [type(model[0]), type(model[1][0]), type(model[2]), type(model[3])]
    assert kinds == [PackedLinear, PackedLinear, Special, torch.nn.Linear]

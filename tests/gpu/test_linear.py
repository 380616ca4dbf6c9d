"""Packed linear layers against torch's own."""

import pytest
import torch

from forebay.gpu.linear import PackedLinear, pack_linear_layers, packed_dtype

pytestmark = pytest.mark.skipif(packed_dtype(torch.float32) is None, reason="this build of torch lacks the operators")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 48), (1, 1, 48), (1, 37, 48), (2, 16, 48)])
def test_same_result_up_to_rounding(shape, bias) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(48, 80, bias=bias)
    rows = torch.randn(shape)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(linear, torch.float32)(rows), linear(rows), rtol=1e-5, atol=1e-5)


def test_bfloat16_is_computed_as_this_processor_can_and_stays_bfloat16() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(48, 80).bfloat16()
    rows = torch.randn(7, 48, dtype=torch.bfloat16)
    dtype = packed_dtype(torch.bfloat16)
    assert dtype in (torch.bfloat16, torch.float32)
    with torch.inference_mode():
        packed = PackedLinear(linear, dtype)(rows)
        exact = torch.nn.functional.linear(rows.float(), linear.weight.float(), linear.bias.float())
    assert packed.dtype == torch.bfloat16
    # A bfloat16 has eight bits: half a unit in the last place is 1/256 of the value.
    torch.testing.assert_close(packed.float(), exact, rtol=2**-7, atol=1e-2)


def test_only_plain_layers_of_a_dtype_that_can_be_packed_are_replaced() -> None:
    class Special(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.Sequential(torch.nn.Linear(8, 8)), Special(8, 8), torch.nn.Linear(8, 8).half()
    )
    pack_linear_layers(model)
    kinds = [type(model[0]), type(model[1][0]), type(model[2]), type(model[3])]
    assert kinds == [PackedLinear, PackedLinear, Special, torch.nn.Linear]

"""Our CUDA kernels on Triton's CPU interpreter: what they compute, not how fast. tests/cuda has them on a GPU."""

import os

import pytest
import torch

from tests.gpu.kernel_checks import check_linear, check_rope, check_sampling

if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the kernels run on the GPU itself here (tests/cuda)", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # Triton looks at it when a kernel's module is imported.
pytest.importorskip("triton")

# The interpreter computes with NumPy, which warns of a NaN where a GPU goes on; and rows with NaN are among the inputs.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(3, 1, 64), (4, 2, 24)])
def test_rope_and_append(dtype, norm, heads, kv_heads, head_size) -> None:
    check_rope(5, heads, kv_heads, head_size, dtype, "cpu", norm=norm)


@pytest.mark.parametrize("kind", ["plain", "norm", "residual", "gate_up"])
@pytest.mark.parametrize(("n", "k"), [(24, 512), (17, 320)])
def test_linear_small(n, k, kind) -> None:
    from forebay.gpu.cuda_linear import Tiles

    flags = {
        "plain": {},
        "norm": {"norm": True},
        "residual": {"norm": True, "residual": True},
        "gate_up": {"norm": True, "gate_up": True},
    }[kind]
    check_linear(n, k, torch.float16, "cpu", choice=Tiles(8, 128, 1), **flags)


@pytest.mark.parametrize(("n", "k", "gate_up"), [(20, 576, False), (5, 576, True), (9, 8200, False), (3, 3080, True)])
def test_linear_small_with_the_tiles_of_its_shape(n, k, gate_up) -> None:
    check_linear(n, k, torch.bfloat16, "cpu", norm=True, gate_up=gate_up)


@pytest.mark.parametrize(
    ("n", "k", "gate_up", "best"),
    [
        (6144, 4096, False, {(4, 2048, 8), (8, 2048, 8)}),
        (4096, 4096, False, {(4, 1024, 4)}),
        (14336, 4096, True, {(4, 4096, 4), (2, 4096, 4)}),
        (4096, 14336, False, {(16, 1024, 8), (8, 2048, 8), (4, 2048, 4)}),
        (128256, 4096, False, {(4, 2048, 8), (8, 4096, 8), (2, 4096, 4), (4, 4096, 4), (8, 2048, 8), (4, 2048, 4)}),
    ],
)
def test_tiles_are_within_2_per_cent_of_the_best_that_was_measured(n, k, gate_up, best) -> None:
    from forebay.gpu.cuda_linear import tiles

    chosen = tiles(n, k, gate_up)
    assert (chosen.columns, chosen.width, chosen.warps) in best


def test_tiles_of_any_shape_fit_into_registers() -> None:
    """What a thread holds of the weight: of each half with gate_up, twice where a row takes more than one step."""
    from forebay.gpu.cuda_linear import tiles

    for k in (8, 64, 256, 576, 896, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 8192, 14336, 28672):
        for n in (1, 576, 1024, 4096, 6144, 28672, 49152, 262144):
            for gate_up in (False, True):
                chosen = tiles(n, k, gate_up)
                assert chosen.width & (chosen.width - 1) == 0, "Triton takes powers of two only"
                tile = chosen.columns * chosen.width // (32 * chosen.warps)
                held = tile * (2 if gate_up else 1) * (2 if k > chosen.width else 1)
                assert held <= 256, f"n {n}, k {k}, gate_up {gate_up}: {held} elements of 2 bytes by {chosen}"


def test_linear_small_refuses_what_it_cannot_do() -> None:
    from forebay.gpu.cuda_linear import linear_small, supports

    weight = torch.zeros(16, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"x \[2, 64\]"):
        linear_small(weight.new_zeros(2, 64), weight)
    with pytest.raises(ValueError, match="no residual with gate_up"):
        linear_small(weight.new_zeros(1, 64), weight, residual=weight.new_zeros(1, 8), gate_up=True)
    with pytest.raises(ValueError, match=r"weight .* is not contiguous"):
        linear_small(weight.new_zeros(1, 16), weight.T)
    assert not supports(1, weight), "not on a GPU"


def test_draws_are_those_of_the_cpu() -> None:
    assert check_sampling(6, 4200, "cpu", 1) == 0

"""Our kernels on the GPU, against float64 and against sampling.py on the CPU."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from forebay.gpu.cuda_linear import CANDIDATES, linear_small, supports
from tests.gpu.kernel_checks import check_linear, check_rope, check_sampling, random

DEVICE = "cuda:0"
DTYPES = [torch.bfloat16, torch.float16]
KINDS = {
    "plain": {},
    "norm": {"norm": True},
    "residual": {"residual": True},
    "gate_up": {"norm": True, "gate_up": True},
}
LAYERS = [
    (6144, 4096, "norm"),
    (4096, 4096, "residual"),
    (14336, 4096, "gate_up"),
    (4096, 14336, "residual"),
    (128256, 4096, "norm"),
]
"""Outputs, inputs and kind of the linear layers of Llama-3.1-8B."""

# The compiler is run for most of these.
pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 17, 300])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (9, 3), (32, 8)])
@pytest.mark.parametrize("head_size", [64, 128])
def test_rope_and_append(tokens, heads, kv_heads, head_size, dtype, norm) -> None:
    check_rope(tokens, heads, kv_heads, head_size, dtype, DEVICE, norm=norm)


@pytest.mark.parametrize(("n", "k", "kind"), LAYERS)
def test_linear_small_at_the_shapes_of_llama_8b(n, k, kind) -> None:
    check_linear(n, k, torch.bfloat16, DEVICE, **KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "k"),
    [(1, 8), (960, 576), (333, 1544), (49, 4104), (896, 3584), (577, 8200), (16400, 200), (32771, 896), (5120, 3072)],
)
def test_linear_small_at_odd_shapes(n, k, dtype, kind) -> None:
    check_linear(n, k, dtype, DEVICE, **KINDS[kind])


@pytest.mark.parametrize("choice", CANDIDATES, ids=str)
def test_every_choice_of_tiles_is_right(choice) -> None:
    check_linear(1000, 4096, torch.bfloat16, DEVICE, norm=True, choice=choice)
    check_linear(512, 4104, torch.bfloat16, DEVICE, norm=True, gate_up=True, choice=choice)


def test_a_weight_of_more_than_4_gib_of_elements_is_addressed() -> None:
    x = random((1, 4096), torch.bfloat16, DEVICE, 1)
    weight = torch.randn(2**31 // 4096 + 64, 4096, dtype=torch.bfloat16, device=DEVICE)
    assert supports(1, weight)
    found = linear_small(x, weight)
    expected = x.double() @ weight[-64:].double().T
    assert float((found[:, -64:].double() - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize("pdl", [False, True])
def test_a_chain_in_a_graph_is_what_it_is_outside(pdl) -> None:
    """Each launch reads what the one before it wrote; replayed many times, also back to back."""
    weights = [torch.randn(2048, 2048, dtype=torch.bfloat16, device=DEVICE) / 45 for _ in range(24)]
    norm = torch.rand(2048, dtype=torch.bfloat16, device=DEVICE)
    x = torch.empty(1, 2048, dtype=torch.bfloat16, device=DEVICE)

    def chain(value: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            value = linear_small(value, weight, norm=norm, eps=1e-5, residual=value, pdl=pdl)
        return value

    inputs = [random((1, 2048), torch.bfloat16, DEVICE, seed) for seed in range(20)]
    expected = []
    for value in inputs:
        expected.append(chain(value))
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain(x)
    found = []
    for value in inputs:
        x.copy_(value)
        graph.replay()
        found.append(result.clone())
    torch.cuda.synchronize()
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"input {number}: {int((one != other).sum())} of 2048 differ"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [40, 4096, 49152, 128256])
def test_draws_are_those_of_the_cpu(vocabulary, dtype) -> None:
    """Where top_p cuts, about one draw in ten million may differ."""
    differing = sum(check_sampling(256, vocabulary, DEVICE, seed, dtype) for seed in range(4))
    assert differing <= (1 if dtype == torch.float32 else 0), f"{differing} of 1024 draws"


def test_sampling_in_a_graph() -> None:
    import numpy as np

    from forebay.gpu.cuda_draws import FIELDS
    from forebay.gpu.cuda_sampling import DeviceSampler
    from forebay.gpu.sampling import Draw, choose
    from forebay.transport.messages import Sampling

    sampler = DeviceSampler(128256, frozenset({5}), torch.device(DEVICE), 32)
    logits = torch.empty(32, 128256, device=DEVICE)
    settings = torch.zeros(FIELDS, 32, dtype=torch.int64, device=DEVICE)
    logits.normal_()
    sampler.run(logits, settings)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, stopped = sampler.run(logits, settings)
    for step in range(10):
        values = 4 * torch.randn(32, 128256, generator=torch.Generator().manual_seed(step))
        draws = [
            Draw(Sampling(max_tokens=99, temperature=0.5 + row / 30, top_p=1 - row / 64, seed=row), step)
            for row in range(24)
        ]
        host = np.empty((FIELDS, 32), np.int64)
        sampler.prepare(draws, host)
        logits.copy_(values)
        settings.copy_(torch.from_numpy(host))
        graph.replay()
        expected = choose(values[:24].clone(), draws, frozenset({5}))
        assert tokens[:24].tolist() == expected[0].tolist()
        assert stopped[:24].tolist() == expected[1].tolist()
        assert tokens[24:].tolist() == values[24:].argmax(-1).tolist(), "columns without a draw are greedy"


def test_what_supports_says() -> None:
    weight = torch.zeros(64, 64, dtype=torch.bfloat16, device=DEVICE)
    assert supports(1, weight)
    for rows, other in (
        (0, weight),
        (2, weight),
        (1, weight.float()),
        (1, weight[:, :56]),
        (1, weight.view(-1)[4:-60].view(63, 64)),
    ):
        assert not supports(rows, other)

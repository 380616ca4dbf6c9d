"""What our kernels must compute, by plain float64 arithmetic; the same on Triton's CPU interpreter and on a GPU."""

from typing import Any

import torch

BLOCK_TOKENS = 16
POISON = -77.0


def random(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int, scale: float = 1.0) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return values.to(dtype).to(device)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected; NaN if anything is."""
    return float((found.double() - expected).norm() / expected.norm())


def check_linear(
    n: int,
    k: int,
    dtype: torch.dtype,
    device: str,
    *,
    norm=False,
    residual=False,
    gate_up=False,
    **options: Any,
) -> None:
    """One row of `k` inputs, `n` outputs, by a weight of 2 n columns with gate_up."""
    from forebay.gpu.cuda_linear import linear_small

    x = random((1, k), dtype, device, 1, 3.0)
    weight = random(((2 if gate_up else 1) * n, k), dtype, device, 2, k**-0.5)
    scale = random((k,), dtype, device, 3) if norm else None
    added = random((1, n), dtype, device, 4) if residual else None
    out = torch.full((1, n), POISON, dtype=dtype, device=device)
    result = linear_small(x, weight, norm=scale, eps=1e-5, residual=added, gate_up=gate_up, out=out, **options)
    assert result is out
    wide = x.double()
    if scale is not None:
        wide = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale.double()
    expected = wide @ weight.double().T
    if gate_up:
        expected = torch.nn.functional.silu(expected[:, :n]) * expected[:, n:]
    if added is not None:
        expected = expected + added.double()
    bound = 1e-2 if dtype == torch.bfloat16 else 2e-3
    error = relative(out, expected)
    assert error < bound, f"[1, {k}] x [{n}, {k}] {options}: relative error {error}"
    same = linear_small(x, weight, norm=scale, eps=1e-5, residual=added, gate_up=gate_up, **options)
    assert torch.equal(same, out), "the same inputs gave other bits"


def check_rope(
    tokens: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    device: str,
    *,
    norm: bool,
    **options: Any,
) -> None:
    from forebay.gpu.cuda_kernels import rope_and_append

    layers, layer, blocks = 3, 1, tokens // BLOCK_TOKENS + 3
    qkv = random((tokens, (heads + 2 * kv_heads) * head_size), dtype, device, 5)
    pool = torch.full((blocks, layers, 2, BLOCK_TOKENS, kv_heads, head_size), POISON, dtype=dtype, device=device)
    order = torch.randperm(blocks * BLOCK_TOKENS, generator=torch.Generator().manual_seed(6))[:tokens]
    order[::5] = -1 if tokens > 1 else order[::5]
    rows = order.to(device)
    positions = torch.randint(0, 900, (tokens,), generator=torch.Generator().manual_seed(7)).to(torch.int32).to(device)
    angles = torch.arange(900)[:, None] / 10000.0 ** (torch.arange(head_size) % (head_size // 2) * 2 / head_size)
    cos, sin = angles.cos().float().to(device), angles.sin().float().to(device)
    scales = [random((head_size,), dtype, device, 8 + side) for side in (0, 1)] if norm else [None, None]
    q_out = torch.full((tokens, heads, head_size), POISON, dtype=dtype, device=device)
    rope_and_append(
        qkv, q_out, positions, rows, cos, sin, pool[:, layer],
        heads=heads, kv_heads=kv_heads, head_size=head_size, q_norm=scales[0], k_norm=scales[1], eps=1e-6, **options,
    )  # fmt: skip
    parts = qkv.double().view(tokens, heads + 2 * kv_heads, head_size).split([heads, kv_heads, kv_heads], 1)

    def turned(part: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        if scale is not None:
            part = part / (part.square().mean(-1, keepdim=True) + 1e-6).sqrt() * scale.double()
        low, high = part.chunk(2, -1)
        at = positions.long()
        return part * cos[at].double()[:, None] + torch.cat([-high, low], -1) * sin[at].double()[:, None]

    bound = 5e-3 if dtype == torch.bfloat16 else 1e-3
    assert relative(q_out, turned(parts[0], scales[0])) < bound
    expected = torch.full_like(pool, POISON).double()
    kept = rows >= 0
    block, offset = rows[kept] // BLOCK_TOKENS, rows[kept] % BLOCK_TOKENS
    expected[block, layer, 0, offset] = turned(parts[1], scales[1])[kept]
    expected[block, layer, 1, offset] = parts[2][kept]
    assert torch.equal(pool == POISON, expected == POISON), "written where it must not be, or not where it must"
    assert torch.equal(pool[block, layer, 1, offset].double(), parts[2][kept]), "values are copied as they are"
    if bool(kept.any()):
        found = pool[block, layer, 0, offset]
        assert relative(found, expected[block, layer, 0, offset]) < bound


def check_sampling(count: int, vocabulary: int, device: str, seed: int, dtype: torch.dtype = torch.float32) -> int:
    """Rows of `count` random draws whose token or mark differs from sampling.py's."""
    import numpy as np

    from forebay.gpu.cuda_draws import FIELDS
    from forebay.gpu.cuda_sampling import DeviceSampler
    from forebay.gpu.sampling import Draw, choose
    from forebay.transport.messages import Sampling

    rng = np.random.default_rng(seed)
    ends = frozenset({3, vocabulary - 1})
    # Like those of a language model: a few tokens far ahead of a broad field, more or less so by row.
    logits = random((count, vocabulary), torch.float32, "cpu", seed) * torch.from_numpy(
        rng.uniform(0.0, 4.0, (count, 1)).astype(np.float32)
    )
    for row in range(count):
        logits[row, rng.integers(0, vocabulary, 6)] += torch.from_numpy(rng.uniform(4, 16, 6).astype(np.float32))
    logits[rng.integers(0, count, count // 3), 3] += 20.0
    logits = logits.to(dtype)
    draws = [
        Draw(
            Sampling(
                max_tokens=10**6,
                temperature=float(rng.choice([0.0, 1e-6, 0.2, 0.7, 1.0, 1.7])),
                top_p=float(rng.choice([1.0, 1.0, 0.95, 0.9, 0.5, 0.05, 1 - 1e-9, 1e-12])),
                seed=int(rng.integers(-(2**63), 2**63)),
                min_tokens=int(rng.integers(0, 4)),
                ignore_eos=bool(rng.integers(2)),
            ),
            int(rng.integers(0, 6)),
        )
        for _ in range(count)
    ]
    if count > 4:
        logits[1, vocabulary // 2], logits[2, 0] = float("nan"), float("inf")
    expected = choose(logits.clone(), draws, ends)
    sampler = DeviceSampler(vocabulary, ends, torch.device(device), count)
    settings = np.full((FIELDS, count), -1, np.int64)
    assert sampler.prepare(draws, settings) == any(draw.sampling.temperature > 0 for draw in draws)
    tokens, stopped = sampler.run(logits.to(device), torch.from_numpy(settings).to(device))
    same = (tokens.cpu().numpy() == expected[0]) & (stopped.cpu().numpy() == expected[1])

    cold = [draw._replace(sampling=Sampling(max_tokens=9, min_tokens=draw.sampling.min_tokens)) for draw in draws]
    assert not sampler.prepare(cold, settings)
    expected = choose(logits.clone(), cold, ends)
    tokens, stopped = sampler.run_greedy(logits.to(device), torch.from_numpy(settings).to(device))
    assert tokens.tolist() == expected[0].tolist(), "greedy"
    assert stopped.tolist() == expected[1].tolist(), "greedy"
    return int((~same).sum())

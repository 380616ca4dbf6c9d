"""Times of our CUDA kernels at the shapes of Llama-3.1-8B, beside the time that moving their bytes takes.

Everything is timed in a CUDA graph, over weights that do not fit into the L2 cache together."""

import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from forebay.bench.errors import BenchError
from forebay.gpu.cuda_linear import CANDIDATES, Tiles, linear_small, tiles

HIDDEN, INNER, QKV, VOCABULARY = 4096, 14336, 6144, 128256
EPS = 1e-5
ROTATING_BYTES = 400 << 20
COMPILERS = 8
DTYPE = torch.bfloat16


class Layer(NamedTuple):
    """A linear layer of `n` outputs, its weight [columns, k]."""

    name: str
    n: int
    columns: int
    k: int
    norm: bool
    residual: bool
    gate_up: bool

    @property
    def bytes(self) -> int:
        return 2 * self.columns * self.k


LAYERS = (
    Layer("qkv", QKV, QKV, HIDDEN, True, False, False),
    Layer("o", HIDDEN, HIDDEN, HIDDEN, False, True, False),
    Layer("gate_up", INNER, 2 * INNER, HIDDEN, True, False, True),
    Layer("down", HIDDEN, HIDDEN, INNER, False, True, False),
    Layer("lm_head", VOCABULARY, VOCABULARY, HIDDEN, True, False, False),
)


def measure(device: str, layers: int, output: Path | None) -> int:
    """Prints the tables; writes all figures to `output`. Raises BenchError where there is no such device."""
    if not torch.cuda.is_available():
        raise BenchError(f"{device}: torch sees no CUDA device here; bench.kernels needs one")
    torch.cuda.set_device(torch.device(device))
    began = time.perf_counter()
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    rate = figures["read_gb_s"] = _read_rate()
    print(f"{figures['device']}, reading {rate:,.0f} GB/s: the bound of all that follows")
    _compile_ahead(device)
    print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
    for layer in LAYERS:
        figures[layer.name] = _sweep(layer, rate)
    figures["chain"] = _chain(layers, rate)
    figures["rope"] = _rope(rate)
    figures["sampling"] = _sampling(rate)
    print(f"all in {time.perf_counter() - began:.0f} s")
    if output:
        output.write_text(json.dumps(figures, indent=1, default=str) + "\n", encoding="utf-8")
    return 0


def timed(work: Callable[[], object], launches: int = 1, replays: int = 7) -> float:
    """Microseconds of one of the `launches` of `work`, in a graph: the median of some replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
        graph.replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        for event in events:
            event.record(stream)
            graph.replay()
        stream.synchronize()
    times = [one.elapsed_time(other) for one, other in pairwise(events)]
    return float(1000 * statistics.median(times) / launches)


def _repeat(work: Callable[[], object], times: int) -> None:
    for _ in range(times):
        work()


def _read_rate() -> float:
    """GB/s of a plain sum over 4 GiB, as far as torch's own kernel comes."""
    data = torch.empty(2 << 30, dtype=torch.bfloat16, device="cuda").view(torch.int32)
    data.random_()
    copied = torch.empty_like(data)
    by_sum = 4 * data.numel() / timed(lambda: torch.amax(data)) / 1000
    by_copy = 8 * data.numel() / timed(lambda: copied.copy_(data)) / 1000
    return float(max(by_sum, by_copy))


def _run(
    layer: Layer, x: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor, added: torch.Tensor, **options: Any
) -> Any:
    return linear_small(
        x,
        weight,
        norm=norm if layer.norm else None,
        eps=EPS,
        residual=added if layer.residual else None,
        gate_up=layer.gate_up,
        **options,
    )


def _run_all(
    layer: Layer, x: torch.Tensor, weights: list[torch.Tensor], norm: torch.Tensor, added: torch.Tensor, choice: Tiles
) -> None:
    for weight in weights:
        _run(layer, x, weight, norm, added, choice=choice)


def _inputs(layer: Layer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(1, layer.k, device="cuda").to(DTYPE)
    return x, torch.rand(layer.k, device="cuda").to(DTYPE), torch.randn(1, layer.n, device="cuda").to(DTYPE)


def _weight(layer: Layer) -> torch.Tensor:
    return torch.empty(layer.columns, layer.k, dtype=DTYPE, device="cuda").normal_(0, 0.02)


def _compile(device: str, jobs: list[tuple[Layer, Tiles]]) -> None:
    """Leaves the built kernels in Triton's cache on disk."""
    torch.cuda.set_device(torch.device(device))
    for layer, choice in jobs:
        x, norm, added = _inputs(layer)
        try:
            _run(layer, x, _weight(layer), norm, added, choice=choice, pdl=True)
            torch.cuda.synchronize()
        except Exception as error:  # The sweep meets it again, and says so.
            print(f"{layer.name} {choice}: {str(error)[:200]}", flush=True)


def _compile_ahead(device: str) -> None:
    jobs = [(layer, choice) for choice in CANDIDATES for layer in LAYERS]
    workers = min(COMPILERS, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, [device] * workers, [jobs[part::workers] for part in range(workers)]))


def _sweep(layer: Layer, rate: float) -> dict[str, float]:
    """Microseconds by choice of tiles, beside the bound and cuBLAS without norm and residual."""
    weights = [_weight(layer) for _ in range(-(-ROTATING_BYTES // layer.bytes))]
    x, norm, added = _inputs(layer)
    bound = layer.bytes / rate / 1000
    times: dict[Tiles, float] = {}
    for choice in CANDIDATES:
        try:
            times[choice] = timed(partial(_run_all, layer, x, weights, norm, added, choice), len(weights))
        except Exception as error:
            print(f"{layer.name} {choice}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            torch.cuda.synchronize()
    library = timed(lambda: [torch.nn.functional.linear(x, weight) for weight in weights], len(weights))
    if not times:
        raise BenchError(f"no choice of tiles works for {layer}")
    ordered = sorted(times, key=lambda choice: times[choice])
    best, chosen = ordered[0], tiles(layer.n, layer.k, layer.gate_up)
    print(f"{layer.name:8} bound {bound:.2f} us, cuBLAS alone {library:7.2f}, best {times[best]:7.2f} {best}")
    print("    " + ", ".join(f"{one.columns}x{one.width}/{one.warps}w {times[one]:.2f}" for one in ordered))
    if chosen in times:
        print(f"    chosen {chosen}: {times[chosen]:.2f} us, {times[chosen] / times[best]:.3f} of the best", flush=True)
    return {"bound": bound, "cublas": library} | {str(choice): value for choice, value in times.items()}


def _chain(layers: int, rate: float) -> dict[str, float]:
    """Milliseconds of the linear layers of a whole decode step of one row in one graph."""
    weights = [[_weight(layer) for layer in LAYERS[:4]] for _ in range(layers)]
    head = _weight(LAYERS[4])
    norm = torch.rand(HIDDEN, device="cuda").to(DTYPE)
    x = torch.randn(1, HIDDEN, device="cuda").to(DTYPE)

    def ours(pdl: bool) -> torch.Tensor:
        value = x
        for qkv, o, gate_up, down in weights:
            # In place of attention: as many columns, at no cost.
            queries = _run(LAYERS[0], value, qkv, norm, value, pdl=pdl)[:, :HIDDEN]
            value = _run(LAYERS[1], queries, o, norm, value, pdl=pdl)
            inner = _run(LAYERS[2], value, gate_up, norm, value, pdl=pdl)
            value = _run(LAYERS[3], inner, down, norm, value, pdl=pdl)
        return _run(LAYERS[4], value, head, norm, value, pdl=pdl)

    linear = torch.nn.functional.linear
    size = 2 * (head.numel() + sum(weight.numel() for layer in weights for weight in layer))
    found = {
        "bound": size / rate / 1e6,
        "with dependent launch": timed(lambda: ours(True)) / 1000,
        "without": timed(lambda: ours(False)) / 1000,
    }
    try:
        import flashinfer

        def library() -> torch.Tensor:
            value, residual = flashinfer.norm.rmsnorm(x, norm, EPS), x.clone()
            for qkv, o, gate_up, down in weights:
                value = linear(linear(value, qkv)[:, :HIDDEN], o)
                flashinfer.norm.fused_add_rmsnorm(value, residual, norm, EPS)
                value = linear(flashinfer.activation.silu_and_mul(linear(value, gate_up)), down)
                flashinfer.norm.fused_add_rmsnorm(value, residual, norm, EPS)
            return linear(value, head)

        found["cuBLAS and FlashInfer"] = timed(library) / 1000
    except Exception as error:
        print(f"no chain of cuBLAS and FlashInfer: {type(error).__name__}: {str(error)[:300]}")
        found["cuBLAS alone"] = timed(
            lambda: [linear(x if index != 3 else x.repeat(1, 4)[:, :INNER], weight)
                     for layer in weights for index, weight in enumerate(layer)]
        ) / 1000  # fmt: skip
    print(f"{layers} layers and lm_head, {size / 1e9:.2f} GB, ms: "
          + ", ".join(f"{name} {value:.3f}" for name, value in found.items())
          + f"; {found['with dependent launch'] / found['bound']:.3f} of the bound", flush=True)  # fmt: skip
    return found


def _rope(rate: float) -> dict[str, float]:
    from forebay.gpu.cuda_kernels import rope_and_append

    found: dict[str, float] = {}
    cos = torch.randn(8192, 128, device="cuda")
    cache = torch.zeros(1024, 4, 2, 16, 8, 128, dtype=DTYPE, device="cuda")[:, 1]
    for tokens in (1, 8, 256, 8192):
        qkv = torch.randn(tokens, QKV, device="cuda").to(DTYPE)
        q_out = torch.empty(tokens, 32, 128, dtype=DTYPE, device="cuda")
        positions = torch.randint(0, 8192, (tokens,), device="cuda", dtype=torch.int32)
        rows = torch.randperm(1024 * 16, device="cuda")[:tokens]

        turn = partial(
            rope_and_append, qkv, q_out, positions, rows, cos, cos, cache, heads=32, kv_heads=8, head_size=128
        )
        found[str(tokens)] = timed(partial(_repeat, turn, 16), 16)
        print(
            f"rope and append, {tokens} tokens: {found[str(tokens)]:.2f} us, bound {tokens * QKV * 4 / rate / 1000:.2f}"
        )
    return found


def _sampling(rate: float) -> dict[str, float]:
    """Microseconds by rows and kind of draw, of float32 and bf16 logits."""
    import numpy as np

    from forebay.gpu.cuda_draws import FIELDS
    from forebay.gpu.cuda_sampling import DeviceSampler
    from forebay.gpu.sampling import Draw
    from forebay.transport.messages import Sampling

    found: dict[str, float] = {}
    for rows in (1, 32, 256):
        sampler = DeviceSampler(VOCABULARY, frozenset({1, 2}), torch.device("cuda"), rows)
        logits = 3 * torch.randn(rows, VOCABULARY, device="cuda")
        for name, sampling in (
            ("greedy", Sampling(max_tokens=9)),
            ("temperature", Sampling(max_tokens=9, temperature=0.8)),
            ("top_p", Sampling(max_tokens=9, temperature=0.8, top_p=0.9)),
        ):
            host = np.zeros((FIELDS, rows), np.int64)
            draws = [Draw(sampling, row) for row in range(rows)]
            preparations = []
            for _ in range(21):
                began = time.perf_counter()
                warm = sampler.prepare(draws, host)
                preparations.append(1e6 * (time.perf_counter() - began))
            prepared = statistics.median(preparations)
            settings = torch.from_numpy(host).cuda()
            for dtype in (torch.float32, torch.bfloat16):
                values = logits.to(dtype)
                choose = sampler.run if warm else sampler.run_greedy
                took = timed(partial(choose, values, settings))
                label = f"{name}, {rows} rows, {str(dtype).removeprefix('torch.')}"
                found[label] = took
                bound = values.numel() * values.element_size() / rate / 1000
                print(f"sampling {label}: {took:.1f} us, bound {bound:.1f}, prepared on the host in {prepared:.1f}")
    return found

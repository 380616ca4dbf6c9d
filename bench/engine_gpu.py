"""The engine by itself on a GPU: a large batch from beginning to end, decode steps of several batches, and the host's
part of a step; and vLLM with the same batch in the same run.
"""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from forebay.bench.ceilings import measure_ceilings
from forebay.bench.engine_loop import Engine, StepRecord, Timing
from forebay.bench.engine_profile import write_profile
from forebay.bench.engine_run import Batch, run_vllm
from forebay.bench.figures import Figure, write_figures
from forebay.gpu.backend import memory_backend
from forebay.gpu.device import open_device
from forebay.transport.messages import BLOCK_TOKENS, DeviceSettings, ModelSpec

SLAB = 256 << 20

TIMED_STEPS = 48
"""Decode steps of a further batch; the first few, with prompts beside them, do not count."""


@dataclass(frozen=True)
class Plan:
    """`batches`: further batches whose decode steps are timed, at the same contexts; `profile`: the file that
    gets what write_profile finds at the last context."""

    batch: Batch
    device: str
    load_format: str
    partition: str
    batches: tuple[int, ...]
    step_tokens: int
    profile: Path | None = None


def measure_gpu(
    plan: Plan, contexts: list[int], vllm: Path | None, json: Path | None, arguments: list[str] | None
) -> int:
    """Runs all, prints a table, writes the figures; returns the exit status. The baseline is vLLM, if there is one."""
    figures: dict[str, Figure] = {}
    with memory_backend(plan.device) as memory:
        described = memory.describe()
    for context in contexts:
        prompts = plan.batch.prompts(context)
        found = _ours(plan, context, prompts)
        other: dict[str, float] = {}
        if vllm is not None:
            begin = time.perf_counter()
            dummy = plan.load_format == "dummy"
            timing = run_vllm(plan.batch, prompts, vllm, cuda=True, dummy=dummy)
            other = _rates(plan.batch, context, timing) | {
                "start": timing.start_s,
                "run": timing.prefill_s + timing.decode_s,
            }
            took = time.perf_counter() - begin
            print(f"vLLM took {took:.0f} s, of which {timing.start_s:.0f} to start", flush=True)
        for name, (value, unit) in found.items():
            baseline = other.get(name)
            figures[f"{name}_{context}"] = Figure(value, unit, baseline)
            beside = f"   vLLM {baseline:12,.1f}   ratio {value / baseline:.3f}" if baseline else ""
            print(f"context {context:6}  {name:28}{value:12,.3f} {unit:9}{beside}", flush=True)
    if json is not None:
        words = ["python", "-m", "bench.engine", *(arguments or [])]
        write_figures(json, "bench.engine", words, figures, {plan.device: described})
    return 0


def _rates(batch: Batch, context: int, timing: Timing) -> dict[str, float]:
    seconds = timing.prefill_s + timing.decode_s
    return {
        "total": batch.requests * (context + batch.output) / seconds,
        "output": batch.requests * batch.output / seconds,
        "prefill": batch.requests * context / timing.prefill_s,
        "decode": batch.requests * (batch.output - 1) / timing.decode_s,
    }


def _ours(plan: Plan, context: int, prompts: list[list[int]]) -> dict[str, tuple[float, str]]:
    """Figures with their units, by name."""
    batch = plan.batch
    most = max(batch.requests, *plan.batches)
    length = context + max(batch.output, TIMED_STEPS + 2)
    spec = ModelSpec(
        "m",
        str(batch.model.resolve()),
        batch.dtype,
        max_context=length + BLOCK_TOKENS,
        max_sequences=most,
        step_tokens=max(plan.step_tokens, most),
        load_format=plan.load_format,
    )
    begin = time.perf_counter()
    slabs = _slabs(plan, most, length)
    device = open_device(plan.device, DeviceSettings(slabs * SLAB, SLAB, partition=plan.partition))
    try:
        runner = device.load(spec)
        found = {"start": (time.perf_counter() - begin, "s")}
        engine = Engine(runner, slabs, SLAB, plan.partition)
        engine.run(prompts[:2], 4, 1)
        found["start_to_first_token"] = (time.perf_counter() - begin, "s")
        engine.run(prompts, 8, 1000)
        host = getattr(runner, "host_seconds", 0.0)
        timing = engine.run(prompts, batch.output, 100_000)
        steps = len(engine.steps)
        host = getattr(runner, "host_seconds", 0.0) - host
        for name, rate in _rates(batch, context, timing).items():
            found[name] = (rate, "tokens/s")
        found["run"] = (timing.prefill_s + timing.decode_s, "s")
        found["steps"] = (float(steps), "")
        found["core_per_step"] = (engine.core_s / steps * 1e3, "ms")
        found["host_per_step"] = (host / steps * 1e3, "ms")
        weights = _weights_read(spec)
        reading = measure_ceilings(plan.device, batch.dtype, 0).bytes_per_s
        found["bandwidth"] = (reading / 1e9, "GB/s")

        def decodes(size: int) -> dict[str, tuple[float, str]]:
            return _decode_figures(engine.steps, size, weights, runner.block_bytes, reading)

        found |= decodes(batch.requests)
        for number, size in enumerate(plan.batches):
            host = getattr(runner, "host_seconds", 0.0)
            engine.run((prompts * size)[:size], TIMED_STEPS, 1_000_000 * (number + 1))
            found |= decodes(size)
            host = getattr(runner, "host_seconds", 0.0) - host
            found[f"host_per_step_batch_{size}"] = (host / len(engine.steps) * 1e3, "ms")
        prefills = [step for step in engine.steps if step.prompt_tokens and not step.decodes]
        if prefills:
            rate = sum(step.prompt_tokens for step in prefills) / sum(step.device_s for step in prefills)
            found["prefill_on_device"] = (rate, "tokens/s")
        if plan.profile is not None:
            divided = plan.partition != "none"
            write_profile(runner, prompts[0], sorted({1, batch.requests}), plan.step_tokens, divided, plan.profile)
        return found
    finally:
        device.close()


def _weights_read(spec: ModelSpec) -> int:
    """Bytes of weights that a decode step reads: all but the embedding, where that is not the head as well."""
    from forebay.gpu.cuda_loading import weight_bytes
    from forebay.gpu.weights import dtype_of, read_config

    config = read_config(spec)
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return weight_bytes(spec) - embedding * int(dtype_of(spec).itemsize)


def _decode_figures(
    steps: list[StepRecord], batch: int, weights: int, block_bytes: int, reading: float
) -> dict[str, tuple[float, str]]:
    """Medians over the steps in which exactly `batch` sequences decoded, and no prompt was read. What such a step moves
    is its weights, of `weights` bytes, and the keys and values of its sequences; `reading` is what a
    copy reaches, in bytes per second."""
    alone = [step for step in steps if step.decodes == batch and not step.prompt_tokens][2:]
    if not alone:
        return {}
    seconds = statistics.median(step.device_s for step in alone)
    moved = weights + statistics.median(step.context_tokens for step in alone) * block_bytes / BLOCK_TOKENS
    return {
        f"decode_step_batch_{batch}": (seconds * 1e3, "ms"),
        f"decode_period_batch_{batch}": (statistics.median(step.period_s for step in alone) * 1e3, "ms"),
        f"decode_moved_batch_{batch}": (moved / 1e9, "GB"),
        f"decode_of_bandwidth_batch_{batch}": (100 * moved / seconds / reading, "%"),
    }


def _slabs(plan: Plan, sequences: int, length: int) -> int:
    """Enough for all sequences at their longest, and one more."""
    from forebay.gpu.movable import describe

    spec = ModelSpec("m", str(plan.batch.model.resolve()), plan.batch.dtype, load_format=plan.load_format)
    block_bytes = describe(spec).shape.block_bytes
    blocks = (sequences + 1) * (-(-length // BLOCK_TOKENS) + 1)
    return -(-blocks * block_bytes // SLAB) + 1

"""The engine by itself: decisions and model work as in a worker, without processes and sockets, beside `generate`.

Both get the same prompts (random tokens, no two alike), make exactly as many tokens, greedily, in one batch, on the
same threads. A throwaway batch first warms up each.
"""

import json as json_module
import os
import random
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.bench.engine_loop import Engine, Timing
from forebay.bench.errors import BenchError
from forebay.bench.figures import Figure, write_figures
from forebay.gpu.device import open_device
from forebay.transport.messages import BLOCK_TOKENS, DeviceSettings, ModelSpec

SLAB = 32 << 20
STEP_TOKENS = 2048
"""Tokens of a step: large, as for a batch whose throughput counts (generate takes all prompts in one step). A server's
default is a quarter of it, because there an answer waits while a prompt's chunk is computed."""
VOCABULARY = range(1000, 30000)


@dataclass(frozen=True)
class Batch:
    """`requests` sequences that make `output` tokens each; `threads` 0 is the library's own choice."""

    model: Path
    dtype: str
    requests: int
    output: int
    threads: int

    def prompts(self, context: int) -> list[list[int]]:
        chance = random.Random(context)
        return [[chance.choice(VOCABULARY) for _ in range(context)] for _ in range(self.requests)]


def measure(
    batch: Batch, contexts: list[int], vllm: Path | None, json: Path | None, arguments: list[str] | None
) -> int:
    """Runs all, prints a table, writes the figures; returns the exit status. The baseline is `generate`."""
    figures: dict[str, Figure] = {}
    for context in contexts:
        prompts = batch.prompts(context)
        ours = _rates(batch, context, _ours(batch, prompts))
        others = {"generate": _rates(batch, context, _generate(batch, prompts))}
        if vllm is not None:
            others["vllm"] = _rates(batch, context, run_vllm(batch, prompts, vllm))
        for name, rate in ours.items():
            figures[f"{name}_{context}"] = Figure(rate, "tokens/s", others["generate"][name])
            beside = "   ".join(f"{other}: {rates[name]:9.1f}" for other, rates in others.items())
            print(f"context {context:5}  {name:8}{rate:9.1f} tokens/s   {beside}", flush=True)
        for name, rate in others.get("vllm", {}).items():
            figures[f"vllm_{name}_{context}"] = Figure(rate, "tokens/s", others["generate"][name])
    if json is not None:
        write_figures(json, "bench.engine", ["python", "-m", "bench.engine", *(arguments or [])], figures)
    return 0


def _rates(batch: Batch, context: int, timing: Timing) -> dict[str, float]:
    """Tokens per second: of prompts in prefill, of answers in decode, and of answers over all the time."""
    return {
        "prefill": batch.requests * context / timing.prefill_s,
        "decode": batch.requests * (batch.output - 1) / timing.decode_s,
        "output": batch.requests * batch.output / (timing.prefill_s + timing.decode_s),
    }


def _ours(batch: Batch, prompts: list[list[int]]) -> Timing:
    context = len(prompts[0])
    spec = ModelSpec("m", str(batch.model.resolve()), batch.dtype, 0, batch.requests, STEP_TOKENS)
    probe = open_device("cpu:0", DeviceSettings(SLAB, SLAB, batch.threads))
    block_bytes = probe.load(spec).block_bytes
    probe.close()
    needed = (batch.requests + 1) * (-(-(context + batch.output) // BLOCK_TOKENS) + 1) * block_bytes
    slabs = -(-needed // SLAB) + 1
    device = open_device("cpu:0", DeviceSettings(slabs * SLAB, SLAB, batch.threads))
    try:
        engine = Engine(device.load(spec), slabs, SLAB)
        engine.run(prompts, 2, 1)  # also touches the memory that the measured batch uses
        return engine.run(prompts, batch.output, 10_000)
    finally:
        device.close()


def _generate(batch: Batch, prompts: list[list[int]]) -> Timing:
    import torch
    from transformers import AutoModelForCausalLM

    if batch.threads:
        torch.set_num_threads(batch.threads)
    dtype = getattr(torch, batch.dtype)
    loaded: Any = AutoModelForCausalLM.from_pretrained(batch.model, dtype=dtype, local_files_only=True)
    ids = torch.tensor(prompts)
    arguments = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None}
    stamps: list[float] = []

    def stamp(_: Any, scores: Any) -> Any:
        stamps.append(time.perf_counter())
        return scores

    with torch.inference_mode():
        loaded.generate(ids[:, :16], attention_mask=torch.ones_like(ids[:, :16]), max_new_tokens=2, do_sample=False)
        begin = time.perf_counter()
        made = loaded.generate(
            ids, max_new_tokens=batch.output, min_new_tokens=batch.output, logits_processor=[stamp], **arguments
        )
    assert made.shape[1] == ids.shape[1] + batch.output
    return Timing(stamps[0] - begin, time.perf_counter() - stamps[0])


def run_vllm(
    batch: Batch, prompts: list[list[int]], python: Path, *, cuda: bool = False, dummy: bool = False
) -> Timing:
    """In its own environment, by bench/vllm_batch.py, on a GPU with its graphs and compilation, on a CPU without. With
    `dummy` its weights are made up. Raises BenchError with the last of what it said."""
    with tempfile.TemporaryDirectory(prefix="fb-") as folder:
        wish, answer = Path(folder, "wish.json"), Path(folder, "answer.json")
        wish.write_text(
            json_module.dumps(
                {
                    "model": str(batch.model.resolve()),
                    "dtype": batch.dtype,
                    "output": batch.output,
                    "prompts": prompts,
                    "eager": not cuda,
                    "dummy": dummy,
                }
            )
        )
        script = Path(__file__).resolve().with_name("vllm_batch.py")
        threads = {"OMP_NUM_THREADS": str(batch.threads)} if batch.threads else {}
        environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "4",
            # Its threads are as many as the others have, and bound to cores no more than theirs.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            **threads,
        }
        if not os.access(python, os.X_OK):
            raise BenchError(f"--vllm {python}: no program; the Python of an environment with vLLM is needed")
        done = subprocess.run(
            # -P: modules of the script's own folder, among them `profile`, must not pass for the standard library's.
            [str(python), "-P", str(script), str(wish), str(answer)],
            env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise BenchError(
                f"vLLM ended with status {done.returncode}; the last of what it said:\n{done.stdout[-3000:]}"
            )
        return Timing(**json_module.loads(answer.read_text()))

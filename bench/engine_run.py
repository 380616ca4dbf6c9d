"""The engine by itself: decisions and model work as in a worker, without processes and sockets, beside `generate`.

Both get the same prompts (random tokens, no two alike), make exactly as many tokens, greedily, in one batch, on the
same threads. A throwaway batch first warms up each.
"""

import queue
import random
import time
from array import array
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.bench.figures import Figure, write_figures
from forebay.gpu.device import open_device
from forebay.gpu.runner import ModelRunner
from forebay.sched.blocks import BlockPool
from forebay.sched.lane import LaneCore
from forebay.sched.lane_events import Deliver, LaneEvent, ModelOpened
from forebay.sched.policy import AdaptiveBatching
from forebay.transport.messages import (
    BLOCK_TOKENS,
    CloseSequence,
    DeviceSettings,
    ModelSpec,
    OpenSequence,
    Sampling,
    Start,
    StepDone,
    StepPlan,
    Tokens,
)

SLAB = 32 << 20
STEP_TOKENS = 512
VOCABULARY = range(1000, 30000)


@dataclass(frozen=True)
class Timing:
    """Seconds until every sequence had its first token, and from there to the end."""

    prefill_s: float
    decode_s: float


def measure(
    model: Path,
    dtype: str,
    contexts: list[int],
    requests: int,
    output: int,
    threads: int,
    json: Path | None,
    arguments: list[str] | None,
) -> int:
    """Runs all, prints a table, writes the figures; returns the exit status."""
    figures: dict[str, Figure] = {}
    for context in contexts:
        prompts = _prompts(requests, context)
        ours = _ours(model, dtype, prompts, output, threads)
        theirs = _generate(model, dtype, prompts, output, threads)
        steps = requests * (output - 1)
        for name, tokens, mine, base in (
            ("prefill", requests * context, ours.prefill_s, theirs.prefill_s),
            ("decode", steps, ours.decode_s, theirs.decode_s),
            ("output", requests * output, ours.prefill_s + ours.decode_s, theirs.prefill_s + theirs.decode_s),
        ):
            figure = Figure(tokens / mine, "tokens/s", tokens / base)
            figures[f"{name}_{context}"] = figure
            print(f"context {context:5}  {name:8}{figure.value:9.1f} tokens/s   generate: {figure.baseline:9.1f}")
    if json is not None:
        write_figures(json, "bench.engine", ["python", "-m", "bench.engine", *(arguments or [])], figures)
    return 0


def _prompts(requests: int, context: int) -> list[list[int]]:
    chance = random.Random(context)
    return [[chance.choice(VOCABULARY) for _ in range(context)] for _ in range(requests)]


class _Engine:
    """A worker's loop without its sockets: events in, commands carried out, one step ahead."""

    def __init__(self, runner: ModelRunner, slabs: int) -> None:
        self._runner = runner
        self._core = LaneCore(BlockPool(slabs, SLAB), AdaptiveBatching(), prefix_cache=False)
        self._landed: queue.SimpleQueue[Future[StepDone]] = queue.SimpleQueue()
        self._flying = 0
        spec = runner.spec
        self.handle(ModelOpened(spec.name, runner.block_bytes, spec.max_sequences, spec.step_tokens))

    def handle(self, event: LaneEvent) -> None:
        for command in self._core.handle(time.monotonic(), event):
            match command:
                case OpenSequence():
                    self._runner.open(command)
                case CloseSequence():
                    self._runner.close(command)
                case StepPlan():
                    self._flying += 1
                    self._runner.launch(command).add_done_callback(self._landed.put)
                case Deliver(_, messages):
                    for message in messages:
                        if isinstance(message, Tokens):
                            self._begun.update(memoryview(message.requests).cast("Q"))
                case _:
                    pass

    def run(self, prompts: list[list[int]], output: int, first_request: int) -> Timing:
        """All prompts at once, to their ends."""
        self._begun: set[int] = set()
        begin = time.perf_counter()
        tokens = 0
        first = 0.0
        for number, prompt in enumerate(prompts, start=first_request):
            sampling = Sampling(output, ignore_eos=True)
            self.handle(
                Start(number, 0, self._runner.spec.name, array("I", prompt).tobytes(), len(prompt), sampling, "")
            )
        while self._flying:
            done = self._landed.get().result()
            self._flying -= 1
            tokens += len(done.stopped)
            self.handle(done)
            if not first and len(self._begun) == len(prompts):
                first = time.perf_counter() - begin
        assert tokens == len(prompts) * output
        return Timing(first, time.perf_counter() - begin - first)


def _ours(model: Path, dtype: str, prompts: list[list[int]], output: int, threads: int) -> Timing:
    requests, context = len(prompts), len(prompts[0])
    spec = ModelSpec("m", str(model.resolve()), dtype, 0, requests, STEP_TOKENS)
    probe = open_device("cpu:0", DeviceSettings(SLAB, SLAB, threads))
    block_bytes = probe.load(spec).block_bytes
    probe.close()
    needed = (requests + 1) * (-(-(context + output) // BLOCK_TOKENS) + 1) * block_bytes
    slabs = -(-needed // SLAB) + 1
    device = open_device("cpu:0", DeviceSettings(slabs * SLAB, SLAB, threads))
    try:
        engine = _Engine(device.load(spec), slabs)
        engine.run(prompts, 2, 1)  # also touches the memory that the measured batch uses
        return engine.run(prompts, output, 10_000)
    finally:
        device.close()


def _generate(model: Path, dtype: str, prompts: list[list[int]], output: int, threads: int) -> Timing:
    import torch
    from transformers import AutoModelForCausalLM

    if threads:
        torch.set_num_threads(threads)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype), local_files_only=True)
    ids = torch.tensor(prompts)
    arguments = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None}
    stamps: list[float] = []

    def stamp(_: Any, scores: Any) -> Any:
        stamps.append(time.perf_counter())
        return scores

    with torch.inference_mode():
        loaded.generate(ids[:, :16], attention_mask=torch.ones_like(ids[:, :16]), max_new_tokens=2, do_sample=False)
        begin = time.perf_counter()
        made = loaded.generate(ids, max_new_tokens=output, min_new_tokens=output, logits_processor=[stamp], **arguments)
    assert made.shape[1] == ids.shape[1] + output
    return Timing(stamps[0] - begin, time.perf_counter() - stamps[0])

"""Where the time of the engine's steps goes on a GPU: kernels by device time, and what launching them takes the host.

Steps are handed to the runner by hand, over blocks of a pool that nobody else uses at the time.
"""

import io
import time
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forebay.gpu.runner import Runner
from forebay.transport.messages import BLOCK_TOKENS, CloseSequence, OpenSequence, Sampling, StepDone, StepPlan, Work
from forebay.transport.messages.steps import LaneKind

FIRST_SEQUENCE = 1 << 40
"""Far from the numbers of sequences that a lane core has opened."""

ROWS = 25
QUEUED = 3
"""Steps in a row, to see whether the host waits for the device when it launches one behind others."""


class StepDriver:
    """Opens sequences of one prompt, of up to `longest` tokens in the end, and makes their steps, without a lane core.
    `lanes`: of prefills and decodes."""

    def __init__(self, runner: Runner, prompt: list[int], longest: int, lanes: tuple[LaneKind, LaneKind]) -> None:
        self.runner = runner
        self._lanes = lanes
        self._context = len(prompt)
        self._prompt = np.array(prompt, "<u4").tobytes()
        self._longest = -(-longest // BLOCK_TOKENS)
        self._open: list[int] = []
        self._known: dict[int, int] = {}
        self._step = FIRST_SEQUENCE
        self._next = FIRST_SEQUENCE

    def begin(self, count: int) -> list[int]:
        """Opens so many sequences, and closes all others."""
        model = self.runner.spec.name
        for number in self._open:
            self.runner.close(CloseSequence(number, model))
        self._open = list(range(self._next, self._next + count))
        self._next += count
        for number in self._open:
            sampling = Sampling(1 << 20, ignore_eos=True)
            self.runner.open(OpenSequence(number, model, self._prompt, self._context, sampling))
            self._known[number] = 0
        return self._open

    def step(self, sequences: list[int], count: int) -> "Future[StepDone]":
        """`count` tokens more of each."""
        work = []
        for number in sequences:
            start = self._known[number]
            kept, needed = -(-start // BLOCK_TOKENS), -(-(start + count) // BLOCK_TOKENS)
            first = self._open.index(number) * self._longest
            blocks = tuple(range(first + kept, first + needed))
            sample = start + count >= self._context
            work.append(Work(number, start, count, kept, blocks, sample))
            self._known[number] += count
        self._step += 1
        lane = self._lanes[self._known[sequences[0]] > self._context]
        return self.runner.launch(StepPlan(self._step, self.runner.spec.name, tuple(work), lane))


def write_profile(
    runner: Runner, prompt: list[int], batches: Iterable[int], step_tokens: int, divided: bool, path: Path
) -> None:
    """One prefill step of `step_tokens` tokens, and one decode step of each batch after the prompt, to a text file;
    traces for chrome://tracing beside it. `divided`: prefills and decodes have lanes of their own."""
    context = len(prompt)
    text = io.StringIO()
    longest = context + 64
    driver = StepDriver(runner, prompt, longest, ("prefill", "decode") if divided else ("mixed", "mixed"))
    most = min(runner.spec.max_sequences, runner.blocks // -(-longest // BLOCK_TOKENS))
    for tokens in sorted({512, 2048, step_tokens}):
        _launch_times(driver, runner, context, tokens, text)
    count = max(1, min(step_tokens // context, most))
    sequences = driver.begin(count)
    part = min(context, step_tokens // count)
    _profiled(f"prefill of {count * part} tokens", runner, lambda: driver.step(sequences, part), path, text)
    for batch in batches:
        if batch > most:
            text.write(f"decode at batch {batch}: the pool and the model take {most} sequences\n\n")
            continue
        sequences = driver.begin(batch)
        each = max(1, step_tokens // context)
        for first in range(0, batch, each):
            driver.step(sequences[first : first + each], context).result()
        for _ in range(4):
            driver.step(sequences, 1).result()
        name = f"decode at batch {batch}, context {context}"
        _profiled(name, runner, lambda rows=sequences: driver.step(rows, 1), path, text)
    driver.begin(0)
    path.write_text(text.getvalue())
    print(text.getvalue()[:1500], flush=True)


def _launch_times(driver: StepDriver, runner: Runner, context: int, tokens: int, text: io.StringIO) -> None:
    """The host's part of a prefill step: on an idle device, and behind steps that run."""
    count, part = (tokens // context, context) if tokens >= context else (1, tokens)
    if not 0 < count <= runner.spec.max_sequences or count * part > runner.spec.step_tokens:
        return
    wall, busy, device = [], [], []
    for queued in (1, 1, QUEUED):
        before = _host(runner)
        # Closing sequences takes nothing from steps that were launched.
        futures = [driver.step(driver.begin(count), part) for _ in range(queued)]
        device.append(sum(future.result().seconds for future in futures) / queued)
        spent = _host(runner) - before
        wall.append(spent[0] / queued)
        busy.append(spent[1] / queued)
    text.write(
        f"launching a prefill of {count * part} tokens takes the host {wall[1] * 1e3:.2f} ms "
        f"({busy[1] * 1e3:.2f} of them on a core) on an idle device, {wall[2] * 1e3:.2f} ({busy[2] * 1e3:.2f}) in the "
        f"mean of {QUEUED} in a row; it takes the device {device[1] * 1e3:.2f} ms\n"
    )


def _host(runner: Runner) -> Any:
    return np.array([getattr(runner, "host_seconds", 0.0), getattr(runner, "host_busy_seconds", 0.0)])


def _profiled(name: str, runner: Runner, launch: Any, path: Path, text: io.StringIO) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    try:
        every = {"experimental_config": torch._C._profiler._ExperimentalConfig(profile_all_threads=True)}
    except TypeError:  # a version without
        every = {}
    before = _host(runner)
    with torch.profiler.profile(activities=activities, **every) as profiler:
        begin = time.perf_counter()
        done = launch().result()
        wall = time.perf_counter() - begin
    host = _host(runner) - before
    found = profiler.key_averages()
    kernels = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    busy = sum(event.device_time for event in kernels)
    text.write(
        f"\n== {name} (under the profiler): {done.seconds * 1e3:.3f} ms on the device, {len(kernels)} kernels and "
        f"copies of together {busy / 1e3:.3f} ms; {wall * 1e3:.3f} ms until it landed; {host[0] * 1e3:.3f} ms of the "
        f"host, {host[1] * 1e3:.3f} of them on a core\n"
    )
    for order in ("self_device_time_total", "self_cpu_time_total"):
        text.write(found.table(sort_by=order, row_limit=ROWS, max_name_column_width=100))
        text.write("\n")
    profiler.export_chrome_trace(str(path.with_name(f"{path.stem}-{name.split(',')[0].replace(' ', '-')}.json.gz")))

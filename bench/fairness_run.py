"""The fairness policies against each other, on the real server, with memory for a third of what runs at once.

Capacity is what `fcfs` does when a part of workload 0 comes all at once. Every arm then serves the same
requests at the same times, from a fresh server. For `vtc` a second load comes all at once: two tenants, one with ten
times as many requests as the other.
"""

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from rich.console import Console
from rich.table import Table

from forebay.bench.arithmetic import read_arithmetic
from forebay.bench.client import CompletionClient, Outcome
from forebay.bench.errors import BenchError
from forebay.bench.fairness_figures import Served, draw, jain, memory_asked, service, summarise
from forebay.bench.figures import Figure, write_figures
from forebay.bench.generate import generate
from forebay.bench.lengths import Lengths, RandomPrompts, Vocabulary
from forebay.bench.models_file import ModelLoad
from forebay.bench.progress import ProgressDisplay
from forebay.bench.server_process import ServerProcess, scheduler_command
from forebay.bench.workload_file import Workload
from forebay.runtime.config_schema import parse_bytes
from forebay.runtime.loop import on_signals, run

ARMS: Mapping[str, dict[str, Any]] = {
    "fcfs": {"fairness": "fcfs"},
    "cfs-recompute": {"fairness": "cfs"},
    "cfs-host": {"fairness": "cfs", "spill": "512MiB"},
    "cfs-peer": {"fairness": "cfs"},
    "vtc": {"fairness": "vtc", "spill": "512MiB"},
}
"""What each arm says of its device. `cfs-peer` has a second device that lends."""

MODEL = "llm"
PEER_MEMORY = "576MiB"  # a tenth of it is kept
SLAB = "8MiB"
PROMPTS = Lengths.parse("lognormal:48:0.6")
OUTPUTS = Lengths.parse("lognormal:48:0.6")
MOST_PROMPT, MOST_OUTPUT = 144, 144
SAMPLE = 60
"""Requests by which capacity is measured."""
TENANTS = ("greedy",) * 10 + ("modest",)
WARM_UP_S = 60.0
STOP_S = 30.0


@dataclass(frozen=True)
class Comparison:
    """`load`: arrivals over capacity; `memory`: the pool's, in the configuration's words; workloads are numbered, and
    `seeds` of them are run from number `first` on."""

    model: Path
    requests: int
    load: float
    memory: str
    seeds: int
    arms: tuple[str, ...]
    first: int = 0


def compare(comparison: Comparison, folder: Path, json: Path | None, arguments: list[str] | None) -> int:
    """Runs everything, prints a table, draws it, writes the figures; returns the exit status."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        capacity, runs, shares = run(_run(comparison, folder))
    except asyncio.CancelledError:
        print("interrupted: there is nothing to report", file=sys.stderr)
        return 1
    console = Console()
    table = Table(
        title=f"{comparison.requests} requests at {comparison.load:g} x capacity, {comparison.memory}", box=None
    )
    figures: dict[str, Figure] = {
        "seeds": Figure(comparison.seeds, "1"),
        "rate": Figure(comparison.load * capacity, "requests/s", capacity),
    }
    summaries = {arm: summarise(served) | _asked(comparison, served) for arm, served in runs.items()}
    for column in ("", *summaries):
        table.add_column(column, justify="right")
    for name, (_, unit) in next(iter(summaries.values())).items():
        table.add_row(f"{name} ({unit})", *(f"{values[name][0]:.3g}" for values in summaries.values()))
        beside = summaries["fcfs"][name][0] if "fcfs" in summaries else None
        for arm, values in summaries.items():
            figures[f"{arm}_{name}"] = Figure(values[name][0], unit, beside if arm != "fcfs" else None)
    console.print(table)
    if shares:
        ratios = [max(share.values()) / min(share.values()) for share in shares]
        figures["vtc_tenants_ratio"] = Figure(max(ratios), "1", 1.0)
        figures["vtc_tenants_jain"] = Figure(min(jain(list(share.values())) for share in shares), "1", 1.0)
        console.print(f"vtc, both tenants waiting: the most served over the least {max(ratios):.3f} (worst seed)")
    draw(runs, folder / "fairness.png", comparison.requests)
    console.print(f"plot: {folder / 'fairness.png'}")
    if json is not None:
        write_figures(json, "bench.fairness", ["python", "-m", "bench.fairness", *(arguments or [])], figures)
    return int(
        any(outcome.failure is not None for served in runs.values() for run in served for outcome in run.outcomes)
    )


def _asked(comparison: Comparison, served: Sequence[Served]) -> dict[str, tuple[float, str]]:
    """How far the pool was overfilled; a CPU device keeps its cache in float32."""
    token_bytes = read_arithmetic(comparison.model, "float32").kv_bytes
    mean, peak = memory_asked(served, token_bytes, parse_bytes(comparison.memory))
    return {"memory_asked_mean": (mean, "pools"), "memory_asked_peak": (peak, "pools")}


def _workload(comparison: Comparison, seed: int, rate: float) -> Workload:
    source = RandomPrompts(Vocabulary.parse("1000:30000"), PROMPTS, OUTPUTS, MOST_PROMPT, MOST_OUTPUT)
    loads = [ModelLoad(MODEL, rate, str(comparison.model))]
    return generate(loads, lambda load: source, seed=seed, num_requests=comparison.requests)


def _configuration(comparison: Comparison, arm: str, folder: Path) -> Path:
    path = folder / f"{arm}.yaml"
    device = {"device": "cpu:0", "memory": comparison.memory, "slab": SLAB, "threads": 1, **ARMS[arm]}
    devices = [device]
    if arm == "cfs-peer":
        devices.append({"device": "cpu:1", "memory": PEER_MEMORY, "slab": SLAB, "threads": 1, "lend": True})
    model = {"name": MODEL, "path": str(comparison.model.resolve()), "placement": ["cpu:0"]}
    path.write_text(yaml.safe_dump({"devices": devices, "models": [model]}))
    return path


async def _run(comparison: Comparison, folder: Path) -> tuple[float, dict[str, list[Served]], list[dict[str, float]]]:
    """Capacity in requests per second, what each arm did, and what each tenant of the burst was given, by seed."""
    task = asyncio.current_task()
    assert task is not None

    def end() -> None:
        task.cancel()

    on_signals(end)
    runs: dict[str, list[Served]] = {}
    shares: list[dict[str, float]] = []
    with ProgressDisplay(sys.stderr) as progress:
        progress.start("capacity", None)
        async with _server(comparison, "fcfs", folder) as server:
            url = await server.ready(asyncio.Event(), lambda what: progress.update(0, what))
            sample = _workload(comparison, 0, 1.0).first(SAMPLE)
            whole = await _serve(url, sample, [0.0] * len(sample.requests), ("",))
        capacity = len(sample.requests) / whole.seconds
        # All arms of a seed one after the other: what else the machine does changes with the hour.
        for seed in range(comparison.first, comparison.first + comparison.seeds):
            for arm in comparison.arms:
                progress.start(f"{arm}, seed {seed}", None)
                workload = _workload(comparison, seed, comparison.load * capacity)
                async with _server(comparison, arm, folder) as server:
                    url = await server.ready(asyncio.Event(), lambda what: progress.update(0, what))
                    progress.start(f"{arm}, seed {seed}", comparison.requests)
                    if arm == "cfs-peer":
                        await _lent(url)
                    runs.setdefault(arm, []).append(await _serve(url, workload, workload.arrivals, TENANTS))
                    first = summarise(runs[arm][-1:])
                    progress.update(
                        comparison.requests, f"time to first token {first['ttft_p99'][0]:.1f} s at p99", last=True
                    )
                    if arm == "vtc":
                        burst = await _serve(url, workload, [0.0] * len(workload.requests), TENANTS)
                        shares.append(service(burst))
    return capacity, runs, shares


def _server(comparison: Comparison, arm: str, folder: Path) -> ServerProcess:
    return ServerProcess(scheduler_command(_configuration(comparison, arm, folder)), folder / f"{arm}.log", STOP_S)


async def _lent(url: str) -> None:
    """Until the second device offers what it does not need: it waits a while before it does."""
    async with aiohttp.ClientSession(url) as session:
        for _ in range(int(WARM_UP_S / 0.5)):
            async with session.get("/gpus") as response:
                offered = {gpu["index"]: gpu["free"] for gpu in await response.json()}
            if offered.get(1, 0) > 0:
                return
            await asyncio.sleep(0.5)
    raise BenchError(f"{url}: the second device has lent nothing within {WARM_UP_S:g} s; see its log")


async def _serve(url: str, workload: Workload, arrivals: Sequence[float], tenants: Sequence[str]) -> Served:
    """All requests at their times, whether or not earlier ones have finished."""
    async with CompletionClient(url) as client:
        begin = time.perf_counter() + 0.1

        async def send(place: int) -> Outcome:
            request = workload.requests[place]
            scheduled = begin + arrivals[place]
            tenant = tenants[place % len(tenants)]
            outcome = Outcome(
                request.model_name, request.prompt_tokens, request.output_tokens, scheduled, tenant=tenant
            )
            await asyncio.sleep(max(0.0, scheduled - time.perf_counter()))
            await client.complete(outcome, request.prompt)
            return outcome

        outcomes = await asyncio.gather(*map(send, range(len(workload.requests))))
        return Served(tuple(outcomes), begin, time.perf_counter() - begin)

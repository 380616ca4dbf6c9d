"""The policies against each other, on the real server: one device, three models, the same requests for each policy.

One policy after the other serves all workloads; every server starts fresh, so that none profits from another's cache.
The SLO's baseline is measured once, by lone requests. What the device can do is measured by a burst, and the rate is a
share of that, so that a machine of any speed is kept busy. Attainment is taken over the pooled requests of all seeds.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import yaml
from rich.console import Console
from rich.table import Table

from forebay.bench.baseline import Baseline
from forebay.bench.client import Outcome
from forebay.bench.errors import Interrupted
from forebay.bench.figures import Figure, write_figures
from forebay.bench.generate import generate
from forebay.bench.lengths import Lengths, RandomPrompts, Vocabulary
from forebay.bench.measure import Measurement, Plan, measure_run
from forebay.bench.models_file import ModelLoad
from forebay.bench.progress import ProgressDisplay
from forebay.bench.report import summarize, write_report
from forebay.bench.server_process import ServerProcess, scheduler_command
from forebay.bench.shallow_model import write_shallow
from forebay.bench.workload_file import Workload
from forebay.runtime.loop import on_signals, run

POLICIES = ("adbs", "roundrobin", "temporal", "fix", "fix-adbs")
POPULARITIES: Mapping[str, tuple[float, ...]] = {"skewed": (12, 5, 3), "even": (1, 1, 1)}
PROMPTS = Lengths.parse("lognormal:24:0.6")
OUTPUTS = Lengths.parse("lognormal:8:0.5")
MOST_PROMPT, MOST_OUTPUT = 96, 24
STOP_S = 30.0


BURST = 128
"""Requests that show what the device can do when it always has enough of them to batch."""


@dataclass(frozen=True)
class Comparison:
    """`load` is the rate as a share of what the device did of a burst, `rate` (in requests per second over all models)
    replaces it; `seconds` of arrivals for each of `seeds` workloads. The first `layers` layers of `model` are served:
    on two slow cores that makes a thousand requests a policy in a quarter of an hour, where all 30 layers of SmolLM2
    made it 150 (at a load of 0.8 two runs of one policy lay 10 points apart in either case; a queue that is always
    about to overflow is chance)."""

    model: Path
    load: float
    rate: float | None
    seconds: float
    seeds: int
    scale: float
    layers: int


@dataclass(frozen=True)
class Arm:
    """One policy's outcomes at one popularity, of all seeds."""

    policy: str
    popularity: str
    outcomes: tuple[Outcome, ...]

    def attainment(self, baseline: Baseline, scale: float, model: str | None = None) -> float:
        chosen = [outcome for outcome in self.outcomes if model in (None, outcome.model)]
        share = summarize(chosen, baseline, [scale], 1.0).slo_attainment
        return next(iter(share.values())) or 0.0


def compare(comparison: Comparison, folder: Path, json: Path | None, arguments: list[str] | None) -> int:
    """Runs everything, prints a table, draws it, writes the figures; returns the exit status."""
    folder.mkdir(parents=True, exist_ok=True)
    shallow = write_shallow(comparison.model, comparison.layers, folder / "model")
    comparison = replace(comparison, model=shallow)
    try:
        arms, baseline, rate, capacity = run(_run(comparison, folder))
    except Interrupted:
        print(f"interrupted; the reports of what was measured are in {folder}", file=sys.stderr)
        return 130
    names = _names()
    console = Console()
    figures: dict[str, Figure] = {"rate": Figure(rate, "requests/s", capacity)}
    console.print(f"{rate:.2f} requests/s, a burst was done at {capacity:.2f} requests/s")
    for popularity in POPULARITIES:
        table = Table(title=f"{popularity}: % of requests within {comparison.scale:g} x alone", box=None)
        table.add_column("policy")
        for column in ("all", *names, "failed"):
            table.add_column(column, justify="right")
        group = [arm for arm in arms if arm.popularity == popularity]
        temporal = next(arm for arm in group if arm.policy == "temporal")
        for arm in group:
            shares = [arm.attainment(baseline, comparison.scale, name) for name in (None, *names)]
            failed = sum(outcome.failure is not None for outcome in arm.outcomes)
            table.add_row(arm.policy, *(f"{100 * share:.1f}" for share in shares), str(failed))
            for name, share in zip(("all", *names), shares, strict=True):
                beside = temporal.attainment(baseline, comparison.scale, None if name == "all" else name)
                figures[f"{popularity}_{arm.policy}_{name}"] = Figure(share, "share", beside)
        console.print(table)
    _draw(figures, folder / "policies.png", comparison)
    console.print(f"plot: {folder / 'policies.png'}")
    if json is not None:
        write_figures(json, "bench.policies", ["python", "-m", "bench.policies", *(arguments or [])], figures)
    return int(any(outcome.failure is not None for arm in arms for outcome in arm.outcomes))


def _names() -> list[str]:
    return [f"llm-{number}" for number in range(3)]


def _workload(model: Path, rate: float, seconds: float, weights: Sequence[float], seed: int) -> Workload:
    loads = [
        ModelLoad(name, rate * weight / sum(weights), str(model))
        for name, weight in zip(_names(), weights, strict=True)
    ]
    source = RandomPrompts(Vocabulary.parse("1000:30000"), PROMPTS, OUTPUTS, MOST_PROMPT, MOST_OUTPUT)
    return generate(loads, lambda load: source, seed=seed, duration=seconds)


def _configuration(comparison: Comparison, policy: str, weights: Sequence[float], folder: Path) -> Path:
    path = folder / f"{policy}.yaml"
    models = [
        {"name": name, "path": str(comparison.model.resolve()), "popularity": weight, "placement": ["cpu:0"]}
        for name, weight in zip(_names(), weights, strict=True)
    ]
    device = {"device": "cpu:0", "memory": "512MiB", "slab": "16MiB", "threads": 1}
    path.write_text(yaml.safe_dump({"policy": policy, "devices": [device], "models": models}))
    return path


class _Runs:
    """Measurements one after the other; the first one also measures the baseline, which all others share."""

    def __init__(self, comparison: Comparison, folder: Path, progress: ProgressDisplay) -> None:
        self._stop = asyncio.Event()
        on_signals(self._stop.set)
        self._comparison = comparison
        self._folder = folder
        self._progress = progress
        self.baseline: Baseline | None = None

    async def measure(
        self, policy: str, popularity: str, workloads: Sequence[Workload], what: str
    ) -> AsyncIterator[Measurement]:
        """Starts a server with that policy and replays the workloads, one after the other."""
        config = _configuration(self._comparison, policy, POPULARITIES[popularity], self._folder)
        async with ServerProcess(scheduler_command(config), self._folder / f"{policy}.log", STOP_S) as server:
            self._progress.start(f"{popularity} {policy}", None)
            url = await server.ready(self._stop, lambda what: self._progress.update(0, what))
            for number, workload in enumerate(workloads):
                name = f"{popularity}, {policy}, {what} {number}"
                plan = Plan(url, workload, name, [f"bench.policies: {name}"], baseline=self.baseline)
                measured = await measure_run(plan, self._progress, self._stop)
                if self._stop.is_set():
                    raise Interrupted(f"interrupted in {name}")
                self.baseline = measured.report.baseline
                write_report(self._folder / f"{popularity}-{policy}-{what}-{number}.json", measured.report)
                yield measured


async def _run(comparison: Comparison, folder: Path) -> tuple[list[Arm], Baseline, float, float]:
    """All arms, the baseline, the rate, and the capacity in requests per second."""
    arms: list[Arm] = []
    with ProgressDisplay(sys.stderr) as progress:
        runs = _Runs(comparison, folder, progress)
        even = POPULARITIES["even"]
        burst = _workload(comparison.model, float(BURST), 2.0, even, seed=1000)
        burst = msgspec.structs.replace(burst, arrivals=[0.0] * BURST, requests=burst.requests[:BURST])
        [at_once] = [measured async for measured in runs.measure("adbs", "even", [burst], "burst")]
        capacity = BURST / at_once.run.duration_s
        rate = comparison.rate or comparison.load * capacity
        for popularity, weights in POPULARITIES.items():
            workloads = [
                _workload(comparison.model, rate, comparison.seconds, weights, seed) for seed in range(comparison.seeds)
            ]
            for policy in POLICIES:
                outcomes: list[Outcome] = []
                async for measured in runs.measure(policy, popularity, workloads, "seed"):
                    outcomes += measured.run.outcomes
                arms.append(Arm(policy, popularity, tuple(outcomes)))
    assert runs.baseline is not None
    return arms, runs.baseline, rate, capacity


def _draw(figures: Mapping[str, Figure], path: Path, comparison: Comparison) -> None:
    """Bars for each policy, a group for each model, a panel for each popularity."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(picture)
    groups = ("all", *_names())
    for axes, popularity in zip(picture.subplots(1, len(POPULARITIES), sharey=True), POPULARITIES, strict=True):
        for number, policy in enumerate(POLICIES):
            shares = [100 * (figures[f"{popularity}_{policy}_{name}"].value or 0.0) for name in groups]
            places = [group + 0.16 * (number - 2) for group in range(len(groups))]
            axes.bar(places, shares, width=0.15, label=policy)
        weights = " : ".join(f"{weight:g}" for weight in POPULARITIES[popularity])
        axes.set_title(f"{popularity} ({weights})", fontsize=10)
        axes.set_xticks(range(len(groups)), groups)
        axes.set_ylim(0, 105)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    picture.axes[0].set_ylabel(f"% of requests within {comparison.scale:g} x alone")
    picture.legend(*picture.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    picture.savefig(path, dpi=110)

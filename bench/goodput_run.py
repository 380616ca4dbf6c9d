"""A search for goodput against a server: probes by replay, kept in a folder, and what is told of them."""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from forebay.bench.baseline import Baseline, read_baseline, write_baseline
from forebay.bench.errors import BenchError, Interrupted
from forebay.bench.figures import Figure
from forebay.bench.measure import DEFAULT_SCALES, Plan, measure
from forebay.bench.probes import ProbeFile, ProbeFolder, RateSource, Setup, relabelled
from forebay.bench.progress import ProgressDisplay
from forebay.bench.report import Report
from forebay.bench.search import Search, Seen
from forebay.bench.series import ALL


@dataclass(frozen=True)
class GoodputPlan:
    """What to search. `setup` names server and workload for the folder; `baseline` is measured once and kept in the
    folder where it is None; `timeout_s` bounds each request."""

    base_url: str
    source: RateSource
    setup: Setup
    command: Sequence[str]
    search: Search
    scale: float
    folder: ProbeFolder
    baseline: Baseline | None
    timeout_s: float


@dataclass(frozen=True)
class Goodput:
    """A search that is over: all probes, ascending by rate. `rate` is None where even the lowest one missed."""

    search: Search
    scale: float
    probes: Sequence[ProbeFile]

    @property
    def seen(self) -> list[Seen]:
        return [Seen(probe.rate, attainment(probe.report, self.scale)) for probe in self.probes]

    @property
    def rate(self) -> float | None:
        return self.search.bracket(self.seen)[0]

    @property
    def sentence(self) -> str:
        wanted = f"{100 * self.search.target:.4g} % of the requests within {self.scale:g} x alone"
        missed = self.search.bracket(self.seen)[1]
        match self.search.verdict(self.seen):
            case "found":
                return f"goodput {self.rate:.4g} requests/s: {wanted}, and no longer at {missed:.4g}"
            case "above":
                return f"goodput at least {self.rate:.4g} requests/s, the highest rate allowed: {wanted}"
            case "below":
                return f"no goodput down to {self.probes[0].rate:.4g} requests/s: never {wanted}"


def attainment(report: Report, scale: float) -> float:
    """Of all models' requests together. Raises BenchError where the report does not say."""
    share = report.total.slo_attainment.get(f"{scale:g}")
    if share is None:
        raise BenchError(f"a kept probe has no attainment at scale {scale:g}: give another --folder")
    return share


async def find_goodput(plan: GoodputPlan, progress: ProgressDisplay, stop: asyncio.Event) -> Goodput:
    """Probes until the search is over. Raises BenchError, and Interrupted once `stop` is set; what was probed until
    then is kept."""
    probes = plan.folder.open(plan.setup)
    kept = plan.folder.folder / "baseline.json"
    baseline = plan.baseline
    if baseline is None and kept.exists():
        baseline = read_baseline(kept)
    while True:
        result = Goodput(plan.search, plan.scale, sorted(probes, key=lambda probe: probe.rate))
        rate = plan.search.next_rate(result.seen)
        if rate is None:
            return result
        progress.start("goodput", None)
        progress.update(0, f"probe {len(probes) + 1}: {rate:g} requests/s", last=True)
        workload, time_scale = plan.source(rate)
        report = await measure(
            Plan(
                base_url=plan.base_url,
                # By chance, not by a seed: also a probe that was broken off left its prompts in the server's cache.
                workload=relabelled(workload, secrets.randbits(32)),
                origin=plan.setup.workload,
                command=plan.command,
                scales=sorted({*DEFAULT_SCALES, plan.scale}),
                time_scale=time_scale,
                timeout_s=plan.timeout_s,
                baseline=baseline,
            ),
            progress,
            stop,
        )
        if report.ended == "interrupted":
            raise Interrupted(f"interrupted in the probe at {rate:g} requests/s; {len(probes)} probes are kept")
        if report.ended == "server_lost":
            raise BenchError(f"the server was gone in the probe at {rate:g} requests/s; {len(probes)} probes are kept")
        if baseline is None:
            baseline = report.baseline
            write_baseline(kept, baseline)
        probe = ProbeFile(rate, report)
        plan.folder.write(probe)
        probes.append(probe)
        progress.start("goodput", None)
        progress.update(1, f"{rate:g} requests/s: {100 * attainment(report, plan.scale):.1f} %", last=True)


def print_probes(result: Goodput, console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, title=f"Requests within {result.scale:g} x alone")
    for name in (
        "requests/s",
        "within %",
        "requests",
        "failed",
        "took s",
        "TTFT p99 s",
        "TPOT p99 ms",
        "latency p99 s",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for probe, seen in zip(result.probes, result.seen, strict=True):
        total = probe.report.total
        table.add_row(
            f"{probe.rate:g}",
            f"{100 * seen.attainment:.1f}",
            str(total.requests),
            str(total.failed),
            f"{probe.report.duration_s:.0f}",
            _cell(total.ttft_s.p99, 1, 2),
            _cell(total.tpot_s.p99, 1e-3, 1),
            _cell(total.latency_s.p99, 1, 2),
        )
    console.print(table)
    console.print(result.sentence, highlight=False)


def _cell(value: float | None, unit: float, digits: int) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"


def draw_probes(result: Goodput, folder: Path) -> Path:
    """The file with the plot. Raises OSError."""
    from forebay.bench.plots import draw_attainment_over_rate

    points: list[tuple[float, dict[str, float | None]]] = []
    for probe, seen in zip(result.probes, result.seen, strict=True):
        shares = {name: group.slo_attainment[f"{result.scale:g}"] for name, group in probe.report.models.items()}
        points.append((probe.rate, {**shares, ALL: seen.attainment}))
    path = folder / "goodput.png"
    draw_attainment_over_rate(points, scale=result.scale, target=result.search.target, found=result.rate, path=path)
    return path


def goodput_figures(result: Goodput) -> dict[str, Figure]:
    """The goodput is 0 where even the lowest rate missed."""
    figures = {"goodput_per_s": Figure(result.rate or 0.0, "1/s"), "probes": Figure(len(result.probes), "1")}
    at_goodput = [probe.report.total for probe in result.probes if probe.rate == result.rate]
    for total in at_goodput:
        figures["output_tokens_per_s_at_goodput"] = Figure(total.output_tokens_per_s, "1/s")
    return figures

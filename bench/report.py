"""Numbers of a replay: what goes into report.json, and the table that people read."""

import os
import platform
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forebay.bench.baseline import Baseline
from forebay.bench.client import Outcome

SCALES_A_TABLE = 10
"""More SLO scales than this are printed as several tables, which fit into a terminal."""

Ending: TypeAlias = Literal["complete", "server_lost", "interrupted"]


class Summary(msgspec.Struct, frozen=True):
    """Seconds; null where nothing completed. Percentiles are of all values pooled, interpolated linearly."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Summary":
        if not values:
            return cls()
        p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
        return cls(float(np.mean(values)), p50, p90, p99)


class Group(msgspec.Struct, frozen=True):
    """A model's requests, or all of them. TTFT and latency count from the scheduled arrival; TPOT is over the output
    tokens after the first, of requests with more than one; `send_delay_s` is how late the load generator itself
    was. `failures` counts by kind; `slo_attainment` maps a scale to a share of all requests. `prefix_cache_hit_rate` is
    the share of prompt tokens that the server took from its prefix cache, null where it does not say."""

    requests: int
    completed: int
    failed: int
    failures: dict[str, int]
    ttft_s: Summary
    tpot_s: Summary
    latency_s: Summary
    send_delay_s: Summary
    slo_attainment: dict[str, float | None]
    output_tokens: int
    output_tokens_per_s: float | None
    prefix_cache_hit_rate: float | None


class Report(msgspec.Struct, frozen=True):
    """`ended` says whether the replay ran to its end. `duration_s` is from its start to its last ending. `errors`
    holds one message of each kind of failure."""

    total: Group
    models: dict[str, Group]
    commit: str | None
    command: list[str]
    baseline: Baseline
    ended: Ending
    duration_s: float
    base_url: str
    workload: str
    time_scale: float
    errors: dict[str, str]
    machine: dict[str, str | int | None]


def summarize(outcomes: Sequence[Outcome], baseline: Baseline, scales: Sequence[float], duration_s: float) -> Group:
    """The numbers of these requests; `duration_s` is that of the whole replay."""
    completed = [outcome for outcome in outcomes if outcome.failure is None]
    failures = Counter(outcome.failure for outcome in outcomes if outcome.failure is not None)
    tokens = sum(outcome.tokens or 0 for outcome in completed)
    return Group(
        requests=len(outcomes),
        completed=len(completed),
        failed=len(outcomes) - len(completed),
        failures=dict(sorted(failures.items())),
        ttft_s=Summary.of([ttft_s(outcome) for outcome in completed]),
        tpot_s=Summary.of([tpot_s(outcome) for outcome in completed if outcome.output_tokens > 1]),
        latency_s=Summary.of([latency_s(outcome) for outcome in completed]),
        send_delay_s=Summary.of([outcome.sent - outcome.scheduled for outcome in outcomes if outcome.sent is not None]),
        slo_attainment={f"{scale:g}": _attainment(outcomes, completed, baseline, scale) for scale in scales},
        output_tokens=tokens,
        output_tokens_per_s=tokens / duration_s if duration_s > 0 else None,
        prefix_cache_hit_rate=hit_rate(completed),
    )


def examples(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """The first message of each kind of failure."""
    errors: dict[str, str] = {}
    for outcome in outcomes:
        if outcome.failure is not None:
            errors.setdefault(outcome.failure, f"{outcome.model}: {outcome.message}")
    return errors


def ttft_s(outcome: Outcome) -> float:
    return outcome.first_token - outcome.scheduled


def latency_s(outcome: Outcome) -> float:
    return outcome.end - outcome.scheduled


def tpot_s(outcome: Outcome) -> float:
    return (outcome.end - outcome.first_token) / (outcome.output_tokens - 1)


def hit_rate(completed: Sequence[Outcome]) -> float | None:
    """Of the requests for which the server said how much of the prompt it had."""
    told = [
        (outcome.cached_tokens, outcome.prompt_tokens) for outcome in completed if outcome.cached_tokens is not None
    ]
    prompt_tokens = sum(prompt for _, prompt in told)
    return sum(cached for cached, _ in told) / prompt_tokens if prompt_tokens else None


def _attainment(
    outcomes: Sequence[Outcome], completed: Sequence[Outcome], baseline: Baseline, scale: float
) -> float | None:
    """The share of all requests, failed ones too, that took at most `scale` times as long as they would alone."""
    if not outcomes:
        return None
    met = sum(
        latency_s(outcome)
        <= scale * baseline.models[outcome.model].latency_s(outcome.prompt_tokens, outcome.output_tokens)
        for outcome in completed
    )
    return met / len(outcomes)


def write_report(path: Path, report: Report) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    os.replace(partial, path)


def print_report(report: Report, console: Console) -> None:
    """Requests, latencies, then the SLO attainment, a line for each model and one for all. Fits 80 columns; a model's
    name that does not is broken, never cut."""
    rows = [(Text(name), group) for name, group in [*sorted(report.models.items()), ("all", report.total)]]
    requests = _table("Requests", ("requests", "failed", "tokens/s", "cached %"))
    latencies = _table("Latency (p50 / p90 / p99)", ("TTFT s", "TPOT ms", "latency s"))
    for name, group in rows:
        requests.add_row(
            name,
            str(group.requests),
            str(group.failed),
            _number(group.output_tokens_per_s),
            _percent(group.prefix_cache_hit_rate),
        )
        latencies.add_row(name, _cells(group.ttft_s), _cells(group.tpot_s, unit=1e-3), _cells(group.latency_s))
    console.print(requests)
    console.print(latencies)
    scales = list(report.total.slo_attainment)
    for begin in range(0, len(scales), SCALES_A_TABLE):
        shown = scales[begin : begin + SCALES_A_TABLE]
        attainment = _table("SLO attainment (% of requests) by scale" if begin == 0 else None, shown, padding=0)
        for name, group in rows:
            attainment.add_row(name, *(_percent(group.slo_attainment[scale]) for scale in shown))
        console.print(attainment)
    if report.total.failures:
        console.print(f"{report.total.failed} of {report.total.requests} requests failed:", highlight=False)
        for kind, count in report.total.failures.items():
            console.print(f"  {count} {kind}, first: {report.errors[kind]}", highlight=False, markup=False)


def _table(title: str | None, numbers: Sequence[str], padding: int = 1) -> Table:
    """A column for the model, whose name may be folded, and one for each of `numbers`, which stay whole."""
    table = Table(box=box.SIMPLE_HEAD, title=title, padding=(0, padding))
    table.add_column("model", overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _number(value: float | None) -> str:
    """Three significant digits, at most two of them behind the point."""
    if value is None:
        return "-"
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _cells(summary: Summary, unit: float = 1.0) -> str:
    values = (summary.p50, summary.p90, summary.p99)
    return " / ".join(_number(None if value is None else value / unit) for value in values)


def commit_of(folder: Path) -> str | None:
    """The commit checked out in `folder`, with "-dirty" where files differ from it; None outside of a checkout."""
    try:
        head = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()
        changes = subprocess.run(
            ["git", "-C", str(folder), "status", "--porcelain"],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}-dirty" if changes else head


def describe_machine() -> dict[str, str | int | None]:
    """The machine that made the load."""
    return {"system": platform.platform(), "python": platform.python_version(), "cpus": os.cpu_count()}

"""Figures of a fairness run: latencies, throughput, and how evenly tenants were served."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import fmean

from forebay.bench.client import Outcome
from forebay.transport.messages import BLOCK_TOKENS

INPUT_WEIGHT, OUTPUT_WEIGHT = 1, 2
"""What a tenant was given for a token of a prompt, and for one of an answer (VTC, OSDI 2024)."""


@dataclass(frozen=True)
class Served:
    """One workload that was served, in the order of arrival. Times are seconds of time.perf_counter."""

    outcomes: tuple[Outcome, ...]
    begin: float
    seconds: float

    @property
    def good(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.failure is None]


def percentile(values: Sequence[float], part: float) -> float:
    """By the nearest rank. NaN without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else float("nan")


def jain(values: Sequence[float]) -> float:
    """Jain's index: 1 where all are equal, 1/n where one has everything."""
    total = sum(values)
    return total * total / (len(values) * sum(value * value for value in values)) if total else float("nan")


def summarise(runs: Sequence[Served]) -> dict[str, tuple[float, str]]:
    """Values and units, over the requests of all runs together; throughput is the mean of the runs'."""
    outcomes = [outcome for run in runs for outcome in run.good]
    first = [outcome.first_token - outcome.scheduled for outcome in outcomes]
    whole = [outcome.end - outcome.scheduled for outcome in outcomes]
    each = [
        (outcome.end - outcome.first_token) / (outcome.output_tokens - 1)
        for outcome in outcomes
        if outcome.output_tokens > 1
    ]
    values: dict[str, tuple[float, str]] = {}
    for name, times in (("ttft", first), ("tpot", each), ("e2e", whole)):
        for part in (0.5, 0.9, 0.99):
            values[f"{name}_p{round(100 * part)}"] = percentile(times, part), "s"
    values["throughput"] = fmean(sum(o.output_tokens for o in run.good) / run.seconds for run in runs), "1/s"
    values["jain"] = fmean(jain(_slowness(run)) for run in runs), "1"
    values["failed"] = float(sum(len(run.outcomes) - len(run.good) for run in runs)), "1"
    return values


def _slowness(run: Served) -> list[float]:
    """For each tenant the mean of end-to-end time over tokens: who asks for more may take longer."""
    groups: dict[str, list[float]] = {}
    for outcome in run.good:
        tokens = INPUT_WEIGHT * outcome.prompt_tokens + OUTPUT_WEIGHT * outcome.output_tokens
        groups.setdefault(outcome.tenant, []).append((outcome.end - outcome.scheduled) / tokens)
    return [fmean(group) for group in groups.values()]


def service(run: Served) -> dict[str, float]:
    """What each tenant was given, in weighted tokens, until the first of them had no request without a first token: as
    long as all of them waited."""
    waits: dict[str, float] = {}
    for outcome in run.good:
        waits[outcome.tenant] = max(waits.get(outcome.tenant, 0.0), outcome.first_token)
    until = min(waits.values())
    given = dict.fromkeys(waits, 0.0)
    for outcome in run.good:
        if outcome.first_token <= until:
            # A chunk may carry several tokens, or a token no text.
            share = sum(at <= until for at in outcome.chunk_times) / len(outcome.chunk_times)
            given[outcome.tenant] += (
                INPUT_WEIGHT * outcome.prompt_tokens + OUTPUT_WEIGHT * share * outcome.output_tokens
            )
    return given


def memory_asked(runs: Sequence[Served], token_bytes: int, pool: int) -> tuple[float, float]:
    """How far memory is overfilled: what the KV cache of all requests that have arrived and not ended would take at
    their full length, over the `pool` (bytes). Its mean over the time in which that is more than the pool, so that
    something has to wait (0 where it never is), and its peak. `token_bytes`: KV cache of one token; a request has whole
    blocks of BLOCK_TOKENS."""
    area = above = peak = 0.0
    for run in runs:
        changes = []
        for outcome in run.outcomes:
            blocks = -(-(outcome.prompt_tokens + outcome.output_tokens) // BLOCK_TOKENS)
            share = blocks * BLOCK_TOKENS * token_bytes / pool
            ended = run.begin + run.seconds if outcome.ended is None else outcome.ended
            changes += [(outcome.scheduled, share), (max(ended, outcome.scheduled), -share)]
        asked = 0.0
        for (at, change), (until, _) in itertools.pairwise(sorted(changes)):
            asked += change
            peak = max(peak, asked)
            if asked > 1:
                area += asked * (until - at)
                above += until - at
    return area / above if above else 0.0, peak


def draw(runs: Mapping[str, Sequence[Served]], path: Path, requests: int) -> None:
    """Time to the first token by order of arrival, one line an arm, the first run of each."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.subplots()
    for arm, served in runs.items():
        times = [o.first_token - o.scheduled if o.failure is None else nan for o in served[0].outcomes]
        axes.plot(range(1, len(times) + 1), times, ".-", linewidth=0.7, markersize=3, label=arm)
    axes.set_xlim(0, requests + 1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("request, in the order of arrival")
    axes.set_ylabel("time to first token (s)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    picture.savefig(path, dpi=110)

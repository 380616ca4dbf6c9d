"""A whole measurement: check the server, measure the baseline, replay, sum up. The command lines call this."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.bench import report as reports
from forebay.bench.baseline import Baseline, measure_baseline
from forebay.bench.client import CompletionClient
from forebay.bench.errors import BenchError, Interrupted
from forebay.bench.progress import ProgressDisplay
from forebay.bench.replayer import Counts, Replayer, Run, reserve_descriptors
from forebay.bench.report import Report
from forebay.bench.workload_file import Workload

FOLDER = Path(__file__).resolve().parent

NOT_BEGUN = "interrupted before the replay began: there is nothing to report"

DEFAULT_SCALES = tuple(float(scale) for scale in range(1, 21))


@dataclass(frozen=True)
class Plan:
    """What to measure. `origin` is the workload's file or another short description for the report; arrival times
    are multiplied by `time_scale`; `timeout_s` bounds each request; `command` is the command line."""

    base_url: str
    workload: Workload
    origin: str
    command: Sequence[str]
    scales: Sequence[float] = DEFAULT_SCALES
    time_scale: float = 1.0
    timeout_s: float = 600.0
    baseline: Baseline | None = None


@dataclass(frozen=True)
class Measurement:
    """`run` is what `report` sums up."""

    report: Report
    run: Run


async def measure(
    plan: Plan,
    progress: ProgressDisplay,
    stop: asyncio.Event,
    adapt: Callable[[Workload, Baseline], Workload] | None = None,
) -> Report:
    """The report of `measure_run`."""
    return (await measure_run(plan, progress, stop, adapt)).report


async def measure_run(
    plan: Plan,
    progress: ProgressDisplay,
    stop: asyncio.Event,
    adapt: Callable[[Workload, Baseline], Workload] | None = None,
) -> Measurement:
    """Runs `plan`. Setting `stop` ends a replay early with a partial report, and raises Interrupted before that.
    `adapt` may cut the workload to what the baseline says the server can do.

    Raises BenchError if the server lacks a model, a lone request fails, or descriptors would not suffice."""
    reserve_descriptors(len(plan.workload.requests))
    async with CompletionClient(plan.base_url, plan.timeout_s) as client:
        offered = await client.models()
        missing = [name for name in plan.workload.models if name not in offered]
        if missing:
            raise BenchError(
                f"{plan.base_url} does not serve {', '.join(map(repr, missing))}, which the workload asks for; it "
                f"serves {', '.join(map(repr, offered)) or 'no model'}"
            )
        if plan.baseline is None:
            baseline = await _until(stop, _measure_baseline(client, plan.workload, progress))
        else:
            baseline = plan.baseline
            baseline.check_models(plan.workload.models, "baseline")
        workload = plan.workload if adapt is None else adapt(plan.workload, baseline)
        if stop.is_set():
            raise Interrupted(NOT_BEGUN)
        progress.start("replay", len(workload.requests))

        def show(counts: Counts) -> None:
            finished = counts.done + counts.failed
            progress.update(finished, str(counts), last=finished == counts.total)

        run = await Replayer(client, workload, plan.time_scale, stop, show).run()
    names = workload.models
    groups = {name: [outcome for outcome in run.outcomes if outcome.model == name] for name in names}
    report = Report(
        total=reports.summarize(run.outcomes, baseline, plan.scales, run.duration_s),
        models={
            name: reports.summarize(group, baseline, plan.scales, run.duration_s) for name, group in groups.items()
        },
        commit=reports.commit_of(FOLDER),
        command=list(plan.command),
        baseline=baseline,
        ended=run.ended,
        duration_s=run.duration_s,
        base_url=client.base_url,
        workload=plan.origin,
        time_scale=plan.time_scale,
        errors=reports.examples(run.outcomes),
        machine=reports.describe_machine(),
    )
    return Measurement(report, run)


async def _measure_baseline(client: CompletionClient, workload: Workload, progress: ProgressDisplay) -> Baseline:
    def advance(model: str, done: int, total: int) -> None:
        if done == 0:
            progress.start("baseline", total)
        progress.update(done, f"{done}/{total} lone requests ({model})", last=done == total)

    return await measure_baseline(client, workload, advance)


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, Baseline]) -> Baseline:
    """The result of `work`, unless `stop` comes first: then `work` is cancelled and Interrupted raised."""
    task = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Interrupted(NOT_BEGUN)
        return task.result()
    finally:
        task.cancel()
        stopping.cancel()
        await asyncio.gather(task, stopping, return_exceptions=True)

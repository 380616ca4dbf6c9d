"""What MuxServe's launch does: serve the models of its configuration, replay a workload, tell how it went."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from forebay.bench.errors import BenchError
from forebay.bench.measure import Plan, measure
from forebay.bench.muxserve_config import read_muxserve_config, select
from forebay.bench.muxserve_translation import DeviceKind, check_models, find_target, notes, split, translate
from forebay.bench.progress import ProgressDisplay
from forebay.bench.replayer import reserve_descriptors
from forebay.bench.report import Group, Report, Summary
from forebay.bench.server_process import ServerProcess, scheduler_command
from forebay.bench.workload_file import Workload, read_workload
from forebay.runtime.config import Configuration, ConfigurationError, load

SCALES = tuple(float(scale) for scale in range(1, 21))
TABLE_SCALES = ("2", "5", "10", "20")


@dataclass(frozen=True)
class Launch:
    """What the command line asks for. `server_port` 0 is any free port; files beside `output` get its name with
    `.yaml` (Forebay's configuration) and `.log` (of the server)."""

    config: Path
    workload_file: Path | None
    split_by_model: str | None
    policy: str
    devices_per_node: int | None
    device: DeviceKind | None
    server_port: int
    output: Path
    command: Sequence[str]


@dataclass(frozen=True)
class Prepared:
    """Everything that can be known before the server starts."""

    configuration: Configuration
    path: Path
    workload: Workload
    origin: str
    notes: Sequence[str]


def prepare(launch: Launch) -> Prepared:
    """Reads and checks all files, and writes Forebay's configuration. Raises BenchError."""
    config, remarks = read_muxserve_config(launch.config)
    models, more = select(launch.config, config, launch.split_by_model)
    gpus = {gpu for model in models for replica in model.placement for gpu in replica}
    if launch.devices_per_node is not None and launch.devices_per_node not in (config.num_gpus, len(gpus)):
        raise BenchError(
            f"--nproc_per_node: is {launch.devices_per_node}; {launch.config} has num_gpus {config.num_gpus}, and a "
            f"GPU has one worker process: give the same number, or leave it out"
        )
    origin = _workload_file(launch, None if config.workloads is None else config.workloads.workload_file)
    workload = read_workload(origin)
    if launch.split_by_model is not None:
        workload = split(workload, launch.split_by_model, str(origin))
    check_models(workload, models, str(origin))
    target = find_target(launch.device, config.num_gpus)
    path = launch.output.with_suffix(".yaml")
    if path.resolve() in (launch.config.resolve(), launch.output.resolve(), origin.resolve()):
        raise BenchError(
            f"--output {launch.output}: Forebay's configuration goes beside it, to {path}, which would overwrite "
            f"another file of this run: give a name of its own that ends in .json"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"# {launch.config} as Forebay serves it, made by python -m bench.muxserve.\n"
        + yaml.safe_dump(translate(config, models, workload, target, launch.policy), sort_keys=False)
    )
    try:
        configuration = load(path)
    except ConfigurationError as error:
        raise BenchError(str(error)) from error
    return Prepared(configuration, path, workload, str(origin), [*remarks, *more, *notes(config, models, target)])


def _workload_file(launch: Launch, configured: str | None) -> Path:
    if launch.workload_file is not None and configured is not None:
        raise BenchError(
            f"--workload-file {launch.workload_file}: {launch.config} has workloads.workload_file {configured!r} too; "
            f"give one of them"
        )
    if launch.workload_file is not None:
        return launch.workload_file
    if configured is None:
        raise BenchError(
            f"{launch.config}: workloads.workload_file is empty; give --workload-file FILE "
            f"(python -m bench.workload makes one)"
        )
    return Path(configured).expanduser()


async def run(
    prepared: Prepared, launch: Launch, progress: ProgressDisplay, stop: asyncio.Event
) -> tuple[Report, list[str]]:
    """Serves and replays; the report, and what else went wrong. Raises BenchError; however it ends, the server and all
    its processes have ended."""
    # The server inherits the limit, and holds as many connections.
    reserve_descriptors(len(prepared.workload.requests))
    timeouts = prepared.configuration.timeouts
    stop_s = timeouts.drain + 2 * timeouts.stop + 5
    log = launch.output.with_suffix(".log")
    async with ServerProcess(scheduler_command(prepared.path, launch.server_port), log, stop_s) as server:
        begin = time.monotonic()
        progress.start("server", None)
        url = await server.ready(stop, lambda what: progress.update(0, what))
        progress.update(1, f"ready at {url} after {time.monotonic() - begin:.1f} s", last=True)
        plan = Plan(url, prepared.workload, prepared.origin, launch.command, scales=SCALES)
        report = await measure(plan, progress, stop)
        progress.start("server", None)
        progress.update(0, "stopping")
        await server.stop()
        progress.update(1, f"ended with status {server.returncode}", last=True)
    problems = []
    if report.ended != "complete":
        problems.append(f"the replay ended early ({report.ended}); the report is partial")
    if server.returncode != 0:
        problems.append(f"the server ended with status {server.returncode}; see {log}")
    if server.left_behind:
        problems.append(f"the server left processes behind, now killed: {server.left_behind}; see {log}")
    return report, problems


def print_table(report: Report, policy: str, console: Console) -> None:
    """A line for each model and one for all. Means and 99th percentiles are over pooled requests."""
    table = Table(box=box.SIMPLE_HEAD, title=f"{policy}: {report.workload} in {report.duration_s:.1f} s")
    table.add_column("model")
    for name in ("requests", "failed", "requests/s", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("TTFT s", "TPOT ms", "latency s"):
        table.add_column(f"{name}\nmean / p99", justify="right", no_wrap=True)
    table.add_column(f"SLO attainment %\nat {' / '.join(TABLE_SCALES)}", justify="right", no_wrap=True)
    for name, group in [*sorted(report.models.items()), ("all", report.total)]:
        table.add_row(
            name,
            str(group.requests),
            str(group.failed),
            f"{group.completed / report.duration_s:.2f}" if report.duration_s > 0 else "-",
            "-" if group.output_tokens_per_s is None else f"{group.output_tokens_per_s:.1f}",
            _mean_and_p99(group.ttft_s),
            _mean_and_p99(group.tpot_s, unit=1e-3, digits=1),
            _mean_and_p99(group.latency_s),
            " / ".join(_percent(group, scale) for scale in TABLE_SCALES),
        )
    console.print(table)
    for kind, count in report.total.failures.items():
        console.print(f"{count} {kind}, first: {report.errors[kind]}", highlight=False, markup=False)


def _mean_and_p99(summary: Summary, unit: float = 1.0, digits: int = 2) -> str:
    return " / ".join("-" if value is None else f"{value / unit:.{digits}f}" for value in (summary.mean, summary.p99))


def _percent(group: Group, scale: str) -> str:
    share = group.slo_attainment[scale]
    return "-" if share is None else f"{100 * share:.0f}"

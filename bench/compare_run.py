"""Runs a comparison: one arm after the other, its servers up, a replay for each rate; what is measured is kept."""

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from forebay.bench import report as reports
from forebay.bench.baseline import Baseline, measure_baseline
from forebay.bench.client import Outcome, RoutedClient
from forebay.bench.compare_arms import ARMS, Launch, Ours, VllmOptions, our_launch, vllm_launches
from forebay.bench.compare_folder import ArmState, ComparisonFolder, Point, Sample
from forebay.bench.compare_setup import Setup
from forebay.bench.errors import BenchError, Interrupted
from forebay.bench.figures import FOLDER
from forebay.bench.mps_daemon import mps_daemon
from forebay.bench.probes import relabelled
from forebay.bench.progress import ProgressDisplay
from forebay.bench.replayer import Counts, Replayer, reserve_descriptors
from forebay.bench.report import commit_of
from forebay.bench.server_process import ServerProcess
from forebay.bench.workload_file import Workload

Result = TypeVar("Result")

START_S = 900.0
"""How long a server may take until it is ready: vLLM compiles."""

ANSWER_S = 120.0
"""And how long until each of its models has answered once."""

POLL_S = 0.2
FIRST_PROMPT = [10, 11, 12, 13]

WARM_UP_S = 3.0
"""Of arrivals at the lowest rate, before anything counts."""

POINT_EXTRA_S = 10.0
"""What a point usually takes beyond its arrivals."""


@dataclass(frozen=True)
class Sweep:
    """What to run in this call. A point whose requests have not all finished `drain_s` after its last arrival is cut.
    No server is started and no point begun once `budget_s` would not do for it. `call` names this run."""

    setup: Setup
    folder: ComparisonFolder
    arms: Sequence[str]
    rates: Sequence[float]
    vllm: VllmOptions
    call: str
    command: Sequence[str]
    drain_s: float
    budget_s: float
    timeout_s: float


@dataclass
class _Clock:
    deadline: float

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()


async def run_sweep(sweep: Sweep, progress: ProgressDisplay, stop: asyncio.Event) -> list[str]:
    """Measures what is missing; returns "arm rate" for all that the budget did not suffice for. An arm that fails is
    noted in the folder, and the others go on. Raises Interrupted once `stop` is set, and BenchError for what would fail
    in every arm."""
    clock = _Clock(time.monotonic() + sweep.budget_s)
    workloads = {rate: sweep.setup.build(rate) for rate in sweep.rates}
    reserve_descriptors(max(len(workload.requests) for workload in workloads.values()))
    remaining: list[str] = []
    for arm in sweep.arms:
        todo = [rate for rate in sweep.rates if not sweep.folder.has(arm, rate)]
        if not todo:
            continue
        before = sweep.folder.arms().get(arm)
        start_s = 0.0 if before is None or before.start_s is None else before.start_s
        if clock.left_s < start_s + sweep.setup.seconds + POINT_EXTRA_S:
            remaining += [f"{arm} {rate:g}" for rate in todo]
            continue
        state = ArmState(arm, sweep.call, tuple(sweep.command), commit_of(FOLDER), gpu_of(sweep.setup.devices[0]))
        try:
            left = await _run_arm(sweep, state, todo, workloads, clock, progress, stop)
            remaining += [f"{arm} {rate:g}" for rate in left]
        except Interrupted:
            raise
        except (BenchError, OSError) as error:
            kept = sweep.folder.arms().get(arm)
            state = kept if kept is not None and kept.call == sweep.call else state
            sweep.folder.write_arm(_failed(state, str(error)))
            progress.start(arm, None)
            progress.update(0, f"failed: {str(error).splitlines()[0]}", last=True)
    return remaining


async def _run_arm(
    sweep: Sweep,
    state: ArmState,
    todo: Sequence[float],
    workloads: Mapping[float, Workload],
    clock: _Clock,
    progress: ProgressDisplay,
    stop: asyncio.Event,
) -> list[float]:
    """Measures the points of one arm; returns the rates that time did not suffice for."""
    begin = time.monotonic()
    async with raised(sweep, state.arm, clock, progress, stop) as urls, RoutedClient(urls, sweep.timeout_s) as client:
        await _answering(client, urls, clock, stop)
        start_s = time.monotonic() - begin
        baseline = await _baseline(client, workloads, progress, state.arm)
        state = ArmState(state.arm, state.call, state.command, state.commit, state.gpu, start_s, None, baseline)
        sweep.folder.write_arm(state)
        warm_up = _begin(workloads[min(workloads)], WARM_UP_S)
        await Replayer(client, relabelled(warm_up, 1), 1.0, stop, lambda counts: None).run()
        for place, rate in enumerate(todo):
            if stop.is_set():
                raise Interrupted("interrupted; what was measured is kept, and the same command goes on")
            if clock.left_s < sweep.setup.seconds + POINT_EXTRA_S:
                return list(todo[place:])
            point = await replay_point(sweep, state.arm, rate, workloads[rate], client, progress, stop)
            sweep.folder.write_point(point)
            if point.ended == "server_lost":
                raise BenchError(f"a server was gone in the replay at {rate:g} requests/s; see its log")
            if point.ended == "cut":
                await _settled(client, workloads[rate])
    return []


async def replay_point(
    sweep: Sweep, arm: str, rate: float, workload: Workload, client: RoutedClient, progress: ProgressDisplay,
    stop: asyncio.Event,
) -> Point:  # fmt: skip
    """Replays one workload against the servers of an arm. Raises Interrupted once `stop` is set."""
    cut = asyncio.Event()

    async def wait() -> None:
        try:
            async with asyncio.timeout(sweep.setup.seconds + sweep.drain_s):
                await stop.wait()
        except TimeoutError:
            pass
        cut.set()

    progress.start(f"{arm} {rate:g}/s", len(workload.requests))

    def show(counts: Counts) -> None:
        finished = counts.done + counts.failed
        progress.update(finished, str(counts), last=finished == counts.total)

    watcher = asyncio.create_task(wait())
    try:
        run = await Replayer(client, workload, 1.0, cut, show).run()
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
    if stop.is_set():
        raise Interrupted(f"interrupted in {arm} at {rate:g} requests/s; the points before are kept")
    return Point(
        arm,
        rate,
        sweep.call,
        run.duration_s,
        "cut" if run.ended == "interrupted" else run.ended,
        tuple(map(Sample.of, run.outcomes)),
        reports.examples(run.outcomes),
    )


async def _baseline(
    client: RoutedClient, workloads: Mapping[float, Workload], progress: ProgressDisplay, arm: str
) -> Baseline:
    """Of all models that any of the workloads asks."""
    requests = [request for workload in workloads.values() for request in workload.requests]
    union = Workload(next(iter(workloads.values())).info, [0.0] * len(requests), requests)

    def advance(model: str, done: int, total: int) -> None:
        if done == 0:
            progress.start(f"{arm} alone", total)
        progress.update(done, f"{done}/{total} lone requests ({model})", last=done == total)

    return await measure_baseline(client, union, advance)


async def _answering(client: RoutedClient, models: Iterable[str], clock: _Clock, stop: asyncio.Event) -> None:
    """Waits until every model has answered a request of one token: a server may list a model before it is there. Raises
    BenchError if one does not answer in time, and Interrupted."""
    deadline = time.monotonic() + max(min(ANSWER_S, clock.left_s), 1.0)
    for model in models:
        while True:
            outcome = Outcome(model, len(FIRST_PROMPT), 1, scheduled=time.perf_counter())
            await client.complete(outcome, FIRST_PROMPT)
            if outcome.failure is None:
                break
            if stop.is_set():
                raise Interrupted("interrupted before the servers were ready; what was measured is kept")
            if time.monotonic() > deadline or outcome.failure == "connect":
                raise BenchError(f"{model} does not answer: {outcome.failure}: {outcome.message}")
            await asyncio.sleep(POLL_S)


async def _settled(client: RoutedClient, workload: Workload) -> None:
    """Waits until one short request to each model has come back: what was cut off is out of the way then. Raises
    BenchError if one fails."""
    first = {request.model_name: request for request in reversed(workload.requests)}
    await measure_baseline(client, Workload(workload.info, [0.0] * len(first), list(first.values())), lambda *_: None)


def _begin(workload: Workload, seconds: float) -> Workload:
    """The requests of the first `seconds`, at least one of each model."""
    seen: set[str] = set()
    places = []
    for place, (arrival, request) in enumerate(zip(workload.arrivals, workload.requests, strict=True)):
        if arrival <= seconds or request.model_name not in seen:
            places.append(place)
            seen.add(request.model_name)
    return Workload(
        workload.info,
        [min(workload.arrivals[place], seconds) for place in places],
        [workload.requests[place] for place in places],
    )


@asynccontextmanager
async def raised(
    sweep: Sweep, arm: str, clock: _Clock, progress: ProgressDisplay, stop: asyncio.Event
) -> AsyncIterator[dict[str, str]]:
    """The servers of an arm, ready; the base URL for each model. Raises BenchError if they do not come up within the
    budget. However it ends, all their processes have ended."""
    kind, logs = ARMS[arm], sweep.folder.folder / "logs"
    progress.start(f"{arm} servers", None)
    async with AsyncExitStack() as undo:
        if isinstance(kind, Ours):
            groups = [[our_launch(arm, kind, sweep.setup, logs)]]
        else:
            environment = await undo.enter_async_context(mps_daemon(sweep.setup.devices[0])) if kind.mps else {}
            launches = vllm_launches(arm, sweep.setup, sweep.vllm, logs, environment)
            # An engine measures the free memory while it starts: another one that starts meanwhile would falsify it.
            groups = [launches] if sweep.vllm.kv_bytes else [[launch] for launch in launches]
        urls: dict[str, str] = {}

        begin = time.monotonic()
        for group in groups:
            servers = [
                await undo.enter_async_context(
                    ServerProcess(
                        launch.command, launch.log, launch.stop_s, url=launch.url, environment=launch.environment,
                        start_s=max(min(START_S, clock.left_s), 1.0),
                    )
                )
                for launch in group
            ]  # fmt: skip

            def show(what: str, group: Sequence[Launch] = group) -> None:
                progress.update(0, f"{', '.join(name for launch in group for name in launch.models)}: {what}")

            ready = await _all([server.ready(stop, show) for server in servers])
            for launch, url in zip(group, ready, strict=True):
                urls.update(dict.fromkeys(launch.models, url))
        progress.update(1, f"ready after {time.monotonic() - begin:.1f} s", last=True)
        yield urls
        progress.start(f"{arm} servers", None)
        progress.update(0, "stopping", last=True)


async def _all(works: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Waits for all; the first error cancels the others and is raised as it is."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _failed(state: ArmState, failure: str) -> ArmState:
    return ArmState(
        state.arm, state.call, state.command, state.commit, state.gpu, state.start_s, failure, state.baseline
    )


def gpu_of(device: str) -> str | None:
    """Name, memory and driver of a CUDA device as nvidia-smi tells them; None for others, and where it cannot."""
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return None
    words = ["nvidia-smi", f"--id={index}", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None

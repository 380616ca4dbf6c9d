"""Comparisons that run: against stand-ins over real HTTP, and with our own server and a real model."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from forebay.bench.compare_arms import VllmOptions
from forebay.bench.compare_figures import Comparison, reference_baseline
from forebay.bench.compare_folder import ComparisonFolder
from forebay.bench.compare_run import Sweep, run_sweep
from forebay.bench.compare_setup import ComparedModel, Setup
from forebay.bench.errors import BenchError, Interrupted
from forebay.bench.progress import ProgressDisplay
from tests.bench.conftest import ROOT

STAND_IN = "{python} -m tests.bench.server --port {port}"


def sweep(folder: Path, *models: str, **changes: Any) -> Sweep:
    words = ("--models", ",".join(models), "--prompt-lengths", "fixed:4", "--output-lengths", "fixed:2")
    setup = Setup(
        tuple(ComparedModel(model, "/", 1.0) for model in models), ("cpu:0",), "float32", "auto", 64, 8, 64, 1 << 26,
        0.8, 0.5, words,
    )  # fmt: skip
    kept = ComparisonFolder(folder)
    kept.open(setup)
    settings: dict[str, Any] = {
        "setup": setup, "folder": kept, "arms": ["vllm"], "rates": [8.0, 16.0],
        "vllm": VllmOptions(Path(sys.executable), STAND_IN, kv_bytes=1), "call": "one", "command": ["test"],
        "drain_s": 10.0, "budget_s": 1000.0, "timeout_s": 20.0,
    }  # fmt: skip
    return Sweep(**{**settings, **changes})


async def run(plan: Sweep, stop: asyncio.Event | None = None) -> list[str]:
    with ProgressDisplay(io.StringIO()) as progress:
        return await run_sweep(plan, progress, stop or asyncio.Event())


async def test_points_are_kept_and_not_repeated(tmp_path: Path) -> None:
    plan = sweep(tmp_path, "steady", "other")
    assert await run(plan) == []
    points = plan.folder.points()
    assert [(point.arm, point.rate, point.ended) for point in points] == [
        ("vllm", 8, "complete"),
        ("vllm", 16, "complete"),
    ]
    assert {sample.model for sample in points[1].samples} == {"steady", "other"}
    state = plan.folder.arms()["vllm"]
    assert state.failure is None
    assert state.start_s is not None
    reference, baseline = reference_baseline(points, plan.folder.arms())
    found = Comparison(points, plan.folder.arms(), baseline, reference, [1000], 0.9)
    assert [found.attainment(point, 1000) for point in points] == [1, 1]
    # With everything there no server is started: this one could not be.
    broken = VllmOptions(Path("/nowhere"), "/nowhere/python")
    assert await run(sweep(tmp_path, "steady", "other", vllm=broken)) == []


@pytest.mark.system
async def test_failing_arms_are_noted_and_the_others_go_on(tmp_path: Path) -> None:
    plan = sweep(tmp_path, "steady", arms=["vllm-mps", "vllm"], rates=[8.0])
    assert await run(plan) == []
    assert plan.folder.arms()["vllm-mps"].failure == "skipped: MPS is a service for CUDA devices, this is cpu:0"
    assert [point.arm for point in plan.folder.points()] == ["vllm"]

    quits = VllmOptions(Path(sys.executable), "{python} -c 'raise SystemExit(\"no such GPU\")'")
    plan = sweep(tmp_path / "quits", "steady", vllm=quits)
    assert await run(plan) == []
    failure = plan.folder.arms()["vllm"].failure
    assert failure is not None
    assert "the server ended with status 1 before it was ready" in failure
    assert "no such GPU" in failure
    assert plan.folder.points() == []


@pytest.mark.system
async def test_requests_that_fail_are_in_the_point(tmp_path: Path) -> None:
    """Broken off in mid-stream by a server that lives on, and by one that ends."""
    from forebay.bench.baseline import Baseline, ModelBaseline
    from forebay.bench.client import RoutedClient
    from forebay.bench.compare_run import replay_point
    from tests.bench.conftest import running_server

    plan = sweep(tmp_path, "truncated", "fatal", "steady")
    for model, ended in (("truncated", "complete"), ("fatal", "server_lost")):
        with running_server() as url, ProgressDisplay(io.StringIO()) as progress:
            async with RoutedClient(dict.fromkeys(("steady", model), url), 20.0) as client:
                words = ("--models", f"steady,{model}", "--prompt-lengths", "fixed:4", "--output-lengths", "fixed:2")
                workload = Setup(**{**as_dict(plan.setup), "workload": words}).build(40)
                point = await replay_point(plan, "vllm", 40, workload, client, progress, asyncio.Event())
        assert point.ended == ended
        baseline = Baseline({name: ModelBaseline(100.0, 0.0, 0.0) for name in ("steady", model)})
        group = Comparison([point], {}, baseline, "x", [5], 0.9).group(point, model)
        assert group.failed == group.requests > 0
        assert set(group.failures) <= set(point.errors)


def as_dict(setup: Setup) -> dict[str, Any]:
    return {name: getattr(setup, name) for name in Setup.__struct_fields__}


@pytest.mark.system
async def test_what_hangs_is_cut_off(tmp_path: Path) -> None:
    from forebay.bench.client import RoutedClient
    from forebay.bench.compare_run import replay_point
    from tests.bench.conftest import running_server

    plan = sweep(tmp_path, "stuck", "steady", drain_s=0.3)
    with running_server() as url, ProgressDisplay(io.StringIO()) as progress:
        async with RoutedClient({"stuck": url, "steady": url}, 20.0) as client:
            point = await replay_point(plan, "vllm", 20, plan.setup.build(20), client, progress, asyncio.Event())
            stop = asyncio.Event()
            stop.set()
            with pytest.raises(Interrupted, match="interrupted in vllm at 20 requests/s"):
                await replay_point(plan, "vllm", 20, plan.setup.build(20), client, progress, stop)
    assert point.ended == "cut"
    assert {sample.failure for sample in point.samples} == {None, "interrupted"}


async def test_a_budget_that_is_too_small_begins_nothing(tmp_path: Path) -> None:
    plan = sweep(tmp_path, "steady", budget_s=1.0)
    assert await run(plan) == ["vllm 8", "vllm 16"]
    assert plan.folder.arms() == {}


def test_servers_end_with_a_measurement_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\nfrom pathlib import Path\n"
        "from forebay.bench.server_process import ServerProcess\n"
        "async def main():\n"
        "    command = [sys.executable, '-c', 'import os, signal; print(os.getpid(), flush=True); signal.pause()']\n"
        "    async with ServerProcess(command, Path(sys.argv[1]), 5, url='http://127.0.0.1:1'):\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    log = tmp_path / "log"
    process = subprocess.Popen([sys.executable, "-c", code, str(log)])
    try:
        deadline = time.monotonic() + 30
        while not (log.exists() and log.read_text().endswith("\n")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    server = psutil.Process(int(log.read_text()))
    server.wait(20)


def test_showing_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    from forebay.bench.compare_session import show

    folder = ComparisonFolder(tmp_path / "c")
    with pytest.raises(BenchError, match="no point has been measured"):
        show(None, folder, [], [])  # type: ignore[arg-type]


def command(smollm2: Path, tmp_path: Path, *more: str) -> list[str]:
    stand_in = f"{{python}} -m tests.bench.vllm_stand_in {smollm2} {{name}} {{port}}"
    return [
        sys.executable, "-m", "bench.compare", str(smollm2), "--models", "2", "--weights", "2,1",
        "--dtype", "float32", "--memory", "128MiB", "--max-context", "128", "--max-sequences", "8",
        "--rates", "2", "--seconds", "3", "--scales", "5,20", "--prompt-lengths", "uniform:8:24",
        "--output-lengths", "fixed:6", "--vllm-command", stand_in, "--output", str(tmp_path / "out"),
        "--json", str(tmp_path / "figures.json"), *more,
    ]  # fmt: skip


@pytest.mark.system
@pytest.mark.timeout(420)
def test_the_whole_comparison(smollm2: Path, tmp_path: Path) -> None:
    """Two of our arms, and two other servers in vLLM's place; then the table alone."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command(smollm2, tmp_path, "--arms", "vllm,vllm-mps,temporal,adbs"),
        cwd=ROOT, capture_output=True, text=True, timeout=400, check=False, env=environment,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    folder = ComparisonFolder(tmp_path / "out")
    points = folder.points()
    assert [(point.arm, point.rate) for point in points] == [(arm, 2) for arm in ("adbs", "temporal", "vllm")]
    assert all(sample.failure is None for point in points for sample in point.samples)
    # The same requests in every arm.
    shapes = {point.arm: [(s.model, s.prompt_tokens) for s in point.samples] for point in points}
    assert shapes["vllm"] == shapes["temporal"] == shapes["adbs"]
    for words in ("SLO at scale s: latency at most s x", "in arm vllm.", "adbs / vllm", "skipped: MPS is a service"):
        assert words in ended.stdout
    for plot in ("attainment", "ttft", "tpot"):
        assert (tmp_path / "out" / "plots" / f"{plot}.png").stat().st_size > 1000
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert figures["adbs_failed_2"]["value"] == 0
    assert figures["temporal_tpot_p50_2"]["value"] > 0

    again = subprocess.run(
        command(smollm2, tmp_path, "--table"), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert again.returncode == 0, again.stderr
    assert again.stdout == ended.stdout


@pytest.mark.system
@pytest.mark.timeout(120)
def test_an_interrupt_leaves_no_server_behind(smollm2: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(smollm2, tmp_path, "--arms", "temporal"), cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    with process.stderr as lines:
        for line in lines:
            if line.startswith("temporal alone"):
                process.send_signal(signal.SIGINT)
                break
        assert "interrupted" in lines.read()
    assert process.wait(60) == 130
    assert ComparisonFolder(tmp_path / "out").points() == []
    mark = str(tmp_path).encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert mark not in path.read_bytes(), path
        except OSError:
            continue

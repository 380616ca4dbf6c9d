"""The benchmarks run and write their figures in the common shape. How fast is not a test's business."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = [pytest.mark.system, pytest.mark.timeout(200)]


def run(tmp_path: Path, module: str, *arguments: str) -> dict[str, dict[str, float]]:
    figures = tmp_path / "figures.json"
    ended = subprocess.run(
        [sys.executable, "-m", module, *arguments, "--json", str(figures)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    written = json.loads(figures.read_text())
    assert set(written) == {"benchmark", "command", "commit", "machine", "figures"}
    assert written["benchmark"] == module
    return written["figures"]


def test_events(tmp_path: Path) -> None:
    figures = run(tmp_path, "bench.events", "--seconds", "0.6", "--runs", "1")
    assert set(figures) == {"events_per_s", "request_events_per_s", "round_trip_p50_s", "round_trip_p99_s"}
    assert figures["events_per_s"]["value"] > figures["events_per_s"]["baseline"] > 0
    assert 0 < figures["round_trip_p50_s"]["value"] <= figures["round_trip_p99_s"]["value"]


def test_scheduler(tmp_path: Path) -> None:
    figures = run(tmp_path, "bench.scheduler", "--workers", "8", "--rate", "1500", "--seconds", "6")
    assert 700 < figures["events_per_s"]["value"] < 3000
    assert 0 < figures["handling_p99_s"]["value"] < 1
    assert figures["memory_last_kib"]["value"] > 1000


def test_delivery(tmp_path: Path, smollm2: Path) -> None:
    figures = run(tmp_path, "bench.delivery", str(smollm2), "--streams", "4", "--tokens", "20", "--rate", "20")
    assert 0 < figures["delivery_p50_s"]["value"] <= figures["delivery_p99_s"]["value"] < 5


def test_engine(tmp_path: Path, smollm2: Path) -> None:
    arguments = ("--contexts", "32", "--requests", "2", "--output", "4", "--threads", "1", "--dtype", "float32")
    figures = run(tmp_path, "bench.engine", str(smollm2), *arguments)
    assert set(figures) == {"prefill_32", "decode_32", "output_32"}
    assert all(figure["value"] > 0 and figure["baseline"] > 0 for figure in figures.values())


def test_fairness(tmp_path: Path, smollm2: Path) -> None:
    arms = ("fcfs", "cfs-host")
    options = ("--requests", "6", "--seeds", "1", "--first", "2", "--memory", "16MiB", "--arms", ",".join(arms))
    figures = run(tmp_path, "bench.fairness", str(smollm2), *options, "--output", str(tmp_path / "fairness"))
    for arm in arms:
        assert 0 < figures[f"{arm}_ttft_p50"]["value"] <= figures[f"{arm}_e2e_p99"]["value"]
        assert figures[f"{arm}_throughput"]["value"] > 0
        assert figures[f"{arm}_failed"]["value"] == 0
        assert figures[f"{arm}_memory_asked_mean"]["value"] >= 0
        assert figures[f"{arm}_memory_asked_peak"]["value"] > 0
    assert figures["cfs-host_ttft_p99"]["baseline"] == figures["fcfs_ttft_p99"]["value"]
    assert (tmp_path / "fairness" / "fairness.png").stat().st_size > 1000


def test_policies_that_are_interrupted_leave_no_server_behind(smollm2: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.policies", str(smollm2), "--output", str(tmp_path / "out")]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if line.startswith("baseline"):
                break
        servers = psutil.Process(process.pid).children(recursive=True)
        assert servers
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        assert process.wait(60) == 130
        _, left = psutil.wait_procs(servers, timeout=30)
        assert not left
    finally:
        process.kill()
        process.wait()
        process.stderr.close()

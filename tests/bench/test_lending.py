"""`python -m bench.lending` runs and tells everything. How fast is not a test's business."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forebay.bench.errors import BenchError
from forebay.bench.lending_processes import LenderProcess, SchedulerProcess

ROOT = Path(__file__).resolve().parent.parent.parent
SLAB = 64 << 10

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "bench.lending", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


def figures_of(tmp_path: Path, *arguments: str) -> tuple[Any, str]:
    path = tmp_path / "figures.json"
    ended = run("--largest", "2", "--seconds", "0.05", "--json", str(path), *arguments)
    assert ended.returncode == 0, ended.stderr
    written = json.loads(path.read_text())
    assert written["benchmark"] == "bench.lending"
    assert written["machine"]["cpu:0"]
    return written["figures"], ended.stdout


@pytest.mark.parametrize(("devices", "routes"), [("cpu:0,cpu:1", ("peer", "host")), ("cpu:0", ("host",))])
def test_every_size_both_ways(tmp_path: Path, devices: str, routes: tuple[str, ...]) -> None:
    figures, printed = figures_of(tmp_path, "--devices", devices, "--only", "sweep")
    assert ("left out" in printed) == ("peer" not in routes)
    for way in ("out", "in"):
        for route in routes:
            assert figures[f"{route}_{way}_raw"]["value"] > 0
            for size in ("4KiB", "64KiB", "2MiB"):
                assert figures[f"{route}_{way}_scattered_{size}"]["value"] > 0
                assert figures[f"{route}_{way}_whole_{size}"]["baseline"] > 0
            for size in ("16KiB", "2MiB"):
                assert figures[f"{route}_{way}_beside_{size}"]["value"] > 0
                assert figures[f"{route}_{way}_products_beside_{size}"]["baseline"] > 0
            assert figures[f"{route}_{way}_sequence_16MiB"]["unit"] == "ms"
        assert (f"peer_over_host_{way}" in figures) == ("peer" in routes)
    assert not [name for name in figures if name.startswith(("grant", "reclaim", "tax"))]


def test_grants(tmp_path: Path) -> None:
    figures, _ = figures_of(tmp_path, "--only", "grants")
    assert set(figures) == {"grant_p50", "grant_p99", "usable_2MiB_p50", "usable_2MiB_p99"}
    for name in ("grant", "usable_2MiB"):
        assert 0 < figures[f"{name}_p50"]["value"] <= figures[f"{name}_p99"]["value"]
        assert figures[f"{name}_p99"]["baseline"] > 0


@pytest.mark.parametrize("devices", ["cpu:0,cpu:1", "cpu:0"])
def test_what_holds_data_is_taken_back(tmp_path: Path, devices: str) -> None:
    figures, printed = figures_of(tmp_path, "--devices", devices, "--only", "reclaim")
    assert set(figures) == {"host_ready_2MiB", "reclaim_to_host_2MiB", "reclaim_to_lender_2MiB"}
    assert figures.pop("host_ready_2MiB")["unit"] == "ms"
    assert all(figure["value"] > 0 and figure["baseline"] > 0 for figure in figures.values())
    assert ("lends to itself" in printed) == (devices == "cpu:0")


def test_how_fast_host_memory_is_made(tmp_path: Path) -> None:
    figures, _ = figures_of(tmp_path, "--only", "host")
    ways = {f"host_{way}_{threads}_threads" for way in ("slab", "slab_zero", "slab_ready", "pinned")
            for threads in (1, 4, 8)}  # fmt: skip
    steps = {f"host_step_{step}_2MiB" for step in
             ("device_slab", "map_device", "make", "prepare", "copy", "replace", "zero", "close", "unmap")}  # fmt: skip
    assert set(figures) == ways | steps
    assert all(figure["value"] > 0 for figure in figures.values())


def test_what_lending_costs(tmp_path: Path) -> None:
    figures, _ = figures_of(tmp_path, "--only", "tax")
    names = {f"tax_{what}_{way}_{size}" for what in ("products", "copy") for way in ("out", "in")
             for size in ("2MiB", "64KiB")}  # fmt: skip
    assert set(figures) == names
    assert all(figure["value"] > 0 and figure["baseline"] > 0 for figure in figures.values())


def test_a_lender_that_cannot_says_so() -> None:
    with SchedulerProcess() as scheduler, LenderProcess(scheduler, 1, "cpu:1", SLAB) as lender:
        lender.offer(2 * SLAB)
        lender.await_free(2 * SLAB)
        assert lender.take_back(2 * SLAB) > 0
        with pytest.raises(BenchError, match="could not take_back"):
            lender.take_back(SLAB)


def test_a_scheduler_that_ends_early_is_no_measurement() -> None:
    with pytest.raises(BenchError, match="ended in the middle of a measurement; its log"):
        with SchedulerProcess() as scheduler:
            scheduler.kill()


def test_a_scheduler_that_cannot_start_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(BenchError, match="did not start"):
        with SchedulerProcess():
            pass


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--devices", "cpu:0,cpu:1,cpu:2"], "names 3"),
        (["--largest", "1"], "2 or more"),
        (["--only", "sweep,speed"], "names 'speed'; there are sweep, grants, host, reclaim, tax"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], problem: str) -> None:
    ended = run(*arguments)
    assert ended.returncode == 2
    assert problem in ended.stderr

"""`python -m bench.lending` runs and tells everything. How fast is not a test's business."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "bench.lending", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize(("devices", "routes"), [("cpu:0,cpu:1", ("peer", "host")), ("cpu:0", ("host",))])
def test_every_size_both_ways(tmp_path: Path, devices: str, routes: tuple[str, ...]) -> None:
    path = tmp_path / "figures.json"
    ended = run("--devices", devices, "--largest", "2", "--seconds", "0.05", "--json", str(path))
    assert ended.returncode == 0, ended.stderr
    assert ("left out" in ended.stdout) == ("peer" not in routes)
    written = json.loads(path.read_text())
    assert written["benchmark"] == "bench.lending"
    assert written["machine"]["cpu:0"]
    figures = written["figures"]
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


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--devices", "cpu:0,cpu:1,cpu:2"], "names 3"),
        (["--largest", "1"], "2 or more"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], problem: str) -> None:
    ended = run(*arguments)
    assert ended.returncode == 2
    assert problem in ended.stderr

"""Slices of real traces, and conversations, against the whole server: no request may fail."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.server import ROOT, Server, configuration

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

SMALL = ("--scale-tokens", "0.03", "--max-prompt", "120", "--max-output", "8")


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(configuration(smollm2), tmp_path_factory.mktemp("server")) as running:
        yield running
        assert running.stop() == 0
        running.assert_nothing_left()


def run(module: str, *arguments: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert ended.returncode == 0, ended.stderr + ended.stdout


def replayed(server: Server, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """The report of a workload made with these arguments."""
    workload, report = tmp_path / "workload.json", tmp_path / "report.json"
    run("bench.workload", *arguments, "--output", str(workload))
    run("bench.replay", str(workload), "--base-url", server.url, "--output", str(report), "--plots", str(tmp_path))
    content: dict[str, Any] = json.loads(report.read_text())
    assert content["total"]["failed"] == 0
    assert content["total"]["completed"] == len(json.loads(workload.read_text())["requests"])
    assert list(content["total"]["slo_attainment"]) == [str(scale) for scale in range(1, 21)]
    assert (tmp_path / "index.html").stat().st_size > 50_000
    return content


def test_azure_code_with_its_bursts(server: Server, traces: Path, tmp_path: Path) -> None:
    trace = ("--azure", str(traces / "azure_code_2023.csv"), "--models", "llm-0:12,llm-1:5,llm-2:3")
    report = replayed(server, tmp_path, *trace, "--start", "1260", "--duration", "60", *SMALL, "--scale-rate", "2")
    assert report["total"]["requests"] >= 30


def test_three_models_of_servegen(server: Server, traces: Path, tmp_path: Path) -> None:
    trace = ("--servegen-windows", str(traces / "servegen_multimodel_client_windows_1day.csv"))
    lengths = ("--servegen-clients", str(traces / "servegen_multimodel_clients.csv"))
    models = ("--models", "m-large=llm-0,m-mid=llm-1,m-small=llm-2")
    when = ("--start", "180000", "--duration", "12", "--scale-rate", "0.001")
    report = replayed(server, tmp_path, *trace, *lengths, *models, *when, *SMALL)
    assert set(report["models"]) == {"llm-0", "llm-1", "llm-2"}


def test_conversations_of_several_turns(server: Server, traces: Path, smollm2: Path, tmp_path: Path) -> None:
    text = ("--dataset", str(traces / "oasst_en_sharegpt.json"), "--tokenizer", str(smollm2), "--turns")
    load = ("--models", "llm-0", "--total-rate", "2", "--duration", "8", "--think-time", "1:0.5")
    bounds = ("--max-prompt", "250", "--max-output", "60", "--answer-token-time", "0.02")
    report = replayed(server, tmp_path, *text, *load, *bounds)
    assert report["total"]["requests"] >= 5

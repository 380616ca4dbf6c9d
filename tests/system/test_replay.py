"""Real workloads against the whole server, through the command lines that people use."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.system.server import ROOT, Server, configuration

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(configuration(smollm2), tmp_path_factory.mktemp("server")) as running:
        yield running
        assert running.stop() == 0
        running.assert_nothing_left()


def run(module: str, *arguments: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert ended.returncode == 0, ended.stderr + ended.stdout
    return ended.stdout


def replay(server: Server, workload: Path, *arguments: str) -> tuple[dict[str, object], str]:
    report = workload.with_suffix(".report.json")
    table = run("bench.replay", str(workload), "--base-url", server.url, "--output", str(report), *arguments)
    return json.loads(report.read_text()), table


def test_a_slice_of_an_azure_trace_replays_without_a_failed_request(
    server: Server, traces: Path, tmp_path: Path
) -> None:
    workload = tmp_path / "azure.json"
    trace = str(traces / "azure_conv_2023.csv")
    scale = ("--start", "600", "--duration", "30", "--scale-rate", "0.4", "--scale-tokens", "0.03")
    models = ("--models", "llm-0:12,llm-1:5,llm-2:3")
    run("bench.workload", "--azure", trace, *models, *scale, "--output", str(workload))
    report, table = replay(server, workload)
    total = report["total"]
    assert isinstance(total, dict)
    assert total["failed"] == 0
    assert total["completed"] == total["requests"] == len(json.loads(workload.read_text())["requests"]) >= 50
    assert set(report) >= {"total", "models", "commit", "command", "baseline"}
    for group in [total, *report["models"].values()]:  # type: ignore[attr-defined]
        for key in ("ttft_s", "tpot_s", "latency_s"):
            assert set(group[key]) == {"mean", "p50", "p90", "p99"}
        assert group["slo_attainment"]
    assert "llm-2" in table


def test_text_from_a_sharegpt_file_at_muxserves_rates(
    server: Server, traces: Path, smollm2: Path, tmp_path: Path
) -> None:
    models = [{"name": f"llm-{n}", "model": str(smollm2), "rate": rate / 12} for n, rate in enumerate((12, 5, 3))]
    (tmp_path / "models.yaml").write_text(
        yaml.safe_dump({"cluster": {"nnodes": 1, "ngpus_per_node": 2}, "models": models})
    )
    workload = tmp_path / "sharegpt.json"
    text = ("--dataset", str(traces / "oasst_en_sharegpt.json"), "--tokenizer", str(smollm2))
    bounds = ("--duration", "12", "--max-prompt", "120", "--max-output", "24", "--seed", "3")
    run("bench.workload", str(tmp_path / "models.yaml"), *text, *bounds, "--output", str(workload))
    report, _ = replay(server, workload)
    total = report["total"]
    assert isinstance(total, dict)
    assert (total["failed"], total["completed"]) == (0, total["requests"])
    assert total["requests"] > 8

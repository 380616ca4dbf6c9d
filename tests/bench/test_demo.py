"""The demo: its workload, and the whole of it against the real server."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from forebay.bench import demo
from forebay.bench.baseline import Baseline, ModelBaseline
from forebay.bench.demonstration import LONGEST_S, chat_workload, cut_to_speed, describe_cut
from forebay.bench.server_process import MARK
from forebay.bench.workload_file import Workload, read_workload
from forebay.runtime.config import ModelSection
from tests.bench.conftest import ROOT, RequestRow


def test_slow_servers_get_fewer_requests(make_workload: Callable[[Sequence[RequestRow]], Workload]) -> None:
    workload = make_workload([("a", index, 10, 20) for index in range(40)])

    def kept(step_s: float, devices: int) -> int:
        # Alone, a request takes 10 + 20 steps' time.
        baseline = Baseline({"a": ModelBaseline(10 * step_s, 0.0, step_s)})
        return len(cut_to_speed(workload, baseline, devices).requests)

    assert LONGEST_S == 75
    assert kept(0.01, 1) == 40
    assert kept(0.1, 1) == 25
    assert kept(0.1, 2) == 40
    assert kept(0.125, 1) == 20
    assert kept(1000, 1) == 1


def test_people_are_told_how_much_is_replayed_and_why() -> None:
    assert describe_cut(80, 80, 2) == "all 80 requests are replayed"
    cut = (
        "43 of 80 requests are replayed: what {} of the speed just measured can do in 75 s, one request after the other"
    )
    assert describe_cut(43, 80, 2) == cut.format("2 devices")
    assert describe_cut(43, 80, 1) == cut.format("one device")


def test_configuration_errors_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.yaml"
    empty.write_text("models: []")
    assert demo.main([str(empty), "--output", str(tmp_path / "out")]) == 1
    assert "models: is empty" in capsys.readouterr().err
    assert demo.main([str(tmp_path / "none.yaml"), "--output", str(tmp_path / "out")]) == 1
    assert "none.yaml: cannot be read" in capsys.readouterr().err


@pytest.mark.model
def test_chat_workload_follows_popularity_and_reads_like_chat(smollm2: Path) -> None:
    models = [
        ModelSection(name, str(smollm2), ("cpu:0",), popularity)
        for name, popularity in (("llm-0", 12.0), ("llm-1", 5.0), ("llm-2", 3.0))
    ]
    workload = chat_workload(models, 400)
    counts = Counter(request.model_name for request in workload.requests)
    assert counts["llm-0"] == pytest.approx(240, abs=40)
    assert counts["llm-1"] == pytest.approx(100, abs=35)
    assert 150 < workload.arrivals[-1] < 250  # two a second
    assert all(12 <= request.output_tokens <= 36 for request in workload.requests)
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    texts = [tokenizer.decode(request.prompt, skip_special_tokens=False) for request in workload.requests]
    assert all("<|im_start|>user\n" in text and text.endswith("<|im_start|>assistant\n") for text in texts)
    assert len(set(texts)) > 150
    assert workload == chat_workload(models, 400)


def survivors(mark: str) -> list[int]:
    """Processes whose environment says that this test started them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.fixture
def configuration(smollm2: Path, tmp_path: Path) -> Path:
    path = tmp_path / "demo.yaml"
    path.write_text(
        json.dumps(
            {
                "devices": [
                    {"device": f"cpu:{index}", "memory": "256MiB", "slab": "32MiB", "threads": 1} for index in (0, 1)
                ],
                "models": [
                    {"name": "llm-0", "path": str(smollm2), "popularity": 3, "placement": ["cpu:0", "cpu:1"]},
                    {"name": "llm-1", "path": str(smollm2), "popularity": 1, "placement": ["cpu:1"]},
                ],
            }
        )
    )
    return path


def start(configuration: Path, output: Path, mark: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "bench.demo", str(configuration), "--output", str(output), "--requests", "8"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "FOREBAY_TEST": mark},
    )


@pytest.mark.system
@pytest.mark.timeout(180)
def test_the_whole_demo(configuration: Path, tmp_path: Path) -> None:
    mark = f"demo-{os.getpid()}-whole"
    process = start(configuration, tmp_path / "out", mark)
    output, errors = process.communicate(timeout=170)
    assert process.returncode == 0, errors + (tmp_path / "out" / "server.log").read_text()
    assert survivors(mark) == []
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["total"]["requests"], report["total"]["completed"], report["total"]["failed"]) == (8, 8, 0)
    replayed = read_workload(tmp_path / "out" / "workload.json")
    assert len(replayed.requests) == report["total"]["requests"]
    assert set(report["models"]) == set(replayed.models)
    assert "workload: all 8 requests are replayed" in errors
    assert report["baseline"]["models"]["llm-0"]["decode_step_s"] > 0
    assert "TTFT s" in output
    assert "server: ended with status 0" in errors
    assert MARK not in os.environ


@pytest.mark.system
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("moment", "words"), [("server: loading", "there is nothing to report"), ("replay: ", "the report is partial")]
)
def test_ctrl_c_ends_everything(configuration: Path, tmp_path: Path, moment: str, words: str) -> None:
    mark = f"demo-{os.getpid()}-interrupted"
    process = start(configuration, tmp_path / "out", mark)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(moment):
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert words in errors
    assert (tmp_path / "out" / "report.json").exists() == (moment == "replay: ")
    assert survivors(mark) == []

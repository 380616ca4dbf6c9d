"""Files and options that nobody means: each is refused by a sentence, never by a traceback, a loop or a lost file."""

import codecs
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from forebay.bench import delivery, engine, events, goodput, muxserve, policies, replay, scheduler, workload
from forebay.bench.baseline import read_baseline
from forebay.bench.command_line import check_outputs, reported
from forebay.bench.cost_file import read_cost_file
from forebay.bench.errors import BenchError, Interrupted
from forebay.bench.lengths import load_tokenizer
from forebay.bench.workload_file import read_workload
from forebay.gpu.errors import DeviceError
from tests.bench.conftest import ROOT

DEEP = "[" * 100_000
MODELS = "models:\n- {{name: llm-0, rate: {rate}, avg_prompt_len: {prompt}}}\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
RATES = "model,window_start_s,rate_rps\n"
WINDOWS = "model,client,window_start_s,rate_rps,pattern,shape,scale\n"


def stored(**changes: Any) -> str:
    request = {"model_name": "llm-0", "idx": 0, "data": [[5, 6], 2, 4]}
    return json.dumps({"info": {}, "arrivals": [0.0], "requests": [request], **changes})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"info": {}, "requests": ' + DEEP, "requests: expected `object`, got `array`|requests[0]: expected"),
        ('{"info": {}, "x": ' + DEEP, "nested too deeply"),
        (stored().replace("[0.0]", "[1e999]"), "arrivals[0]: number out of range"),
        (stored(requests=[{"model_name": "a", "idx": 0, "data": [[5], 1, 10**30]}]), "expected `int` <= 10000000"),
    ],
)
def test_workloads_that_nothing_can_hold(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "workload.json"
    path.write_text(content)
    with pytest.raises(BenchError) as caught:
        read_workload(path)
    assert any(part in str(caught.value) for part in words.split("|"))


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "workload.json"
    path.write_bytes(codecs.BOM_UTF8 + stored().encode())
    assert read_workload(path).models == ["llm-0"]
    trace = tmp_path / "trace.csv"
    trace.write_bytes(codecs.BOM_UTF8 + f"{AZURE}2023-11-16 18:17:03,4,5\r\n\r\n".encode())
    assert workload.main(["--azure", str(trace), "--models", "a", "--output", str(tmp_path / "w.json")]) == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (MODELS.format(rate=".inf", prompt=5), "models[0].rate: is inf; expected `float` <= 1000000.0"),
        (MODELS.format(rate=1, prompt=".inf"), "models[0].avg_prompt_len: is inf; expected `float` <= 10000000.0"),
        (MODELS.format(rate="1e3", prompt=5), "is '1e3' (text: YAML writes such a number as 1.0e+3); expected"),
        (MODELS.format(rate="2020-13-45", prompt=5), "line 2: '2020-13-45' is no timestamp"),
        ("models:\n- {name: a, rate: 1, rate: 5}\n", "line 2: key 'rate' is there already"),
        ("1: 2\nmodels: [{name: a, rate: 1}]\n", "a key is no text"),
        ("", "top level: is None; expected `object`, got `null`"),
        ("[" * 1200, "nested too deeply"),
    ],
)
def test_models_files_that_nobody_means(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, words: str
) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(content)
    assert workload.main([str(path), "--num-requests", "3", "--output", str(tmp_path / "w.json")]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "content", "words"),
    [
        ("azure", AZURE + "2023-11-16 18:17:03,1000000000000,5\n", "a whole number of tokens up to 10,000,000"),
        ("azure", AZURE + f"2023-11-16 18:17:03,{'9' * 5000},5\n", "a whole number of tokens up to 10,000,000"),
        ("azure", AZURE + '"' + "x" * 200_000 + '",1,2\n', "not a CSV file"),
        ("azure", AZURE + "\udcff,1,2\n", "not a CSV file"),
        ("azure", AZURE, "holds no row; at least one is needed"),
        ("servegen-rates", RATES + "a,0,1e300\n", "rate_rps is '1e300'; a number of 0 or more, at most 1e+06,"),
        ("servegen-rates", RATES + "a,0,100\na,1e15,1\n", "window_start_s is '1e15'"),
        ("servegen-rates", RATES + "a,0,900000\n", "about 5.4e+08 requests; at most 10,000,000 are allowed"),
        ("servegen-windows", WINDOWS + "a,c,0,0.1,Weibull,1e-300,1\n", "shape is '1e-300'; a number of 0.01 or more"),
        ("servegen-windows", WINDOWS + "a,c,0,900000,Gamma,1,1\n", "at most 10,000,000 are allowed"),
    ],
)
def test_traces_that_nobody_means(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, content: str, words: str
) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(content.encode(errors="surrogateescape"))
    models = "a" if kind == "azure" else "a=llm-0"
    assert workload.main([f"--{kind}", str(path), "--models", models, "--output", str(tmp_path / "w.json")]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--num-requests 99999999999", "about 1e+11 requests; at most 10,000,000 are allowed"),
        ("--duration 1e300", "at most 10,000,000 are allowed"),
        ("--duration 5 --output .", "is a folder; name a file in it"),
        ("--duration 5 --output models.yaml/w.json", "the folder models.yaml cannot be made"),
    ],
)
def test_workloads_without_end_or_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models.yaml").write_text(MODELS.format(rate=1, prompt=5))
    assert workload.main(["models.yaml", *options.split()]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "line", "words"),
    [
        (workload, "--models a --num-requests 3 --total-rate 1e300", "a number from 1e-06 to 1e+06"),
        (workload, "--models a:1e308 --num-requests 3 --total-rate 1", "with weights above 0, at most 1e+09"),
        (workload, "--models a --total-rate 1 --num-requests 3 --drift 1e-300", "a number from 0.001 to"),
        (workload, "--models a --total-rate 1 --num-requests 3 --prompt-lengths fixed:inf", "1 to 10,000,000 tokens"),
        (workload, "--models a --total-rate 1 --num-requests 3 --output-lengths uniform:1:1e300", "10,000,000 tokens"),
        (workload, "--azure x --models a --scale-tokens 1e300", "a number from 1e-06 to 1e+06"),
        (replay, "w.json --base-url http://127.0.0.1:1 --time-scale 1e300", "a number from 1e-06 to 1e+06"),
        (goodput, "w.json --base-url http://127.0.0.1:1 --first 1e300", "a number from 1e-06 to 1e+06"),
        (scheduler, "--workers 0", "a whole number from 1 to 4,096"),
        (scheduler, "--rate nan", "is not a number"),
        (scheduler, "--seconds -10", "a number from 3 to"),
        (events, "--runs 0", "a whole number from 1 to 1,000"),
        (delivery, "m --tokens 3", "a whole number from 11 to 100,000"),
        (engine, "m --contexts 256,x", "a whole number from 1 to 1,000,000"),
        (engine, "m --requests 0", "a whole number from 1 to 4,096"),
        (engine, "m --output 1", "a whole number from 2 to 100,000"),
        (policies, "m --seeds 0", "a whole number from 1 to 1,000"),
        (policies, "m --load nan", "is not a number"),
    ],
)
def test_options_out_of_range(command: Any, line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(line.split())
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "replay w.json --base-url http://127.0.0.1:1 --output {0}",
        "replay w.json --base-url http://127.0.0.1:1 --json {0}/figures.json",
        "replay w.json --base-url http://127.0.0.1:1 --plots {0}",
        "goodput w.json --base-url http://127.0.0.1:1 --folder {0}",
        "muxserve c.yaml --workload-file w.json --output {0}/report.json",
        "scheduler --json {0}/figures.json",
        "events --json {0}/figures.json",
        "delivery m --json {0}/figures.json",
        "engine m --json {0}/figures.json",
        "policies m --output {0}",
    ],
)
def test_what_cannot_be_written_is_said_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    command, *words = line.split()
    # A file where a folder would have to be; as the report itself, a folder where a file would have to be.
    place = tmp_path / "place"
    if line.endswith("--output {0}") and command == "replay":
        place.mkdir()
    else:
        place.touch()
    modules: dict[str, Any] = {
        "replay": replay, "goodput": goodput, "muxserve": muxserve, "scheduler": scheduler, "events": events,
        "delivery": delivery, "engine": engine, "policies": policies,
    }  # fmt: skip
    assert modules[command].main([word.format(place) for word in words]) == 1
    error = capsys.readouterr().err
    assert "cannot be made" in error or "is a folder" in error


def test_folders_of_outputs_are_made(tmp_path: Path) -> None:
    check_outputs(None, tmp_path / "a" / "b" / "report.json")
    assert (tmp_path / "a" / "b").is_dir()


def test_errors_that_people_can_mend_become_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    for error, status in (
        (BenchError("one"), 1),
        (DeviceError("two"), 1),
        (OSError("three"), 1),
        (Interrupted("four"), 130),
        (KeyboardInterrupt(), 130),
    ):

        def work(raised: BaseException = error) -> int:
            raise raised

        assert reported(work) == status
    assert capsys.readouterr().err.split() == ["error:", "one", "error:", "two", "error:", "three", "error:", "four"]
    assert reported(lambda: 0) == 0
    with pytest.raises(SystemExit, match="143"):
        reported(lambda: os.kill(os.getpid(), signal.SIGTERM) or signal.pause() or 0)


def test_broken_tokenizers_baselines_and_costs(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{")
    with pytest.raises(BenchError, match="cannot be read"):
        load_tokenizer(tmp_path)
    path.write_text('{"models": {}, "x": ' + DEEP)
    with pytest.raises(BenchError, match="not a baseline file"):
        read_baseline(path)
    path.write_text(json.dumps({"m": {"1": {"10": {"1": {"9" * 5000: {"prefill": 1, "decoding": 1}}}}}}))
    with pytest.raises(BenchError, match="1 or more is allowed"):
        read_cost_file(path)
    path.write_text(json.dumps({"m": {"1": {"10": {"1": {"1": {"prefill": 10**400, "decoding": 1}}}}}}))
    with pytest.raises(BenchError):
        read_cost_file(path)


@pytest.mark.system
@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_benchmark_that_is_ended_leaves_no_process(number: signal.Signals) -> None:
    words = ["--workers", "4", "--rate", "100", "--seconds", "50"]
    with subprocess.Popen([sys.executable, "-m", "bench.scheduler", *words], cwd=ROOT, stderr=subprocess.PIPE) as ended:
        assert ended.stderr is not None
        ended.stderr.readline()  # its first figures
        children = psutil.Process(ended.pid).children(recursive=True)
        assert children
        ended.send_signal(number)
    assert not psutil.wait_procs(children, timeout=20)[1]

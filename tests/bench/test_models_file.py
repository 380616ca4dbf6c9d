"""models.yaml: the example that people begin with, MuxServe's own files, and keys that nobody knows."""

import shlex
from pathlib import Path

import pytest
import yaml

from forebay.bench import workload
from forebay.bench.errors import BenchError
from forebay.bench.models_file import read_models_file
from forebay.bench.workload_file import read_workload
from tests.bench.conftest import ROOT

EXAMPLE = ROOT / "examples" / "models.yaml"


def told(path: Path) -> list[str]:
    lines: list[str] = []
    read_models_file(path, lines.append)
    return [line.removeprefix(f"models file {path}: ") for line in lines]


def test_the_example_asks_what_the_example_server_serves() -> None:
    served = yaml.safe_load((ROOT / "examples" / "cpu.yaml").read_text(encoding="utf-8"))
    assert told(EXAMPLE) == []
    assert {model.name for model in read_models_file(EXAMPLE).models} == {model["name"] for model in served["models"]}


def test_the_documented_command_makes_a_small_workload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = (ROOT / "docs" / "workloads.md").read_text(encoding="utf-8")
    for line in EXAMPLE.read_text(encoding="utf-8").splitlines():
        assert line.startswith("#") or line in document, "the document shows another example"
    (command,) = [line for line in document.splitlines() if "-m bench.workload examples/" in line]
    words = shlex.split(command)
    output = words.index("--output") + 1
    words[output] = str(tmp_path / words[output])
    monkeypatch.chdir(ROOT)
    assert workload.main(words[3:]) == 0
    assert capsys.readouterr().err == ""
    written = read_workload(Path(words[output]))
    assert written.models == ["llm-0", "llm-1", "llm-2"]
    assert 40 <= len(written.requests) <= 80
    assert max(request.prompt_tokens for request in written.requests) <= 200
    assert sum(request.output_tokens for request in written.requests) / 30 < 40, "tokens a second"


def test_muxserves_files_are_read_without_a_word(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(
        "cluster: {nnodes: 4, ngpus_per_node: 8}\n"
        "models:\n- {name: llm-1, model: /elsewhere/llama-13b, rate: 8.13}\n"
        "- {name: llm-2, model: /elsewhere/llama-7b, rate: 1, avg_prompt_len: 12, avg_output_len: 3.5}\n"
        "avg_output_len: 261.31\navg_prompt_len: 100.17\n"
    )
    assert told(path) == []


def test_unknown_keys_are_named_and_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(
        "seed: 3\ncluster: {nnodes: 1, ngpus_per_node: 1, gpus: 4}\n"
        "models: [{name: a, rate: 1}, {name: b, rate: 1, avg_promt_len: 5}]\n"
    )
    assert [line.partition(": ")[0] for line in told(path)] == ["seed", "cluster.gpus", "models[1].avg_promt_len"]
    assert "known here: avg_output_len, avg_prompt_len, model, name, rate" in told(path)[2]
    output = tmp_path / "workload.json"
    assert workload.main([str(path), "--num-requests", "4", "--output", str(output)]) == 0
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 3
    assert warnings[2].startswith(f"warning: models file {path}: models[1].avg_promt_len: is not known")
    # A misspelt key that is required is told of before its absence is.
    path.write_text("models: [{name: a, rates: 1}]")
    lines: list[str] = []
    with pytest.raises(BenchError, match="missing required field `rate`"):
        read_models_file(path, lines.append)
    assert "models[0].rates: is not known" in lines[0]


def test_help_says_that_an_end_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        workload.main(["--help"])
    assert "Generated arrivals need --duration or --num-requests" in " ".join(capsys.readouterr().out.split())

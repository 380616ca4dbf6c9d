"""MuxServe's cost file: exact figures, and what is said about a bad one."""

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.bench.cost_file import Phase, Setting, read_cost_file, write_cost_file
from forebay.bench.errors import BenchError


def costs() -> dict[str, Any]:
    return {
        "llama-7b": {
            "2": {"100": {"1": {"32": {"prefill": 11.5, "decoding": 9}}}},
            "1": {
                "30": {"1": {"32": {"prefill": 30.25, "decoding": 17.5}}},
                "100": {
                    "1": {"32": {"prefill": 14.5, "decoding": 13.5}, "512": {"prefill": 55, "decoding": 14}},
                    "2048": {"512": {"prefill": -1.0, "decoding": -1}},
                },
            },
        },
        "llama-13b": {"1": {"100": {"1": {"32": {"prefill": 20, "decoding": 19}}}}},
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "costs.json"


def test_figures_are_found_exactly_or_not_at_all(path: Path) -> None:
    path.write_text(json.dumps(costs()))
    file = read_cost_file(path)
    assert file.models == ["llama-13b", "llama-7b"]
    assert file.settings("llama-7b") == [
        Setting(1, 30, 1, 32),
        Setting(1, 100, 1, 32),
        Setting(1, 100, 1, 512),
        Setting(1, 100, 2048, 512),
        Setting(2, 100, 1, 32),
    ]
    assert file.milliseconds("llama-7b", Setting(1, 30, 1, 32), "prefill") == 30.25
    assert file.milliseconds("llama-7b", Setting(1, 30, 1, 32), "decoding") == 17.5
    assert file.milliseconds("llama-7b", Setting(2, 100, 1, 32), "decoding") == 9.0
    assert file.milliseconds("llama-7b", Setting(1, 100, 2048, 512), "prefill") is None
    for setting, words in [
        (Setting(4, 100, 1, 32), "'llama-7b' has no number of GPUs 4; it lists 1, 2"),
        (Setting(1, 40, 1, 32), "at number of GPUs 1 has no SM % 40; it lists 30, 100"),
        (Setting(1, 100, 3, 32), "at number of GPUs 1, SM % 100 has no batch size 3; it lists 1, 2048"),
        (Setting(1, 100, 1, 64), "batch size 1 has no sequence length 64; it lists 32, 512"),
    ]:
        with pytest.raises(BenchError, match=rf"costs\.json: .*{words}"):
            file.milliseconds("llama-7b", setting, "prefill")
    with pytest.raises(BenchError, match="no model 'gpt'; it lists llama-13b, llama-7b"):
        file.settings("gpt")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "top level: an object with at least one member is needed; model -> number of GPUs"),
        ([1], "top level: an object"),
        ({"a": {"1": {}}}, "a -> 1: an object"),
        ({"a": {"0": {"100": {"1": {"32": {}}}}}}, "a: the number of GPUs is '0'; 1 or more is allowed"),
        ({"a": {"1": {"110": {"1": {"32": {}}}}}}, "a -> 1: the SM % is '110'; 1 to 100 is allowed"),
        ({"a": {"1": {"90": {"x": {"32": {}}}}}}, "a -> 1 -> 90: the batch size is 'x'; 1 or more is allowed"),
        ({"a": {"1": {"90": {"1": {"32": 5}}}}}, "a -> 1 -> 90 -> 1 -> 32 -> prefill: is None; milliseconds above 0"),
        ({"a": {"1": {"90": {"1": {"32": {"prefill": 1}}}}}}, "32 -> decoding: is None; .*-1 for not measured"),
        ({"a": {"1": {"90": {"1": {"32": {"prefill": 0, "decoding": 1}}}}}}, "prefill: is 0; milliseconds above 0"),
        ({"a": {"1": {"90": {"1": {"32": {"prefill": 1, "decoding": "9"}}}}}}, "decoding: is '9'"),
    ],
)
def test_bad_files_are_explained(path: Path, content: Any, words: str) -> None:
    path.write_text(json.dumps(content))
    with pytest.raises(BenchError, match=rf"costs\.json: {words}|costs\.json: a -> .*{words}"):
        read_cost_file(path)


def test_truncated_and_missing_files(path: Path) -> None:
    with pytest.raises(BenchError, match=r"costs\.json: cannot be read: No such file"):
        read_cost_file(path)
    path.write_text(json.dumps(costs())[:-5])
    with pytest.raises(BenchError, match=r"costs\.json: not whole JSON"):
        read_cost_file(path)


def test_what_is_written_is_read_again(path: Path) -> None:
    written: dict[str, dict[Setting, dict[Phase, float | None]]] = {
        "b": {Setting(1, 100, 2, 64): {"prefill": 1.25, "decoding": None}},
        "a": {
            Setting(2, 30, 1, 32): {"prefill": None, "decoding": None},
            Setting(1, 100, 1, 32): {"prefill": 0.5, "decoding": 1234.5},
        },
    }
    write_cost_file(path, written)
    assert json.loads(path.read_text())["b"] == {"1": {"100": {"2": {"64": {"prefill": 1.25, "decoding": -1}}}}}
    file = read_cost_file(path)
    for model, settings in written.items():
        assert file.settings(model) == sorted(settings)
        for setting, phases in settings.items():
            for phase, value in phases.items():
                assert file.milliseconds(model, setting, phase) == value

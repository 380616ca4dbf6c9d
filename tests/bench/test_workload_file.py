"""The workload file: what other tools wrote is read, and what is wrong is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.bench.errors import BenchError
from forebay.bench.workload_file import read_workload, write_workload


def foreign() -> dict[str, Any]:
    """A file as MuxServe's own tools write it, run-time fields and all."""

    def request(index: int) -> dict[str, Any]:
        return {
            "model_name": f"llm-{index}",
            "slo": None,
            "idx": index,
            "time_stamp": {},
            "data": [[5, 6, 7], 3, 8 + index],
            "submit_time": None,
            "prefill_end_time": None,
            "decode_submit_time": None,
            "end_time": None,
            "is_prefill": True,
            "output": None,
            "output_idx": 0,
            "output_tokens": None,
        }

    return {
        "info": {
            "rates": [["llm-0", 1.5], ["llm-1", 2]],
            "start": 0,
            "duration": 100,
            "num_requests": [1, 1],
            "distribution": "poisson",
            "use_share_gpt": True,
            "prompt_len": None,
            "output_len": None,
        },
        "arrivals": [0.25, 0.5],
        "requests": [request(0), request(1)],
    }


def test_foreign_file_is_read_and_survives_a_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "workload.json"
    path.write_text(json.dumps(foreign()))
    workload = read_workload(path)
    assert workload.arrivals == [0.25, 0.5]
    assert workload.info.rates == [("llm-0", 1.5), ("llm-1", 2.0)]
    assert [(r.model_name, r.prompt, r.output_tokens) for r in workload.requests] == [
        ("llm-0", [5, 6, 7], 8),
        ("llm-1", [5, 6, 7], 9),
    ]
    again = tmp_path / "again.json"
    write_workload(again, workload)
    assert read_workload(again) == workload
    written = json.loads(again.read_text())
    for original, copy in zip(foreign()["requests"], written["requests"], strict=True):
        assert copy == {key: original[key] for key in ("model_name", "slo", "idx", "time_stamp", "data")}
    assert written["info"] == foreign()["info"]
    assert set(tmp_path.iterdir()) == {path, again}  # no partial file stays behind


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(content: dict[str, Any]) -> None:
        *steps, last = [int(step) if step.isdecimal() else step for step in path.split(".")]
        target: Any = content
        for step in steps:
            target = target[step]
        target[last] = value

    return apply


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (change("requests.1.data.1", 0), ["requests[1].data[1]", "prompt_len", "is 0", ">= 1"]),
        (change("requests.0.data.2", -4), ["requests[0].data[2]", "output_len", "is -4", ">= 1"]),
        (change("requests.0.data.0.2", -1), ["requests[0].data[0][2]", "is -1", ">= 0"]),
        (change("requests.1.data.1", 2), ["requests[1]", "prompt_len", "is 2", "3"]),
        (change("requests.1.model_name", 7), ["requests[1].model_name", "is 7", "`str`"]),
        (change("requests.0", {"idx": 0}), ["requests[0]", "model_name"]),
        (change("arrivals", [0.5, 0.25]), ["arrivals[1]", "is 0.25", "0.5", "sorted"]),
        (change("arrivals", [-1.0, 0.25]), ["arrivals[0]", "is -1.0", "0 or more"]),
        (change("arrivals", [0.5]), ["1 times for 2 requests"]),
        (change("requests", []), ["requests", "empty"]),
    ],
)
def test_errors_name_file_place_value_and_rule(
    tmp_path: Path, damage: Callable[[dict[str, Any]], None], words: list[str]
) -> None:
    content = foreign()
    damage(content)
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(content))
    with pytest.raises(BenchError) as caught:
        read_workload(path)
    for word in [str(path), *words]:
        assert word in str(caught.value)


def test_truncated_and_missing_files(tmp_path: Path) -> None:
    path = tmp_path / "half.json"
    path.write_text(json.dumps(foreign())[:200])
    with pytest.raises(BenchError, match=r"half\.json: not whole JSON .*200 bytes"):
        read_workload(path)
    with pytest.raises(BenchError, match="cannot be read: No such file"):
        read_workload(tmp_path / "none.json")
    path.write_text("[1]")
    with pytest.raises(BenchError, match=r"top level: expected `object`, got `array`"):
        read_workload(path)

"""The trace is JSON whenever its worker ends, and says what ran where and when."""

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.runtime import step_trace
from forebay.runtime.step_trace import StepTrace
from forebay.sched.lane_events import LendSlabs, ModelOpened
from forebay.transport.messages import (
    Cancel,
    CopyBlocks,
    CopyDone,
    CopyFailed,
    EvictWeights,
    LaneKind,
    RestoreWeights,
    StepDone,
    StepFailed,
    StepPlan,
    WeightsBack,
    WeightsFailed,
    WeightsGone,
    Work,
)


def read(path: Path) -> list[dict[str, Any]]:
    """As Perfetto reads it: the last bracket may be missing, and the last comma there."""
    text = path.read_text()
    records: list[dict[str, Any]] = json.loads(text if text.rstrip().endswith("]") else text.rstrip().rstrip(",") + "]")
    return records


def plan(step: int, lane: LaneKind, model: str = "m", count: int = 1, share: int = 0) -> StepPlan:
    return StepPlan(step, model, (Work(1, 9, count, 0, (), True), Work(2, 9, count, 0, (), True)), lane, share)


def tracks(records: list[dict[str, Any]]) -> dict[int, str]:
    return {record["tid"]: record["args"]["name"] for record in records if record["name"] == "thread_name"}


def test_steps_are_drawn_in_their_lanes(tmp_path: Path) -> None:
    trace = StepTrace(tmp_path, "cuda:0")
    assert trace.path.name.startswith("worker-cuda-0-")
    trace.command(1.0, plan(1, "decode"))
    trace.command(1.0, plan(2, "decode"))
    trace.command(1.0, plan(3, "prefill", "n", 64, 48))
    trace.event(1.010, StepDone(1, b"", b"", 0.009))
    trace.event(1.012, StepFailed(3, "boom"))
    trace.event(1.021, StepDone(2, b"", b"", 0.012))
    trace.flush()
    records = read(trace.path)
    names = tracks(records)
    spans = [(names[r["tid"]], r["name"], r["ts"], r["dur"]) for r in records if r["ph"] == "X"]
    assert spans == [
        ("decode m", "m", 1_001_000, 9_000),
        ("prefill", "n", 1_000_000, 12_000),
        ("decode m", "m", 1_010_000, 11_000),
    ], "a step begins when the one before it in its lane has landed"
    prefill = next(r["args"] for r in records if r["ph"] == "X" and r["name"] == "n")
    assert prefill == {
        "step": 3, "model": "n", "lane": "prefill", "share": 48, "batch": 2, "prompt_tokens": 128,
        "queued_us": 1_000_000, "started_us": 1_000_000, "landed_us": 1_012_000, "failed": "boom",
    }  # fmt: skip
    trace.close()
    trace.close()
    assert json.loads(trace.path.read_text())[: len(records)] == records


def test_copies_that_overlap_have_tracks_of_their_own_and_events_are_moments(tmp_path: Path) -> None:
    trace = StepTrace(tmp_path / "t.json", "cpu:0")
    trace.event(0.5, ModelOpened("m", 100, 4, 8))
    for copy in (1, 2):
        trace.command(1.0, CopyBlocks(copy, "m", "out", (1, 2), (3, 4)))
    trace.event(1.1, CopyDone(1))
    trace.event(1.2, CopyFailed(2, "gone"))
    trace.command(2.0, CopyBlocks(3, "m", "out", (1,), (3,)))
    trace.event(2.1, CopyDone(3))
    trace.command(3.0, LendSlabs((4, 5)))
    trace.event(3.1, Cancel(7, 0))
    trace.flush()
    records = read(trace.path)
    names = tracks(records)
    assert [names[r["tid"]] for r in records if r["ph"] == "X"] == ["copies out 1", "copies out 2", "copies out 1"]
    moments = [(r["name"], r["args"]) for r in records if r["ph"] == "i"]
    assert [name for name, _ in moments] == ["ModelOpened", "LendSlabs", "Cancel"]
    assert moments[1][1] == {"slabs": [4, 5]}
    trace.close()


def test_what_is_held_back_is_bounded_and_so_is_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_trace, "MOST_BYTES", 1 << 18)
    trace = StepTrace(tmp_path / "t.json", "cpu:0")
    for number in range(5000):
        trace.command(float(number), plan(number, "decode"))
        trace.event(number + 0.5, StepDone(number, b"", b"", 0.1))
        assert trace._held <= step_trace.BUFFER_BYTES + 1000
    trace.close()
    assert (1 << 18) < trace.path.stat().st_size < (1 << 18) + 2 * step_trace.BUFFER_BYTES
    assert read(trace.path)


def test_a_full_disk_ends_the_trace_and_not_the_worker() -> None:
    trace = StepTrace(Path("/dev/full"), "cpu:0")
    trace.flush()
    assert "No space left" in trace.problem
    trace.command(1.0, plan(1, "decode"))
    trace.event(1.1, StepDone(1, b"", b"", 0.1))
    trace.close()


def test_weights_that_come_and_go_have_tracks_of_their_own(tmp_path: Path) -> None:
    trace = StepTrace(tmp_path, "cuda:0")
    trace.command(1.0, EvictWeights("m"))
    trace.event(1.25, WeightsGone("m"))
    trace.command(1.25, RestoreWeights("n"))
    trace.event(1.5, WeightsFailed("n", "boom"))
    trace.command(2.0, RestoreWeights("n"))
    trace.event(2.5, WeightsBack("n", 0.4))
    trace.close()
    records = read(trace.path)
    names = tracks(records)
    spans = [(names[r["tid"]], r["name"], r["ts"], r["dur"], r["args"]) for r in records if r["ph"] == "X"]
    assert spans == [
        ("weights out", "m", 1_000_000, 250_000, {}),
        ("weights in", "n", 1_250_000, 250_000, {"failed": "boom"}),
        ("weights in", "n", 2_000_000, 500_000, {}),
    ]

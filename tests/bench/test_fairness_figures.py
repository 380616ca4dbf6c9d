"""Figures of a fairness run, from outcomes that were made up."""

from pathlib import Path

import pytest

from forebay.bench.client import Outcome
from forebay.bench.fairness_figures import Served, draw, jain, memory_asked, percentile, service, summarise


def outcome(tenant: str, scheduled: float, times: list[float], prompt: int = 10, failure: str | None = None) -> Outcome:
    ends = {"sent": scheduled, "chunk_times": times, "ended": times[-1], "tokens": len(times)}
    return Outcome("llm", prompt, len(times), scheduled, failure=failure, tenant=tenant, **ends)  # type: ignore[arg-type]


def test_latencies_count_from_when_a_request_was_due() -> None:
    run = Served((outcome("a", 1.0, [2.0, 3.0, 5.0]), outcome("a", 2.0, [2.5, 3.0])), 0.0, 10.0)
    values = {name: value for name, (value, _) in summarise([run]).items()}
    assert values["ttft_p50"] == 1.0
    assert values["e2e_p99"] == 4.0
    assert values["tpot_p99"] == 1.5
    assert values["throughput"] == 0.5
    assert values["failed"] == 0


def test_a_request_that_failed_counts_as_that_alone() -> None:
    run = Served((outcome("a", 0.0, [1.0]), outcome("a", 0.0, [9.0], failure="timeout")), 0.0, 1.0)
    values = {name: value for name, (value, _) in summarise([run]).items()}
    assert values["failed"] == 1
    assert values["ttft_p99"] == 1.0


def test_jains_index() -> None:
    assert jain([3.0, 3.0]) == 1
    assert jain([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert percentile([], 0.5) != percentile([], 0.5), "not a number"


def test_service_counts_for_as_long_as_all_tenants_wait() -> None:
    run = Served(
        (
            outcome("a", 0.0, [1.0, 2.0, 3.0, 4.0]),
            outcome("a", 0.0, [9.0, 10.0]),
            outcome("b", 0.0, [2.0, 3.0], prompt=6),
        ),
        0.0,
        10.0,
    )
    assert service(run) == pytest.approx({"a": 10 + 2 * 2, "b": 6 + 2})


def test_memory_that_is_asked_for_counts_at_full_length_in_whole_blocks_while_something_waits() -> None:
    """Blocks of 16 tokens of 10 bytes, in a pool of 2 of them."""
    run = Served(
        (
            outcome("a", 0.0, [1.0, 10.0], prompt=15),  # 2 blocks, from 0 to 10
            outcome("a", 4.0, [5.0], prompt=31),  # 2 more, from 4 to 5
            outcome("b", 5.0, [6.0, 7.0], prompt=46, failure="timeout"),  # 3 more, from 5 to 7; it had asked for them
        ),
        0.0,
        10.0,
    )
    mean, peak = memory_asked([run], 10, 2 * 160)
    assert peak == 5 / 2
    assert mean == pytest.approx((1 * 4 / 2 + 2 * 5 / 2) / 3)
    assert memory_asked([run, run], 10, 2 * 160) == (pytest.approx(mean), peak)
    assert memory_asked([run], 10, 5 * 160) == (0.0, 1.0), "it all fits"


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    run = Served((outcome("a", 0.0, [1.0, 2.0]), outcome("b", 0.0, [2.0], failure="timeout")), 0.0, 3.0)
    draw({"fcfs": [run], "cfs": [run]}, tmp_path / "plot.png", 2)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")

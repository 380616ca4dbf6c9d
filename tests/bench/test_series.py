"""What plots show, by hand."""

from forebay.bench.client import Outcome
from forebay.bench.series import Timeline, distribution, timeline


def outcome(sent: float | None, first: float | None, ended: float | None) -> Outcome:
    chunk_times = [] if first is None or ended is None else [first, ended]
    return Outcome("a", 1, 2, scheduled=0.0, sent=sent, chunk_times=chunk_times, ended=ended)


def test_distribution() -> None:
    assert distribution([3.0, 1.0, 2.0, 2.0]) == ([1, 2, 2, 3], [0.25, 0.5, 0.75, 1])
    assert distribution([]) == ([], [])


def test_timeline_counts_waiting_and_running() -> None:
    outcomes = [
        outcome(10.0, 12.0, 15.0),
        outcome(11.0, 12.0, 13.0),
        outcome(11.0, None, 14.0),  # failed before its first token
        outcome(None, None, None),  # never sent
    ]
    assert timeline(outcomes, begin=10.0) == Timeline(
        times_s=[0, 1, 2, 3, 4, 5],
        waiting=[1, 3, 1, 1, 0, 0],
        running=[0, 0, 2, 1, 1, 0],
    )
    assert timeline([], begin=0.0) == Timeline([], [], [])

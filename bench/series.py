"""What plots show, as plain numbers: distributions and counts over time. Nothing here draws."""

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.bench.client import Outcome

ALL = "all models"
"""The name of the line that sums up."""


@dataclass(frozen=True)
class Plot:
    """A file in the folder of plots, its title, and what it shows in sentences for its reader."""

    file: str
    title: str
    caption: str


def distribution(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """The empirical distribution function: ascending values, and for each the share of all that are not above it."""
    ascending = sorted(values)
    return ascending, [(place + 1) / len(ascending) for place in range(len(ascending))]


@dataclass(frozen=True)
class Timeline:
    """Requests in flight: from `times_s[i]` on, `waiting[i]` were sent and had no token yet, and `running[i]` had a
    token and had not ended. Seconds from the begin of the replay, ascending, each once; before the first both are 0."""

    times_s: list[float]
    waiting: list[int]
    running: list[int]


def timeline(outcomes: Sequence[Outcome], begin: float) -> Timeline:
    """Of these requests; those that were never sent are not in it. `begin` is in seconds of time.perf_counter."""
    changes: dict[float, tuple[int, int]] = {}

    def change(moment: float, waiting: int, running: int) -> None:
        before = changes.get(moment, (0, 0))
        changes[moment] = before[0] + waiting, before[1] + running

    for outcome in outcomes:
        if outcome.sent is None or outcome.ended is None:
            continue
        change(outcome.sent, 1, 0)
        if outcome.chunk_times:
            change(outcome.first_token, -1, 1)
            change(outcome.ended, 0, -1)
        else:
            change(outcome.ended, -1, 0)
    result = Timeline([], [], [])
    waiting = running = 0
    for moment in sorted(changes):
        waiting += changes[moment][0]
        running += changes[moment][1]
        result.times_s.append(moment - begin)
        result.waiting.append(waiting)
        result.running.append(running)
    return result

"""Which model's step comes next on a device. One policy a class: the lane core asks for models in order of preference
and launches the first that can make a step. Policies keep no state: lanes know when they last ran.

A step of a model holds prefills and decodes alike: its weights are read once for both. Where decodes have lanes of
their own (partition.py), a policy chooses whose prefill is next. The names are MuxServe's (ICML 2024), with `fcfs` as
its other word for `temporal`.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol, TypeVar

Division = Literal["shared", "fixed", "adaptive"]
"""How the pool's memory is divided: first come first served, by quotas, or by quotas that move with the load."""

PATIENCE = 5.0
"""An answer is due when it has taken this many times as long as it would take alone (pace.py, Lane.due)."""

TURNS = 3
"""Under adbs every model with something to do gets one step in so many times the number of such models."""


class Contender(Protocol):
    """A model that could take a step."""

    @property
    def launched(self) -> int:
        """The number of its latest turn, 0 before the first."""
        ...

    @property
    def oldest(self) -> int:
        """Arrival of its oldest sequence."""
        ...

    def due(self, now: float) -> float | None:
        """When the first of its answers is due that can still be in time; None where there is none."""
        ...


Model = TypeVar("Model", bound=Contender)


class Policy(Protocol):
    name: str
    division: Division

    def choose(self, now: float, lanes: Sequence[Model]) -> Iterable[Model]:
        """Models to launch a step of next, the best first. `lanes` are those with sequences."""
        ...


class RoundRobin:
    """Models take turns, step by step."""

    name = "roundrobin"
    division: Division = "shared"

    def choose(self, now: float, lanes: Sequence[Model]) -> Iterable[Model]:
        return sorted(lanes, key=lambda lane: (lane.launched, lane.oldest))


class Temporal:
    """The whole device for the model of the oldest request, until that request has ended."""

    name = "temporal"
    division: Division = "shared"

    def choose(self, now: float, lanes: Sequence[Model]) -> Iterable[Model]:
        return sorted(lanes, key=lambda lane: lane.oldest)


class AdaptiveBatching:
    """Adaptive batch scheduling: the model whose answer is due first goes first. Answers count that can still be in
    time, if they had the device to themselves from now on; a model without such answers comes after those with, and
    none waits for more than its `TURNS`. Quotas keep a popular model from taking all memory; they follow the load.

    MuxServe's ADBS has models take turns. On a device that takes one step after the other, turns share it equally
    among all requests, and under load all are late together; nor is it worth much to serve first what will be late
    anyhow (docs/benchmarks.md has the figures)."""

    name = "adbs"
    division: Division = "adaptive"

    def choose(self, now: float, lanes: Sequence[Model]) -> Iterable[Model]:
        newest = max((lane.launched for lane in lanes), default=0)

        def rank(lane: Model) -> tuple[int, float]:
            if newest - lane.launched > TURNS * len(lanes):
                return 0, lane.launched
            due = lane.due(now)
            return (1, due) if due is not None else (2, lane.launched)

        return sorted(lanes, key=rank)


class FixedRoundRobin(RoundRobin):
    """Turns, with quotas that stay where they began."""

    name = "fix"
    division: Division = "fixed"


class FixedAdaptiveBatching(AdaptiveBatching):
    """ADBS with quotas that stay where they began."""

    name = "fix-adbs"
    division: Division = "fixed"


POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (AdaptiveBatching, RoundRobin, Temporal, FixedRoundRobin, FixedAdaptiveBatching)
}
"""By the name that a configuration or a journal gives."""

ALIASES = {"fcfs": "temporal"}

"""Which model's step comes next on a device, and of which kind. One policy a class; the lane core asks, in order of
preference, and launches the first that can make a step. Policies keep no state: lanes know when they last ran.

The names are MuxServe's (ICML 2024), with `fcfs` as its other word for `temporal`.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

from forebay.sched.sequence import Lane

Phase = Literal["mixed", "decode"]
"""A step with prefills holds its model's decodes too: the weights are read once for both."""

Division = Literal["shared", "fixed", "adaptive"]
"""How the pool's memory is divided: first come first served, by quotas, or by quotas that move with the load."""


class Policy(Protocol):
    name: str
    division: Division

    def choose(self, lanes: Sequence[Lane], prefill_in_flight: bool) -> Iterator[tuple[Lane, Phase]]:
        """Steps to launch next, the best first. `lanes` are those with sequences."""
        ...


class RoundRobin:
    """Models take turns, step by step."""

    name = "roundrobin"
    division: Division = "shared"

    def choose(self, lanes: Sequence[Lane], prefill_in_flight: bool) -> Iterator[tuple[Lane, Phase]]:
        for lane in sorted(lanes, key=lambda lane: (lane.launched, lane.oldest)):
            yield lane, "mixed"


class Temporal:
    """The whole device for the model of the oldest request, until that request has ended."""

    name = "temporal"
    division: Division = "shared"

    def choose(self, lanes: Sequence[Lane], prefill_in_flight: bool) -> Iterator[tuple[Lane, Phase]]:
        for lane in sorted(lanes, key=lambda lane: lane.oldest):
            yield lane, "mixed"


class AdaptiveBatching:
    """MuxServe's ADBS: one prefill at a time, models in turn; beside it decodes, models in turn, so that no answer
    waits for more than one chunk of a prompt. Quotas keep a popular model from taking all memory; they follow the load.
    """

    name = "adbs"
    division: Division = "adaptive"

    def choose(self, lanes: Sequence[Lane], prefill_in_flight: bool) -> Iterator[tuple[Lane, Phase]]:
        prefills = sorted((lane for lane in lanes if lane.has_prefill), key=lambda lane: (lane.prefilled, lane.oldest))
        decodes = sorted((lane for lane in lanes if lane.has_decode), key=lambda lane: (lane.launched, lane.oldest))
        if not prefill_in_flight:
            for lane in prefills:
                yield lane, "mixed"
        for lane in decodes:
            yield lane, "decode"
        if prefill_in_flight:
            for lane in prefills:
                yield lane, "mixed"


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

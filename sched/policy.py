"""Which model's step comes next on a device. One policy a class; the lane core asks, the policy only chooses."""

from collections.abc import Sequence
from typing import Protocol

from forebay.sched.sequence import Lane


class Policy(Protocol):
    """A policy sees lanes that have sequences and ranks them; the core takes the first that can make a step."""

    name: str

    def order(self, lanes: Sequence[Lane]) -> Sequence[Lane]:
        """The lanes, the one to launch next first."""
        ...


class FirstComeFirstServed:
    """Sequences are admitted in the order of their arrival; models that have some running take turns, step by step,
    so that none waits for another's long answer. Equal turns go to the model with the oldest sequence."""

    name = "fcfs"

    def order(self, lanes: Sequence[Lane]) -> Sequence[Lane]:
        return sorted(lanes, key=lambda lane: (lane.launched, lane.oldest))


POLICIES = {policy.name: policy for policy in (FirstComeFirstServed,)}
"""By the name that a configuration or a journal gives."""

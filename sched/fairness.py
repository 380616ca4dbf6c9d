"""Which sequences of a model run where not all can: the order in which they get memory, and who makes room for whom.

`fcfs`: who came first. `cfs`: who has had least, in time slices. `vtc`: whose tenant has had least (Virtual Token
Counter: Sheng et al., OSDI 2024). A policy ranks (least first) and keeps the accounts; the lane core does the rest.
Which model is next is another question, answered by a policy of sched/policy.py.
"""

from collections.abc import Mapping
from typing import Protocol

from forebay.sched.sequence import Sequence

SLICE_TOKENS = 16
"""Tokens that a sequence draws before it may have to make room. That is one KV block, so that giving way again writes
one or two new blocks (what was written before is kept); and it is long against the copies. The blocks of 4,096 tokens
of Llama-3.1-8B (512 MiB) take 1.4 ms to a peer GPU and 10 ms to the host, out and in together 3 and 20 ms, beside 16
steps of 5 ms and more (one H200). AQUA reschedules after 6 steps."""

RECOMPUTE_SHARE = 4
"""Where there is nowhere to spill to, coming back costs all known tokens anew: the slice is then at least one token for
every so many of them."""

OVERDUE_ROUNDS = 2
"""A sequence that has had nothing while everybody could have had this many slices goes first. Else a stream of
newcomers, which have had nothing either, could keep it waiting for ever."""

SENIORITY = 0.1
"""What counts against a request for each one that came before it, as a part of the mean length of outputs. Without it
the long answers of a busy hour would all end at the end of that hour, and with much more of it this is fcfs after the
first slice. Simulated, SmolLM2 on a CPU, memory overfilled three times, 1.2 x capacity: the 99th percentile of
end-to-end times is 1.79 of that of `fcfs` without seniority and 0.92 with this; that of the time to the first token is
0.06 of it either way."""

SMOOTHING = 0.05
"""Weight of the newest request in the mean length of outputs."""

INPUT_WEIGHT, OUTPUT_WEIGHT = 1, 2
"""Cost of a token by VTC: an output token occupies the device longer than one of a prompt."""

Rank = tuple[int, float, int]
"""Least first; no two sequences have the same."""


class Fairness(Protocol):
    name: str
    exchanges: bool
    """Whether those that run make room for those that wait: then all that wait may have to be spilled some time."""

    def rank(self, sequence: Sequence) -> Rank: ...

    def gives_way(self, runner: Sequence, candidate: Sequence, slice_tokens: int) -> bool:
        """Whether one that runs has to make room for one that does not, having drawn that many tokens at a stretch."""
        ...

    def arrives(self, sequence: Sequence) -> None:
        """It is one of those to be ranked from now on, until it departs."""
        ...

    def admits(self, sequence: Sequence) -> None:
        """It gets memory for the first time."""
        ...

    def draws(self, sequence: Sequence) -> None:
        """It gets one more token."""
        ...

    def departs(self, sequence: Sequence) -> None: ...

    def check(self) -> None: ...


class FirstComeFirstServed:
    """Whoever came first; nobody makes room but for an older one that runs and needs a block."""

    name = "fcfs"
    exchanges = False

    def rank(self, sequence: Sequence) -> Rank:
        return (0, 0.0, sequence.arrival)

    def gives_way(self, runner: Sequence, candidate: Sequence, slice_tokens: int) -> bool:
        return False

    def arrives(self, sequence: Sequence) -> None:
        pass

    def admits(self, sequence: Sequence) -> None:
        pass

    def draws(self, sequence: Sequence) -> None:
        pass

    def departs(self, sequence: Sequence) -> None:
        pass

    def check(self) -> None:
        pass


class LeastServiceFirst:
    """Completely fair scheduling: whoever has drawn the fewest tokens, a slice at a time; first of all those that have
    not had a slice yet, in the order of arrival. Prompts do not count: each is computed once, and until then its client
    has nothing. Seniority counts: a request ranks as if it had drawn a few tokens more for each one that came before
    it."""

    name = "cfs"
    exchanges = True

    def __init__(self) -> None:
        self._drawn = 0
        self._live = 0
        self._mean_output = 128.0

    def rank(self, sequence: Sequence) -> Rank:
        away = sequence.state in ("waiting", "spilled")
        if away and self._drawn - sequence.away_since > OVERDUE_ROUNDS * SLICE_TOKENS * self._live:
            return (0, sequence.away_since, sequence.arrival)
        had = sequence.known - sequence.start.prompt_tokens
        if had < SLICE_TOKENS:
            return (1, 0.0, sequence.arrival)
        return (2, had + SENIORITY * self._mean_output * sequence.arrival, sequence.arrival)

    def gives_way(self, runner: Sequence, candidate: Sequence, slice_tokens: int) -> bool:
        return runner.stretch >= slice_tokens and self.rank(candidate) < self.rank(runner)

    def arrives(self, sequence: Sequence) -> None:
        self._live += 1
        sequence.away_since = self._drawn

    def admits(self, sequence: Sequence) -> None:
        pass

    def draws(self, sequence: Sequence) -> None:
        self._drawn += 1
        # It is on the device until it has drawn its last: from then on it may be away.
        sequence.away_since = self._drawn

    def departs(self, sequence: Sequence) -> None:
        self._live -= 1
        self._mean_output += SMOOTHING * (sequence.delivered - self._mean_output)

    def check(self) -> None:
        assert self._live >= 0, "more sequences departed than arrived"


class VirtualTokenCounter:
    """Weighted fair service of tenants: each has a counter of what it was given, over its weight, and the one with the
    lowest is next. A tenant that had nothing to do starts at the lowest counter of those that had: what it did not use
    it has not saved up. Within a tenant: who came first."""

    name = "vtc"
    exchanges = True

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        for tenant, weight in self._weights.items():
            if not weight > 0:
                raise ValueError(f"tenant {tenant!r} has weight {weight}; a weight is more than 0")
        self.counters: dict[str, float] = {}
        self._live: dict[str, int] = {}
        self._floor = 0.0
        """The counter of the tenant that was the last to leave when nobody was left."""

    def rank(self, sequence: Sequence) -> Rank:
        return (0, self.counters[sequence.start.tenant], sequence.arrival)

    def gives_way(self, runner: Sequence, candidate: Sequence, slice_tokens: int) -> bool:
        mine, other = runner.start.tenant, candidate.start.tenant
        margin = SLICE_TOKENS * OUTPUT_WEIGHT / min(self._weight(mine), self._weight(other))
        return runner.stretch >= slice_tokens and self.counters[other] + margin < self.counters[mine]

    def arrives(self, sequence: Sequence) -> None:
        tenant = sequence.start.tenant
        if tenant not in self._live:
            floor = min((self.counters[other] for other in self._live), default=self._floor)
            self.counters[tenant] = max(floor, self.counters.get(tenant, 0.0))
            # Whoever is away and below the floor would be lifted to it: its counter says nothing any more.
            self.counters = {name: had for name, had in self.counters.items() if name in self._live or had >= floor}
        self._live[tenant] = self._live.get(tenant, 0) + 1

    def admits(self, sequence: Sequence) -> None:
        self._charge(sequence.start.tenant, INPUT_WEIGHT * sequence.came_with)

    def draws(self, sequence: Sequence) -> None:
        self._charge(sequence.start.tenant, OUTPUT_WEIGHT)

    def departs(self, sequence: Sequence) -> None:
        tenant = sequence.start.tenant
        self._live[tenant] -= 1
        if not self._live[tenant]:
            del self._live[tenant]
            if not self._live:
                self._floor = self.counters[tenant]

    def _charge(self, tenant: str, cost: int) -> None:
        self.counters[tenant] = self.counters.get(tenant, 0.0) + cost / self._weight(tenant)

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def check(self) -> None:
        assert set(self._live) <= set(self.counters), "a tenant has no counter"
        assert all(self._live.values()), "a tenant is there without a sequence"


def slice_tokens(sequence: Sequence, spills: bool) -> int:
    """How many tokens a sequence draws at a stretch before it may have to make room for another."""
    return SLICE_TOKENS if spills else max(SLICE_TOKENS, sequence.known // RECOMPUTE_SHARE)


FAIRNESS: Mapping[str, type[FirstComeFirstServed] | type[LeastServiceFirst] | type[VirtualTokenCounter]] = {
    "fcfs": FirstComeFirstServed,
    "cfs": LeastServiceFirst,
    "vtc": VirtualTokenCounter,
}
"""By the name that a configuration or a journal gives."""


def make_fairness(name: str, weights: Mapping[str, float] | None = None) -> Fairness:
    """Raises ValueError for a name that is none. Weights of tenants count under `vtc` alone."""
    if name not in FAIRNESS:
        raise ValueError(f"fairness {name!r} is unknown; there is: {', '.join(FAIRNESS)}")
    return VirtualTokenCounter(weights) if name == "vtc" else FAIRNESS[name]()

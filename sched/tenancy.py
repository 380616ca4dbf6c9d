"""Whose weights are on a device where not all models fit at once: who comes, who makes room, and when.

Weights come for requests, in the order in which models began to wait for them, one at a time. Room is made by models
that have nothing to do, the one least likely to be needed soon first; else by those that have had their turn, which is
a multiple of the time that it took to bring them. A model that makes room *drains*: nothing new of it is admitted, and
what runs may end within the time that a load takes, and is then put aside. So weights leave only when nothing needs
them, and whoever waits comes within a bounded time.

Only numbers and names here. What a model has to do is told by the lane core, which carries out the rest.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from forebay.sched.states import WEIGHTS, move
from forebay.transport.messages import EvictWeights, RestoreWeights

TURN_LOADS = 5
"""A model with something to do stays at least so many times as long as its weights took to come: at most a sixth of the
time goes into loading, whatever the load."""

LEAST_TURN_S = 0.2
"""And so long at least: shorter turns would preempt more than they compute."""

PLANNED = 2
"""Room is made for so many: for the one that comes, and meanwhile for the next. More would stand empty for longer."""

RETRY_S = 0.5
"""After a first failure; after each further one twice as long as before."""

MOST_FAILURES = 3
"""So many failures in a row, and the requests that wait fail with the reason."""

LINK_BYTES_S = 50e9
"""Until a model has come once its load is guessed: pinned host memory to one H200 (measured: 53 to 55 GB/s)."""


@dataclass(frozen=True, slots=True)
class Use:
    """What one model has to do: `work`, it has sequences, in whatever state; `holding`, some of them hold KV blocks, or
    a step or copy of it is in flight."""

    work: bool
    holding: bool


@dataclass(frozen=True, slots=True)
class PutAside:
    """The model's running sequences make room now: spilled, or to be computed again."""

    model: str


class GiveUp(NamedTuple):
    """The model's weights cannot come: its requests fail with that reason."""

    model: str
    reason: str


Action = EvictWeights | RestoreWeights | PutAside | GiveUp


@dataclass(slots=True)
class _Tenant:
    """`since`: when its weights came; `used`: when it last had something to do; `wanted`: since when it waits for them;
    `drain_until`: how long what runs may go on; `not_before`: after a failure, when to try again."""

    model: str
    size: int
    popularity: float
    load_s: float
    state: str = "away"
    since: float = -math.inf
    used: float = -math.inf
    wanted: float | None = None
    drain_until: float = 0.0
    failures: int = 0
    reason: str = ""
    not_before: float = -math.inf
    evictions: int = 0
    restores: int = 0
    last_restore_s: float = 0.0

    def move(self, event: str) -> None:
        self.state = move(WEIGHTS, "the weights of model", self.model, self.state, event)

    def worth(self, now: float) -> float:
        """How likely it is to be needed soon: the rate at which it is expected to be asked for, which falls with the
        time that it was not. What it costs to bring it back grows with its size as what its going yields does."""
        return self.popularity / (1.0 + now - self.used) if self.used > -math.inf else self.popularity * 1e-9

    def fail(self, now: float, reason: str) -> None:
        self.not_before = now + RETRY_S * 2**self.failures
        self.failures += 1
        self.reason = reason


class Tenancy:
    """For a device with a `budget` of bytes for weights. Models that were not `add`ed are always there."""

    def __init__(self, budget: int) -> None:
        if budget < 1:
            raise ValueError(f"a budget of {budget} bytes holds no weights")
        self.budget = budget
        self._tenants: dict[str, _Tenant] = {}

    def add(self, model: str, size: int, popularity: float) -> None:
        """A model of `size` bytes of weights, which are away. Raises ValueError for a second model of that name, and
        for one that can never come."""
        if model in self._tenants:
            raise ValueError(f"the weights of model {model!r} are known already")
        if not 0 < size <= self.budget:
            raise ValueError(
                f"model {model!r} has {size} bytes of weights; the device's weights_memory is {self.budget}: raise it"
            )
        self._tenants[model] = _Tenant(model, size, popularity, size / LINK_BYTES_S)

    def runs(self, model: str) -> bool:
        """Whether its weights are there, so that it can take steps."""
        tenant = self._tenants.get(model)
        return tenant is None or tenant.state in ("resident", "draining")

    def admits(self, model: str) -> bool:
        """Whether it can take steps and is to stay: only then may new sequences of it get KV blocks."""
        tenant = self._tenants.get(model)
        return tenant is None or tenant.state == "resident"

    def counts(self, model: str) -> tuple[int, int, float]:
        """Evictions, restores, and seconds of the last restore."""
        tenant = self._tenants[model]
        return tenant.evictions, tenant.restores, tenant.last_restore_s

    # Answers ---------------------------------------------------------------------------------------------------------

    def back(self, now: float, model: str, seconds: float) -> None:
        tenant = self._tenants[model]
        tenant.move("back")
        tenant.since, tenant.load_s, tenant.wanted, tenant.failures = now, seconds, None, 0
        tenant.restores += 1
        tenant.last_restore_s = seconds

    def gone(self, model: str) -> None:
        tenant = self._tenants[model]
        tenant.move("gone")
        tenant.evictions += 1
        tenant.failures = 0

    def failed(self, now: float, model: str, reason: str) -> None:
        """Its weights did not come, or did not leave: then it is the first of those that wait who lacks the room."""
        tenant = self._tenants[model]
        left = tenant.state == "leaving"
        tenant.move("fail")
        tenant.fail(now, reason)
        if left and (queue := self._queue()):
            queue[0].failures += 1
            queue[0].reason = reason

    # Decisions -------------------------------------------------------------------------------------------------------

    def decide(self, now: float, uses: Mapping[str, Use]) -> list[Action]:
        """What is to be done now, with what every model has to do. Call it after everything that happens."""
        actions: list[Action] = []
        for tenant in self._tenants.values():
            if not uses[tenant.model].work:
                tenant.wanted = None
                continue
            tenant.used = now
            if tenant.wanted is None:
                if tenant.state in ("away", "coming"):
                    tenant.wanted, tenant.failures, tenant.not_before = now, 0, now
            elif tenant.failures >= MOST_FAILURES:
                actions.append(GiveUp(tenant.model, tenant.reason))
                tenant.failures, tenant.wanted = 0, None
        self._plan(now, uses, actions)
        for tenant in self._in("draining"):
            if not uses[tenant.model].holding:
                tenant.move("evict")
                actions.append(EvictWeights(tenant.model))
            elif now >= tenant.drain_until:
                actions.append(PutAside(tenant.model))
        return actions

    def _plan(self, now: float, uses: Mapping[str, Use], actions: list[Action]) -> None:
        """Goes through those that wait, in order, with the room that there is and the room that is being made. The
        first one that finds too little ends it: else small ones could keep a large one out for ever."""
        free = self.budget - sum(tenant.size for tenant in self._tenants.values() if tenant.state != "away")
        to_come = free + sum(tenant.size for tenant in self._in("draining", "leaving"))
        ready = [tenant for tenant in self._queue() if tenant.not_before <= now]
        for tenant in ready[: PLANNED - len(self._in("coming"))]:
            if tenant.size > to_come:
                victims = self._victims(now, uses, tenant.size - to_come)
                if not victims:
                    return
                for victim in victims:
                    victim.move("drain")
                    victim.drain_until = now + victim.load_s if uses[victim.model].work else now
                    to_come += victim.size
            if tenant.size <= free and not self._in("coming"):
                self._restore(tenant, actions)
                free -= tenant.size
            to_come -= tenant.size
        for tenant in reversed(self._in("draining")):
            if tenant.size <= to_come:  # whoever wanted its room is gone
                tenant.move("keep")
                to_come -= tenant.size
        if not self._queue() and not self._in("coming"):
            self._fetch_ahead(now, min(free, to_come), actions)

    def _fetch_ahead(self, now: float, room: int, actions: list[Action]) -> None:
        """Nobody waits: room that is free is filled with what is likely to be needed."""
        fitting = [t for t in self._in("away") if t.size <= room and t.not_before <= now and t.failures < MOST_FAILURES]
        if fitting:
            # Of those that were never used the first ones that the configuration names.
            self._restore(max(fitting, key=lambda tenant: tenant.worth(now)), actions)

    def _restore(self, tenant: _Tenant, actions: list[Action]) -> None:
        tenant.move("restore")
        actions.append(RestoreWeights(tenant.model))

    def _victims(self, now: float, uses: Mapping[str, Use], lack: int) -> list[_Tenant]:
        """Whose going makes room for so many bytes; none if those that may go are too few."""
        idle, served = [], []
        for tenant in self._in("resident"):
            if tenant.not_before > now:
                continue
            if not uses[tenant.model].work:
                idle.append(tenant)
            elif now >= tenant.since + max(LEAST_TURN_S, TURN_LOADS * tenant.load_s):
                served.append(tenant)
        idle.sort(key=lambda tenant: tenant.worth(now))
        served.sort(key=lambda tenant: tenant.since)
        chosen: list[_Tenant] = []
        for tenant in (*idle, *served):
            if lack > 0:
                chosen.append(tenant)
                lack -= tenant.size
        if lack > 0:
            return []
        for tenant in reversed(chosen):  # the last one may have made others needless
            if lack + tenant.size <= 0:
                chosen.remove(tenant)
                lack += tenant.size
        return chosen

    def _queue(self) -> list[_Tenant]:
        """Who waits for weights, in order."""
        waiting = [(tenant.wanted, tenant) for tenant in self._in("away") if tenant.wanted is not None]
        return [tenant for _, tenant in sorted(waiting, key=lambda pair: pair[0])]

    def _in(self, *states: str) -> list[_Tenant]:
        return [tenant for tenant in self._tenants.values() if tenant.state in states]

    def check(self, holding: Iterable[str]) -> None:
        """Asserts that the budget holds, and that the models that need their weights have them."""
        present = sum(tenant.size for tenant in self._tenants.values() if tenant.state != "away")
        assert present <= self.budget, f"{present} bytes of weights, the budget is {self.budget}"
        for model in holding:
            assert self.runs(model), f"the weights of {model} are {self._tenants[model].state}, and it needs them"

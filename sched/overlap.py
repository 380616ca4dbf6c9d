"""Tells from launches and landings which steps ran beside a step of the other phase, and teaches the costs."""

from dataclasses import dataclass

from forebay.sched.cost import Costs
from forebay.transport.messages import StepDone, StepPlan

BESIDE, APART = 0.9, 0.1
"""A step that overlaps the other phase for at least, or at most, such a part of its time says something about running
beside it, or apart from it; between them it says nothing."""


@dataclass(slots=True)
class _Busy:
    """How long steps of a phase were in flight, added up."""

    flying: int = 0
    since: float = 0.0
    total: float = 0.0

    def until(self, now: float) -> float:
        return self.total + (now - self.since if self.flying else 0.0)

    def change(self, now: float, by: int) -> None:
        self.total = self.until(now)
        self.since = now
        self.flying += by


@dataclass(slots=True)
class _Lane:
    """Since when a lane works on its oldest step, and what the other phase's time was then; `share` is that of the last
    prefill."""

    flying: int = 0
    since: float = 0.0
    other: float = 0.0
    share: int = 0


class Overlaps:
    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._phases = {"decode": _Busy(), "prefill": _Busy()}
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._share = 0

    def launched(self, now: float, plan: StepPlan) -> None:
        phase = "prefill" if plan.lane == "prefill" else "decode"
        lane = self._lane(plan, phase)
        if phase == "prefill":
            self._share = plan.share
        if not lane.flying:
            self._begin(now, lane, phase)
        lane.flying += 1
        self._phases[phase].change(now, 1)

    def landed(self, now: float, plan: StepPlan, done: StepDone | None) -> None:
        """A step has landed, or failed (None)."""
        phase = "prefill" if plan.lane == "prefill" else "decode"
        lane = self._lane(plan, phase)
        other = self._phases["prefill" if phase == "decode" else "decode"]
        took = now - lane.since
        part = (other.until(now) - lane.other) / took if took > 0 else 0.5
        steady = lane.share == self._share
        lane.flying -= 1
        self._phases[phase].change(now, -1)
        self._begin(now, lane, phase)
        if done is None or not done.seconds > 0 or APART < part < BESIDE or not steady:
            return
        tokens = sum(work.count for work in plan.work)
        if phase == "prefill":
            self._costs.prefill_landed(plan.model, tokens, done.seconds, plan.share, part >= BESIDE)
            return
        decodes = [work.start + 1 for work in plan.work if work.count == 1]
        along = tokens - len(decodes)
        if not along:
            beside = self._share if part >= BESIDE else None
            self._costs.decode_landed(plan.model, tokens, sum(decodes), done.seconds, beside)
        elif decodes and part <= APART:
            self._costs.ride_landed(plan.model, len(decodes), sum(decodes), along, done.seconds)
        elif not decodes and self._phases["decode"].flying == lane.flying and part <= APART:
            self._costs.prefill_landed(plan.model, tokens, done.seconds, 0, False)  # with the device to itself

    def _lane(self, plan: StepPlan, phase: str) -> _Lane:
        # The prefill lane is the device's, whatever the model.
        return self._lanes.setdefault((phase, plan.model if phase == "decode" else ""), _Lane())

    def _begin(self, now: float, lane: _Lane, phase: str) -> None:
        lane.since, lane.share = now, self._share
        lane.other = self._phases["prefill" if phase == "decode" else "decode"].until(now)

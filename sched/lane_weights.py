"""The lane core's side of weights that come and go (tenancy.py decides): what every model has to do, and what follows
for its sequences. Without a budget all weights stay, and nothing here does anything.
"""

from collections.abc import Collection, Mapping

from forebay.sched.fairness import slice_tokens
from forebay.sched.lane_events import LaneCommand, Report
from forebay.sched.residency import Residency
from forebay.sched.sequence import Lane, Sequence
from forebay.sched.tenancy import GiveUp, PutAside, Tenancy, Use
from forebay.transport.messages import WeightsBack, WeightsFailed, WeightsGone, WeightsMoved


class LaneWeights:
    """`budget`: bytes of the device for weights; 0: no bound."""

    def __init__(self, budget: int, residency: Residency) -> None:
        self.tenancy = Tenancy(budget) if budget else None
        self._residency = residency
        self._last: dict[str, Sequence | None] = {}
        """Of models that drain: the sequence that makes room last."""

    def open(self, lane: Lane, size: int, popularity: float) -> None:
        """A model whose `size` bytes of weights are away; 0: they are there, and stay. Raises ValueError."""
        if self.tenancy is not None and size:
            self.tenancy.add(lane.model, size, popularity)
            self._mark(lane)

    def answered(self, now: float, event: WeightsGone | WeightsBack | WeightsFailed) -> list[LaneCommand]:
        """What was asked for has happened, or has failed. Raises ValueError where nobody can have asked."""
        if self.tenancy is None:
            raise ValueError(f"weights of model {event.model!r} moved, but the device has no budget for weights")
        match event:
            case WeightsGone(model):
                self.tenancy.gone(model)
                return [Report(WeightsMoved(model, False, 0.0))]
            case WeightsBack(model, seconds):
                self.tenancy.back(now, model, seconds)
                return [Report(WeightsMoved(model, True, seconds))]
            case WeightsFailed(model, reason):
                self.tenancy.failed(now, model, reason)
                return []

    def decide(
        self, now: float, lanes: Mapping[str, Lane], flying: Collection[str]
    ) -> tuple[list[LaneCommand], list[GiveUp]]:
        """Which weights move now, and which models' requests are to fail. `flying`: models with steps in flight."""
        if self.tenancy is None:
            return [], []
        uses = {
            name: Use(bool(lane.running or lane.waiting or lane.going), bool(lane.running) or name in flying)
            for name, lane in lanes.items()
        }
        commands: list[LaneCommand] = []
        given_up: list[GiveUp] = []
        for action in self.tenancy.decide(now, uses):
            match action:
                case PutAside(model):
                    self._put_aside(lanes[model])
                case GiveUp():
                    given_up.append(action)
                case _:
                    commands.append(action)
        for lane in lanes.values():
            self._mark(lane)
        return commands, given_up

    def _put_aside(self, lane: Lane) -> None:
        """One sequence stays until it has had a slice: else answers whose beginning takes longer than a turn, and is
        computed again each time, would never end."""
        last = self._last.setdefault(lane.model, min(lane.running, key=self._residency.fairness.rank, default=None))
        spills = self._residency.swap.space.capacity > 0
        if last not in lane.running or last.stretch >= slice_tokens(last, spills):
            last = None
        self._residency.put_aside(lane, last)

    def _mark(self, lane: Lane) -> None:
        assert self.tenancy is not None
        lane.present, lane.admits = self.tenancy.runs(lane.model), self.tenancy.admits(lane.model)
        if lane.admits or not lane.present:
            self._last.pop(lane.model, None)
        if not lane.admits:
            for sequence in lane.waiting:  # whoever waits for memory here keeps nobody else from it meanwhile
                self._residency.forget(sequence)

    def check(self, lanes: Mapping[str, Lane], flying: Collection[str]) -> None:
        if self.tenancy is not None:
            self.tenancy.check([name for name, lane in lanes.items() if lane.running or name in flying])

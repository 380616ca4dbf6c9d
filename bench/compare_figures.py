"""What the points of a comparison say: attainment, goodput, ratios. Plain numbers; nothing here prints or draws."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from forebay.bench import report as reports
from forebay.bench.baseline import Baseline
from forebay.bench.compare_arms import ARMS
from forebay.bench.compare_folder import ArmState, Point
from forebay.bench.errors import BenchError
from forebay.bench.report import Group

LATE_S = 0.02
"""A load generator whose 99th percentile is later than this blurs what it measures."""


@dataclass(frozen=True)
class Goodput:
    """Requests per second that an arm holds. `rate` lies between the highest rate that was swept and held, and the next
    one, which was not (`bound` "between": by a straight line between their attainments); it is the highest rate swept
    where that was held ("least"), or the lowest where not even that was ("below")."""

    rate: float
    bound: Literal["between", "least", "below"]
    calls: frozenset[str]

    def __str__(self) -> str:
        return {"between": "", "least": "≥ ", "below": "< "}[self.bound] + f"{self.rate:.3g}"


@dataclass(frozen=True)
class Ratio:
    """Of two arms' goodputs, as far as the sweep tells: `value`, or at least or at most that (`bound`). `together`: one
    call measured both."""

    value: float
    bound: Literal["", "≥ ", "≤ "]
    together: bool

    def __str__(self) -> str:
        return f"{self.bound}{self.value:.2f}{'' if self.together else '*'}"


@dataclass(frozen=True)
class Comparison:
    """All that is kept in a folder. `reference` is the arm whose lone requests are the yardstick of the SLO for every
    arm, or the file that was given."""

    points: Sequence[Point]
    arms: Mapping[str, ArmState]
    baseline: Baseline
    reference: str
    scales: Sequence[float]
    target: float
    _groups: dict[tuple[str, float, str | None], Group] = field(default_factory=dict, init=False, compare=False)

    def of(self, arm: str) -> list[Point]:
        return sorted((point for point in self.points if point.arm == arm), key=lambda point: point.rate)

    @property
    def measured(self) -> list[str]:
        """Arms with points, in the order of tables."""
        return [arm for arm in ARMS if any(point.arm == arm for point in self.points)]

    def group(self, point: Point, model: str | None = None) -> Group:
        """The numbers of a point, or of one model's requests in it."""
        key = point.arm, point.rate, model
        if key not in self._groups:
            outcomes = [one for one in point.outcomes if model in (None, one.model)]
            self._groups[key] = reports.summarize(outcomes, self.baseline, self.scales, point.duration_s)
        return self._groups[key]

    def attainment(self, point: Point, scale: float) -> float:
        return self.group(point).slo_attainment[f"{scale:g}"] or 0.0

    def goodput(self, arm: str, scale: float) -> Goodput | None:
        """None for an arm without points."""
        held: tuple[float, float, str] | None = None
        for point in self.of(arm):
            share = self.attainment(point, scale)
            if share >= self.target:
                held = point.rate, share, point.call
            elif held is None:
                return Goodput(point.rate, "below", frozenset([point.call]))
            else:
                rate = held[0] + (point.rate - held[0]) * (held[1] - self.target) / (held[1] - share)
                return Goodput(rate, "between", frozenset([held[2], point.call]))
        return None if held is None else Goodput(held[0], "least", frozenset([held[2]]))

    def ratio(self, arm: str, beside: str, scale: float) -> Ratio | None:
        """None where the sweep does not tell: both held its highest rate, neither its lowest, one was not measured."""
        one, other = self.goodput(arm, scale), self.goodput(beside, scale)
        if one is None or other is None:
            return None
        together = len(one.calls | other.calls) == 1
        match one.bound, other.bound:
            case "between", "between":
                return Ratio(one.rate / other.rate, "", together)
            case "least", "between" | "below":
                return Ratio(one.rate / other.rate, "≥ ", together)
            case "between", "below":
                return Ratio(one.rate / other.rate, "≥ ", together)
            case "between", "least":
                return Ratio(one.rate / other.rate, "≤ ", together)
            case "below", "between" | "least":
                return Ratio(one.rate / other.rate, "≤ ", together)
        return None


def reference_baseline(points: Sequence[Point], arms: Mapping[str, ArmState]) -> tuple[str, Baseline]:
    """The first arm, in the order of tables, that knows all models of the points. Raises BenchError if none does."""
    models = {sample.model for point in points for sample in point.samples}
    for arm in ARMS:
        baseline = arms[arm].baseline if arm in arms else None
        if baseline is not None and models <= set(baseline.models):
            return arm, baseline
    raise BenchError("no arm has measured what lone requests take: run one arm, or give --baseline FILE")

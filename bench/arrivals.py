"""When requests arrive: the law of the gaps, rates that change over time, and the two together as arrival times."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from forebay.bench.draws import Draws
from forebay.bench.errors import BenchError

LARGEST_CV = 100.0
SMALLEST_CV = 0.01


@dataclass(frozen=True)
class Gaps:
    """The law of the gaps between the requests of one model, of mean 1: a gamma or a Weibull distribution of this
    `shape`. Shape 1 is the exponential one of a Poisson process in both; below 1 arrivals come in bursts."""

    kind: Literal["poisson", "gamma", "weibull"]
    shape: float = 1.0

    @classmethod
    def parse(cls, text: str) -> "Gaps":
        """`poisson`, `gamma:CV` or `weibull:CV`, where CV is standard deviation / mean. Raises BenchError."""
        kind, colon, number = text.partition(":")
        try:
            cv = float(number) if colon else math.nan
        except ValueError:
            cv = math.nan
        fits = SMALLEST_CV <= cv <= LARGEST_CV
        match kind:
            case "poisson" if not colon:
                return cls("poisson")
            case "gamma" if fits:
                return cls("gamma", 1 / cv**2)
            case "weibull" if fits:
                return cls("weibull", weibull_shape(cv))
        raise BenchError(
            f"gaps {text!r}: allowed are poisson, gamma:CV and weibull:CV, with a CV (standard deviation / mean of the "
            f"gaps) from {SMALLEST_CV:g} to {LARGEST_CV:g}"
        )

    def draw(self, draws: Draws) -> float:
        match self.kind:
            case "poisson":
                return draws.exponential(1.0)
            case "gamma":
                return draws.gamma(self.shape) / self.shape
            case "weibull":
                return math.pow(draws.exponential(1.0), 1 / self.shape) / math.gamma(1 + 1 / self.shape)

    def draw_first(self, draws: Draws) -> float:
        """From a moment that has nothing to do with the arrivals to the first one after it: a uniform part of a gap
        that is drawn in proportion to its length. So the mean rate is kept from the start; beginning with a whole
        gap would give (CV² - 1) / 2 requests too many or too few."""
        match self.kind:
            case "poisson":
                return draws.exponential(1.0)
            case "gamma":
                gap = draws.gamma(self.shape + 1) / self.shape
            case "weibull":
                gap = math.pow(draws.gamma(1 + 1 / self.shape), 1 / self.shape) / math.gamma(1 + 1 / self.shape)
        return gap * draws.uniform()


POISSON = Gaps("poisson")


def weibull_shape(cv: float) -> float:
    """The shape of the Weibull distribution with this coefficient of variation (CV² = Γ(1+2/k) / Γ(1+1/k)² - 1), by
    bisection: CV falls as the shape grows."""
    target = math.log1p(cv * cv)
    low, high = 0.05, 200.0
    for _ in range(100):
        middle = (low + high) / 2
        if math.lgamma(1 + 2 / middle) - 2 * math.lgamma(1 + 1 / middle) > target:
            low = middle
        else:
            high = middle
    return (low + high) / 2


@dataclass(frozen=True)
class Rate:
    """Requests per second over time: `steps[k]` from k x `step_s` seconds on; after the last one the first again."""

    steps: tuple[float, ...]
    step_s: float = math.inf

    @property
    def mean(self) -> float:
        """Over all steps."""
        return sum(self.steps) / len(self.steps)

    def divided_by(self, divisor: float) -> "Rate":
        return Rate(tuple(step / divisor for step in self.steps), self.step_s)


def arrival_times(rate: Rate, gaps: Gaps, draws: Draws) -> Iterator[float]:
    """Endless (but for rates near 0) and ascending, in seconds from 0; nothing where the rate is 0 all the time.

    The gaps are drawn of mean 1 on a clock that runs at the rate's speed, so the rate steers how fast and the law
    how unevenly requests come, whatever the rate does."""
    if rate.mean <= 0:
        return
    step = 0
    begin, left = 0.0, gaps.draw_first(draws)
    while True:
        speed = rate.steps[step % len(rate.steps)]
        end = (step + 1) * rate.step_s
        if left <= speed * (end - begin):
            begin += left / speed if left > 0 else 0.0
            if begin == math.inf:
                return  # a rate so low that time has no number for it
            yield begin
            left = gaps.draw(draws)
        else:
            left -= speed * (end - begin)
            begin, step = end, step + 1


def power_law_rates(count: int, alpha: float, total: float) -> list[float]:
    """Rates in proportion to i^-`alpha` for i = 1 .. `count`, `total` requests per second together."""
    weights = [rank**-alpha for rank in range(1, count + 1)]
    return [total * weight / sum(weights) for weight in weights]


def drifting_rates(rates: Sequence[float], period_s: float) -> list[Rate]:
    """The models keep changing places: each `period_s` seconds every model takes over the rate of the one behind it,
    and the last that of the first, so the sum stays and after len(rates) periods all is as it was."""
    count = len(rates)
    return [
        Rate(tuple(rates[(place + turn) % count] for turn in range(count)), period_s if count > 1 else math.inf)
        for place in range(count)
    ]

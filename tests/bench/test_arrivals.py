"""Gaps of the law asked for, rates that change, and the arrivals that follow: by hand where possible."""

import itertools
import math
from statistics import fmean, pstdev

import pytest

from forebay.bench.arrivals import Gaps, Rate, arrival_times, drifting_rates, power_law_rates, weibull_shape
from forebay.bench.draws import Draws
from forebay.bench.errors import BenchError
from forebay.bench.generate import generate
from forebay.bench.lengths import Lengths, RandomPrompts, Vocabulary
from forebay.bench.models_file import ModelLoad
from forebay.bench.workload_file import Workload


class EvenGaps(Gaps):
    """Every gap exactly 1."""

    def draw(self, draws: Draws) -> float:
        return 1.0

    draw_first = draw


def times(rate: Rate, until: float, gaps: Gaps, seed: int = 0) -> list[float]:
    return list(itertools.takewhile(lambda time: time < until, arrival_times(rate, gaps, Draws(seed, "test"))))


def test_gamma_draws_are_pinned() -> None:
    # Written down once: another machine or release must draw the same numbers.
    draws = Draws(7, "gamma")
    assert [draws.gamma(shape) for shape in (0.25, 1.0, 6.5)] == pytest.approx(PINNED_GAMMA, rel=1e-12)


PINNED_GAMMA = [0.18913284116029475, 0.6881274610120001, 6.0628472656949715]


@pytest.mark.parametrize(
    ("text", "cv"), [("poisson", 1), ("gamma:0.3", 0.3), ("gamma:2", 2), ("weibull:0.5", 0.5), ("weibull:2", 2)]
)
def test_gaps_have_mean_1_and_the_cv_asked_for(text: str, cv: float) -> None:
    gaps, draws = Gaps.parse(text), Draws(3, text)
    drawn = [gaps.draw(draws) for _ in range(40000)]
    assert fmean(drawn) == pytest.approx(1, abs=0.04)
    assert pstdev(drawn) / fmean(drawn) == pytest.approx(cv, rel=0.06)


def test_weibull_shapes_with_a_known_cv() -> None:
    assert weibull_shape(1.0) == pytest.approx(1)
    assert weibull_shape(math.sqrt(4 / math.pi - 1)) == pytest.approx(2)  # Rayleigh
    assert weibull_shape(math.sqrt(5)) == pytest.approx(0.5)  # CV² = Γ(5) / Γ(3)² - 1 = 5


@pytest.mark.parametrize("text", ["gamma", "gamma:0", "gamma:x", "weibull:1000", "poisson:1", "pareto:2", "gamma:nan"])
def test_bad_gaps_are_named(text: str) -> None:
    with pytest.raises(BenchError, match=rf"gaps '{text}'.*poisson, gamma:CV and weibull:CV"):
        Gaps.parse(text)


def test_arrivals_follow_a_rate_that_changes() -> None:
    # 2/s for a second, silence for a second, 4/s for a second, and again.
    rate = Rate((2.0, 0.0, 4.0), 1.0)
    assert rate.mean == 2
    assert times(rate, 4.1, EvenGaps("poisson")) == pytest.approx([0.5, 1, 2.25, 2.5, 2.75, 3, 3.5, 4])
    assert times(Rate((4.0,)), 1, EvenGaps("poisson")) == pytest.approx([0.25, 0.5, 0.75])
    # A gap may reach over a change: 0.5 of it at 0.5/s, the other half at 2/s.
    assert times(Rate((0.5, 2.0), 1.0), 1.5, EvenGaps("poisson")) == pytest.approx([1.25])
    assert list(arrival_times(Rate((0.0, 0.0), 1.0), EvenGaps("poisson"), Draws(0, "test"))) == []


@pytest.mark.parametrize("text", ["poisson", "gamma:3", "weibull:3", "gamma:0.3"])
def test_the_rate_holds_from_the_very_start(text: str) -> None:
    # Beginning with a whole gap, gamma:3 would have up to 4 requests too many here.
    gaps = Gaps.parse(text)
    counts = [len(times(Rate((1.0,)), 5.0, gaps, seed)) for seed in range(2000)]
    assert fmean(counts) == pytest.approx(5, abs=4 * pstdev(counts) / math.sqrt(2000))
    assert pstdev(counts) / math.sqrt(2000) < 0.2


def test_power_law() -> None:
    assert power_law_rates(3, 1.0, 11.0) == pytest.approx([6, 3, 2])
    assert power_law_rates(2, 2.0, 10.0) == pytest.approx([8, 2])
    assert power_law_rates(4, 0.0, 2.0) == pytest.approx([0.5] * 4)


def test_drift_rotates_the_ranking_and_keeps_the_sum() -> None:
    assert drifting_rates([12, 5, 3], 60.0) == [Rate((12, 5, 3), 60.0), Rate((5, 3, 12), 60.0), Rate((3, 12, 5), 60.0)]
    assert drifting_rates([7.0], 60.0) == [Rate((7.0,), math.inf)]


MODELS = [ModelLoad("a", 12.0), ModelLoad("b", 5.0), ModelLoad("c", 3.0)]


def made(models: list[ModelLoad], gaps: Gaps, rates: list[Rate] | None = None, duration: float = 300.0) -> Workload:
    source = RandomPrompts(Vocabulary(range(50, 60)), Lengths.parse("uniform:1:9"), Lengths.parse("uniform:1:9"))
    return generate(models, lambda _: source, seed=4, duration=duration, gaps=gaps, rates=rates)


def arrivals_of(workload: Workload, name: str) -> list[float]:
    pairs = zip(workload.arrivals, workload.requests, strict=True)
    return [arrival for arrival, request in pairs if request.model_name == name]


def test_popularity_drifts_through_a_whole_workload() -> None:
    workload = made(MODELS, Gaps.parse("gamma:0.5"), drifting_rates([12.0, 5.0, 3.0], 100.0))
    for name, expected in (("a", (12, 5, 3)), ("b", (5, 3, 12)), ("c", (3, 12, 5))):
        counts = [0, 0, 0]
        for arrival in arrivals_of(workload, name):
            counts[int(arrival // 100)] += 1
        for count, rate in zip(counts, expected, strict=True):
            assert count == pytest.approx(100 * rate, abs=4 * 0.5 * math.sqrt(100 * rate))
    assert workload.info.distribution == "gamma"
    assert dict(workload.info.rates) == pytest.approx({"a": 20 / 3, "b": 20 / 3, "c": 20 / 3})


def test_one_model_more_leaves_the_others_as_they_were() -> None:
    gaps = Gaps.parse("weibull:2")
    few, many = made(MODELS[:2], gaps), made(MODELS, gaps)
    for name in ("a", "b"):
        assert arrivals_of(few, name) == arrivals_of(many, name)
        prompts = [[r.data for r in workload.requests if r.model_name == name] for workload in (few, many)]
        assert prompts[0] == prompts[1]
    assert many.arrivals == sorted(many.arrivals)
    assert [request.idx for request in many.requests] == list(range(len(many.requests)))

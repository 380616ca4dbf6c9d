"""Choosing tokens: exact where it is exact, and by the numbers where it is drawn."""

from collections.abc import Iterable
from itertools import repeat

import numpy as np
import pytest
import torch

from forebay.gpu.sampling import Draw, choose, waiting_times
from forebay.transport.messages import Sampling
from tests.effort import effort

NO_END = frozenset[int]()


def sampling(**fields) -> Sampling:
    return Sampling(max_tokens=10**6, **fields)


def frequencies(logits: torch.Tensor, count: int, **fields) -> np.ndarray:
    """How often each token is drawn over `count` output tokens of one request."""
    parameters = sampling(temperature=1.0, **fields) if "temperature" not in fields else sampling(**fields)
    draws = [Draw(parameters, index) for index in range(count)]
    tokens, _ = choose(logits.repeat(count, 1), draws, NO_END)
    return np.bincount(tokens, minlength=logits.numel()) / count


def assert_close(found: np.ndarray, expected: np.ndarray, count: int) -> None:
    """Within five standard deviations of every frequency."""
    bound = 5 * np.sqrt(expected * (1 - expected) / count) + 1e-12
    assert (np.abs(found - expected) <= bound).all(), (found, expected)


def waiting(seeds: Iterable[int], indices: Iterable[int], vocabulary: int) -> np.ndarray:
    return np.array([waiting_times(seed, index, vocabulary) for seed, index in zip(seeds, indices, strict=False)])


@pytest.mark.parametrize("along", ["tokens", "indices", "seeds"])
def test_waiting_times_are_exponential_and_independent(along) -> None:
    n = 2000
    times = {
        "tokens": lambda: waiting(repeat(7), range(64), n),
        "indices": lambda: waiting(repeat(7), range(n), 64).T,
        "seeds": lambda: waiting(range(n), repeat(3), 64).T,
    }[along]()
    assert times.min() > 0
    uniform = np.exp(-times)
    assert_close(np.histogram(uniform, 20, (0, 1))[0] / uniform.size, np.full(20, 0.05), uniform.size)
    one_row = 5 * np.sqrt(1 / 12 / n)
    assert (np.abs(uniform.mean(1) - 0.5) < one_row).all()
    correlations = np.corrcoef(uniform)
    assert np.abs(correlations - np.eye(64)).max() < 6 / np.sqrt(n), "between any two of 64 rows"
    assert abs(np.corrcoef(uniform[:, :-1].ravel(), uniform[:, 1:].ravel())[0, 1]) < 5 / np.sqrt(uniform.size)


def test_waiting_times_never_change_between_versions() -> None:
    """A request may be resumed by a worker of another version, which must draw the same tokens."""
    golden = [
        2.037660179908913, 0.09160975586233158, 0.5235631923754651,
        1.699496321728226, 0.47565943971950986, 0.04168945973594164,
        0.17774594244110709, 2.5246908198998974, 0.30695529051567333,
    ]  # fmt: skip
    found = [waiting_times(seed, index, 100)[[0, 1, 99]] for seed, index in ((0, 0), (0, 1), (2**63, 5))]
    assert np.concatenate(found).tolist() == pytest.approx(golden, rel=1e-12)
    assert (waiting_times(5, 6, 100) == waiting_times(5, 6, 4000)[:100]).all()
    assert (waiting_times(-1, 0, 10) == waiting_times(2**64 - 1, 0, 10)).all()


@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("vocabulary", [1, 31, 700, 20_000])
def test_the_token_drawn_is_the_first_of_the_whole_race(spread, vocabulary) -> None:
    """Most waiting times are never made; which these are must not show."""
    logits = spread * torch.randn(20, vocabulary, generator=torch.Generator().manual_seed(6))
    draws = [Draw(sampling(temperature=0.8, seed=n), 3 * n) for n in range(20)]
    weights = torch.softmax(logits.double() / 0.8, -1).numpy()
    arrivals = waiting(range(20), range(0, 60, 3), vocabulary) / weights
    assert choose(logits, draws, NO_END)[0].tolist() == arrivals.argmin(1).tolist()


def test_temperature_zero_is_the_first_of_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 1.0, 2.0, 5.0]])
    tokens, stopped = choose(logits, [Draw(sampling(), 0)] * 2, NO_END)
    assert (tokens.tolist(), stopped.tolist()) == ([1, 0], [0, 0])
    assert tokens.dtype == np.uint32
    assert stopped.dtype == np.uint8


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_tempered_distribution(temperature) -> None:
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0, -30.0, 1.5])
    found = frequencies(logits, 40_000, temperature=temperature, seed=5)
    assert_close(found, torch.softmax(logits.double() / temperature, 0).numpy(), 40_000)


def test_nucleus_keeps_the_fewest_tokens_that_reach_top_p() -> None:
    probabilities = np.array([0.1, 0.4, 0.05, 0.3, 0.15])
    logits, count = torch.tensor(probabilities).log().float(), effort(1000, 2000)
    for top_p, kept in ((0.39, [1]), (0.69, [1, 3]), (0.71, [1, 3, 4]), (0.999, [0, 1, 2, 3, 4])):
        expected = np.zeros(5)
        expected[kept] = probabilities[kept] / probabilities[kept].sum()
        assert_close(frequencies(logits, count, top_p=top_p, seed=9), expected, count)


def test_tokens_as_probable_as_the_least_of_the_nucleus_stay() -> None:
    logits = torch.zeros(1000)
    logits[::2] = 0.5
    found = frequencies(logits, 4000, top_p=0.5)
    assert found[1::2].sum() == 0
    assert (found[::2] > 0).sum() > 480, "0.5 is reached by 402 of the 500"


@pytest.mark.parametrize("temperature", [0.2, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [1e-9, 0.2, 0.95, 1 - 1e-9, 1 - 2**-53])
def test_nucleus_is_the_one_of_the_definition_at_any_width(temperature, top_p) -> None:
    """The draw with every kept token's waiting time and weight at hand: a token too many or too few would win."""
    for row, spread in enumerate((0.01, 1.0, 5.0, 30.0)):
        logits = spread * torch.randn(1, 3000, generator=torch.Generator().manual_seed(row))
        weights = nucleus(logits / temperature, top_p)[0].numpy()
        for index in range(20):
            draw = Draw(sampling(temperature=temperature, top_p=top_p, seed=row), index)
            with np.errstate(divide="ignore"):
                winner = (waiting_times(row, index, 3000) / weights).argmin()
            assert choose(logits.clone(), [draw], NO_END)[0].tolist() == [winner]


@pytest.mark.parametrize("top_p", [0.9, 1.0])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_draws_pass_a_chi_square_test(temperature, top_p) -> None:
    vocabulary, count = 900, effort(2500, 5000)
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(8))
    probabilities = nucleus(logits.unsqueeze(0) / temperature, top_p)[0].numpy()
    observed = frequencies(logits, count, temperature=temperature, top_p=top_p, seed=11)
    assert observed[probabilities == 0].sum() == 0
    common = probabilities * count >= 5
    expected = count * np.append(probabilities[common], probabilities[~common].sum())
    observed = count * np.append(observed[common], observed[~common].sum())
    freedom = len(expected) - 1
    assert freedom >= 30
    assert ((observed - expected) ** 2 / expected).sum() < freedom + 4 * np.sqrt(2 * freedom)


def nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Probabilities [n, vocabulary] after the cut, by the definition."""
    probabilities = torch.softmax(logits.double(), -1)
    if top_p == 1.0:
        return probabilities
    ordered, order = probabilities.sort(-1, descending=True)
    kept = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0.0)
    return torch.zeros_like(kept).scatter(-1, order, kept / kept.sum(-1, keepdim=True))


@pytest.mark.parametrize(
    ("spread", "top_p", "noise"),
    [
        # Inverting the cumulative distribution instead changed 7, 58, 786, 1056 draws of 20,000 and 109 of 4000.
        (1.0, 1.0, 1e-5),
        (4.0, 1.0, 1e-5),
        (1.0, 1.0, 1e-3),
        (4.0, 1.0, 1e-3),
        (1.0, 0.9, 1e-3),
    ],
)
def test_logits_that_differ_a_little_draw_the_same_tokens(spread, top_p, noise) -> None:
    """What a resumed request meets: another batch computes the same logits with another rounding. No way to draw from
    two distributions changes fewer draws than their total variation distance; this one changes at most twice that."""
    rows, count = 500, effort(8000, 20_000) if top_p == 1.0 else effort(2000, 4000)
    logits = (spread * torch.randn(1600, generator=torch.Generator().manual_seed(1))).repeat(rows, 1)
    expected = nucleus(logits[:1], top_p)
    changed, distance = 0, 0.0
    for part in range(count // rows):
        noisy = logits * (1 + noise * torch.randn(logits.shape, generator=torch.Generator().manual_seed(part)))
        distance += float((nucleus(noisy, top_p) - expected).abs().sum()) / 2
        draws = [Draw(sampling(temperature=1.0, top_p=top_p, seed=part), index) for index in range(rows)]
        one, other = choose(logits.clone(), draws, NO_END)[0], choose(noisy, draws, NO_END)[0]
        changed += int((one != other).sum())
    assert changed <= 2 * distance + 4 * np.sqrt(2 * distance) + 1
    assert changed > 0 or distance < 5, "a distance that must show"


def test_very_low_temperature_is_greedy() -> None:
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    draws = [Draw(sampling(temperature=1e-6, seed=n), n) for n in range(4)]
    assert choose(logits.clone(), draws, NO_END)[0].tolist() == logits.argmax(-1).tolist()


def test_a_row_draws_the_same_in_any_company() -> None:
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(1))
    draws = [Draw(sampling(temperature=1.0 + n / 3, top_p=1 - n / 20, seed=n), 10 * n) for n in range(6)]
    together = choose(logits.clone(), draws, NO_END)[0]
    alone = [choose(logits[n : n + 1].clone(), [draws[n]], NO_END)[0][0] for n in range(6)]
    backwards = choose(logits.flip(0), draws[::-1], NO_END)[0][::-1]
    assert together.tolist() == alone == backwards.tolist()
    noisy = logits + 1e-6 * torch.randn(6, 5000, generator=torch.Generator().manual_seed(2))
    assert choose(noisy, draws, NO_END)[0].tolist() == together.tolist()


def test_end_of_sequence_waits_for_min_tokens_and_may_be_ignored() -> None:
    logits = torch.tensor([[0.0, 9.0, 8.0, 7.0]])
    end = frozenset({1, 2})
    for parameters, index, token, mark in (
        (sampling(), 0, 1, 1),
        (sampling(ignore_eos=True), 0, 1, 0),
        (sampling(min_tokens=3), 2, 3, 0),
        (sampling(min_tokens=3), 3, 1, 1),
        (sampling(min_tokens=3, temperature=0.01), 0, 3, 0),
        (sampling(min_tokens=3, ignore_eos=True), 3, 1, 0),
    ):
        tokens, stopped = choose(logits.clone(), [Draw(parameters, index)], end)
        assert (tokens.tolist(), stopped.tolist()) == ([token], [mark])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_are_marked_alone(bad) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3))
    good, _ = choose(logits.clone(), [Draw(sampling(temperature=float(n % 2)), n) for n in range(4)], NO_END)
    logits[1, 7] = logits[2, 49] = bad
    draws = [Draw(sampling(temperature=float(n % 2)), n) for n in range(4)]
    tokens, stopped = choose(logits, draws, frozenset({0}))
    assert stopped.tolist() == [0, 2, 2, 0]
    assert (tokens[0], tokens[3]) == (good[0], good[3])


def test_half_precision_logits_are_drawn_like_full_ones() -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(4)).bfloat16()
    draws = [Draw(sampling(temperature=1.0, seed=n), n) for n in range(3)]
    assert choose(logits, draws, NO_END)[0].tolist() == choose(logits.float(), draws, NO_END)[0].tolist()

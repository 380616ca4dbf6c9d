"""Choosing tokens: exact where it is exact, and by the numbers where it is drawn."""

import numpy as np
import pytest
import torch

from forebay.gpu.sampling import Draw, choose, uniform
from forebay.transport.messages import Sampling

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


def test_uniform_numbers_look_uniform_over_indices_and_over_seeds() -> None:
    n = 100_000
    for numbers in (uniform([7] * n, range(n)), uniform(range(n), [3] * n)):
        assert 0 <= numbers.min() < 1e-4
        assert 1 - 1e-4 < numbers.max() < 1
        assert_close(np.histogram(numbers, 20, (0, 1))[0] / n, np.full(20, 0.05), n)
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.015
    assert uniform([-1], [0]) == uniform([2**64 - 1], [0])


def test_a_draw_never_changes_between_versions() -> None:
    """A request may be resumed by a worker of another version, which must draw the same numbers."""
    golden = [0.6524484863740322, 0.7012121095215252, 0.36818951565166946, 0.13944283872014696]
    assert uniform([0, 0, 1, 2**63], [0, 1, 0, 5]).tolist() == golden


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
    logits = torch.tensor(probabilities).log().float()
    for top_p, kept in ((0.39, [1]), (0.69, [1, 3]), (0.71, [1, 3, 4]), (0.999, [0, 1, 2, 3, 4])):
        expected = np.zeros(5)
        expected[kept] = probabilities[kept] / probabilities[kept].sum()
        assert_close(frequencies(logits, 20_000, top_p=top_p, seed=9), expected, 20_000)


def test_nucleus_wider_than_the_first_guess() -> None:
    logits = torch.zeros(1000)
    logits[::2] = 0.5
    found = frequencies(logits, 20_000, top_p=0.5)
    assert found[1::2].sum() == 0
    assert (found[::2] > 0).sum() > 480


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

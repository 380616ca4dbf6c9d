"""What a model's steps teach about how long an answer takes alone."""

import random

import pytest

from forebay.sched.pace import SLOWEST, TRUSTED, Pace


def steps(seed: int, tokens: list[int], base_s: float, token_s: float, noise: float = 0.1) -> Pace:
    """A pace that saw steps of so many tokens, each off by chance."""
    chance, pace = random.Random(seed), Pace()
    for count in tokens:
        pace.step((base_s + token_s * count) * chance.lognormvariate(0.0, noise), count)
    return pace


@pytest.mark.parametrize(("base_s", "token_s"), [(0.145, 0.004), (0.03, 0.0035), (0.015, 0.0006), (0.005, 0.00002)])
@pytest.mark.parametrize("seed", range(5))
def test_it_learns_from_loaded_steps_what_a_lone_request_takes(base_s: float, token_s: float, seed: int) -> None:
    chance = random.Random(seed + 100)
    # Decodes of many at once, with the prompt of a newcomer in every third step: none is like a step of a lone request.
    batches = [chance.randint(6, 32) + (chance.randint(16, 96) if chance.random() < 0.3 else 0) for _ in range(300)]
    pace = steps(seed, batches, base_s, token_s)
    alone_s = (base_s + token_s * 24) + 7 * (base_s + token_s)
    assert pace.alone_s(24, 8) == pytest.approx(alone_s, rel=0.15)


def test_without_noise_it_is_exact_after_two_steps() -> None:
    pace = steps(0, [24, 1], 0.145, 0.004, noise=0.0)
    for tokens in (1, 8, 40):
        pace.step(0.145 + 0.004 * tokens, tokens)
    assert pace.step_s == pytest.approx(0.145, rel=0.02)
    assert pace.token_s == pytest.approx(0.004, rel=0.05)
    assert pace.alone_s(100, 10) == pytest.approx(10 * 0.145 + 109 * 0.004, rel=0.02)


def test_before_any_step_it_has_a_guess_and_the_first_one_replaces_it() -> None:
    pace = Pace()
    assert pace.alone_s(10, 10) > 0
    pace.step(3.0, 20)
    assert pace.alone_s(1, 1) == pytest.approx(3.0), "nothing says yet that fewer tokens take less"


@pytest.mark.parametrize("seed", range(5))
def test_steps_that_are_all_alike_say_what_a_step_takes_and_not_what_a_token_does(seed: int) -> None:
    assert steps(seed, [8] * 200, 0.05, 0.001).alone_s(1, 10) == pytest.approx(0.58, rel=0.1)
    chance = random.Random(seed)
    nearly = steps(seed, [30 + chance.randrange(2) for _ in range(200)], 0.05, 0.001)
    assert 0.05 < nearly.alone_s(1, 1) < 0.09, "noise must not be taken for what a token costs"


def test_one_slow_step_changes_little() -> None:
    pace = steps(1, [1, 30] * 50, 0.05, 0.001)
    before = pace.alone_s(24, 8)
    pace.step(60.0, 1)
    assert pace.alone_s(24, 8) < 1.15 * before


def test_a_slow_first_step_is_forgotten() -> None:
    pace = Pace()
    pace.step(2.0, 24)  # a kernel that had to be built
    for _ in range(200):
        pace.step(0.006, 1)
        pace.step(0.010, 24)
    assert pace.alone_s(24, 8) < 1.3 * (0.010 + 7 * 0.006)


def test_a_device_that_has_become_slower_is_believed_in_the_end() -> None:
    pace = steps(1, [1, 30] * TRUSTED, 0.05, 0.001)
    for _ in range(200):
        pace.step(SLOWEST * 3 * 0.05, 1)
        pace.step(SLOWEST * 3 * 0.08, 30)
    assert pace.alone_s(1, 10) == pytest.approx(10 * SLOWEST * 3 * 0.05, rel=0.1)


def test_nothing_is_negative_whatever_the_steps() -> None:
    chance, pace = random.Random(7), Pace()
    for _ in range(2000):
        pace.step(chance.choice([0.0, 1e-6, 0.01, 100.0]), chance.choice([1, 2, 50, 4096]))
        assert pace.step_s > 0
        assert pace.token_s >= 0
    for _ in range(1000):
        pace.step(0.01, 1)
    assert pace.alone_s(1, 1) == pytest.approx(0.01, rel=0.01), "no past is for ever"

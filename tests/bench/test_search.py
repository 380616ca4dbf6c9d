"""The search for goodput: by hand, and over any threshold."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.bench.search import Search, Seen

SEARCH = Search(target=0.99, first=4.0, lowest=0.5, highest=64.0, precision=0.1)


def run(search: Search, limit: float) -> list[Seen]:
    """A server that keeps its SLO up to `limit` requests per second."""
    seen: list[Seen] = []
    while (rate := search.next_rate(seen)) is not None:
        assert rate not in [one.rate for one in seen], "a rate is tried twice"
        seen.append(Seen(rate, 1.0 if rate <= limit else 0.5))
        assert len(seen) < 40
    return seen


def test_doubles_then_halves_the_interval() -> None:
    seen = run(SEARCH, limit=10.0)
    # 4 and 8 pass, 16 misses; then geometric means: 11.31 misses, 9.512 passes, and 11.31 is 19 % above, 10.37 misses.
    assert [one.rate for one in seen] == [4, 8, 16, 11.31, 9.512, 10.37]
    assert SEARCH.bracket(seen) == (9.512, 10.37)
    assert SEARCH.verdict(seen) == "found"


def test_goes_down_where_the_first_rate_misses() -> None:
    assert [one.rate for one in run(SEARCH, limit=1.05)][:3] == [4, 2, 1]
    below = run(SEARCH, limit=0.1)
    assert [one.rate for one in below] == [4, 2, 1, 0.5]
    assert (SEARCH.bracket(below)[0], SEARCH.verdict(below)) == (None, "below")


def test_ends_at_the_highest_rate_allowed() -> None:
    above = run(SEARCH, limit=1000)
    assert [one.rate for one in above] == [4, 8, 16, 32, 64]
    assert (SEARCH.bracket(above)[0], SEARCH.verdict(above)) == (64, "above")
    assert [one.rate for one in run(Search(0.99, 100, 1, 50, 0.1), limit=1000)] == [50]


def test_a_lucky_pass_above_a_miss_does_not_count() -> None:
    seen = [Seen(4, 1), Seen(8, 0.9), Seen(16, 1)]
    assert SEARCH.bracket(seen) == (4, 8)
    assert SEARCH.next_rate(seen) == 5.657
    assert SEARCH.bracket([Seen(8, 0.98), Seen(16, 1)]) == (None, 8)


def test_the_target_itself_passes() -> None:
    assert SEARCH.bracket([Seen(4, 0.99)]) == (4, None)
    assert SEARCH.bracket([Seen(4, 0.9899)]) == (None, 4)


@given(
    limit=st.floats(0.01, 200),
    first=st.floats(0.01, 200),
    precision=st.floats(0.01, 1),
    shuffle=st.randoms(use_true_random=False),
)
def test_any_limit_is_found_within_the_precision(
    limit: float, first: float, precision: float, shuffle: random.Random
) -> None:
    search = Search(0.99, first, 0.02, 100.0, precision)
    seen = run(search, limit)
    passed, missed = search.bracket(seen)
    if search.verdict(seen) == "found":
        assert passed is not None
        assert missed is not None
        assert passed <= limit < missed <= passed * (1 + precision) + 1e-9
    elif search.verdict(seen) == "above":
        assert passed == 100
        assert limit >= 100
    else:
        assert missed == 0.02
        assert limit < 0.02
    # Broken off anywhere and taken up again from its files, in any order, it goes on as it would have.
    for count in range(len(seen)):
        before = shuffle.sample(seen[:count], count)
        assert search.next_rate(before) == seen[count].rate


def test_precision_finer_than_the_rates_digits_ends() -> None:
    search = Search(0.99, 1.0, 0.1, 10.0, 1e-9)
    assert search.bracket(run(search, 1.5))[0] == pytest.approx(1.5, rel=1e-3)

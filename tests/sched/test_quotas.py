"""Quotas: by expected load at first, then by need; conserved always."""

from hypothesis import given
from hypothesis import strategies as st

from forebay.sched.quotas import Need, Quotas


def quotas(**weights: float) -> Quotas:
    made = Quotas(1000)
    for model, weight in weights.items():
        made.add(model, weight)
        made.check()
    return made


def test_they_start_in_proportion_to_expected_load() -> None:
    assert quotas(a=12, b=5, c=3).bytes == {"a": 600, "b": 250, "c": 150}


def test_a_full_model_with_a_queue_grows_by_a_tenth_at_the_expense_of_the_slackest() -> None:
    made = quotas(a=12, b=5, c=3)
    assert made.adapt({"a": Need(100, False), "b": Need(240, True), "c": Need(0, False)})
    assert made.bytes == {"a": 575, "b": 275, "c": 150}


def test_without_a_queue_or_before_it_is_full_nothing_moves() -> None:
    made = quotas(a=1, b=1)
    assert not made.adapt({"a": Need(500, False), "b": Need(0, False)})
    assert not made.adapt({"a": Need(440, True), "b": Need(0, False)})


def test_nobody_gives_what_it_uses() -> None:
    made = quotas(a=1, b=1)
    assert not made.adapt({"a": Need(500, True), "b": Need(500, False)})
    assert made.adapt({"a": Need(500, True), "b": Need(480, False)})
    assert made.bytes == {"a": 520, "b": 480}


@given(
    st.lists(st.floats(0.1, 100), min_size=1, max_size=5),
    st.lists(st.lists(st.tuples(st.floats(0, 1.2), st.booleans()), min_size=5, max_size=5), max_size=20),
)
def test_quota_is_never_lost_or_invented(weights: list[float], rounds: list[list[tuple[float, bool]]]) -> None:
    made = quotas(**{f"m{index}": weight for index, weight in enumerate(weights)})
    for situation in rounds:
        needs = {
            model: Need(int(share * quota), queued)
            for (model, quota), (share, queued) in zip(made.bytes.items(), situation, strict=False)
        }
        made.adapt(needs)
        made.check()

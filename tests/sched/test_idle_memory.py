"""What is lent, asked back, borrowed and given back, as numbers."""

from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.sched.idle_memory import IDLE_S, IdleMemory
from forebay.sched.spill_demand import HOLD_S, RETRY_S, SpillDemand


def test_nothing_is_lent_before_it_has_been_idle_for_a_while() -> None:
    idle = IdleMemory(100)
    assert idle.decide(0.0, 40, 0) is None
    assert idle.decide(IDLE_S - 1, 0, 0) is None
    assert idle.decide(IDLE_S, 0, 0) == ("lend", 50), "40 were needed, and a quarter more is kept"
    assert idle.decide(IDLE_S + 0.5, 0, 0) is None, "the peak counts until it is older"
    assert idle.decide(IDLE_S + 1, 0, 0) == ("lend", 40), "a tenth is kept in any case"


def test_load_takes_back_what_it_needs_and_some_more_at_once() -> None:
    idle = IdleMemory(100)
    idle.decide(0.0, 0, 0)
    assert idle.decide(IDLE_S, 0, 0) == ("lend", 90)
    assert idle.decide(IDLE_S + 1, 8, 0) is None
    assert idle.decide(IDLE_S + 2, 10, 30) == ("take back", 40), "for 40 slabs 50 are kept, 10 are here"
    assert idle.decide(IDLE_S + 3, 10, 30) is None, "it was asked for already"
    idle.returned(40)
    assert idle.decide(IDLE_S + 4, 40, 0) is None
    assert idle.lent == 50


def test_a_sequence_that_does_not_fit_is_worth_a_slab_whatever_the_bytes_say() -> None:
    idle = IdleMemory(4)
    idle.decide(0.0, 0, 0)
    assert idle.decide(IDLE_S, 0, 0) == ("lend", 3)
    assert idle.decide(IDLE_S + 1, 0, 0, short=True) == ("take back", 2)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 12), st.integers(0, 64), st.integers(0, 64), st.booleans(), st.integers(0, 8))),
    st.integers(1, 64),
)
def test_slabs_are_conserved(story: list[tuple[float, int, int, bool, int]], slabs: int) -> None:
    idle = IdleMemory(slabs)
    now = 0.0
    for seconds, used, lacking, short, back in story:
        now += seconds
        before = idle.lent
        match idle.decide(now, min(used, slabs - idle.lent), lacking, short):
            case "lend", count:
                assert 0 < count < slabs, "it never lends all"
                assert idle.lent == before + count
            case "take back", count:
                assert 0 < count <= before
        idle.check()
        idle.returned(min(back, idle.lent))
        idle.check()


def test_need_is_borrowed_once_and_asked_for_again_after_a_while() -> None:
    demand = SpillDemand(100)
    assert demand.want(0.0, 250, 0) == 400
    assert demand.want(RETRY_S / 2, 250, 0) == 0
    assert demand.want(RETRY_S, 250, 100) == 300
    assert demand.want(9.0, 250, 300) == 0


def test_what_is_not_needed_is_given_back_once_it_was_idle_for_long() -> None:
    demand = SpillDemand(100)
    assert demand.surplus(0.0, 0, 1000, 10) == 0
    assert demand.surplus(HOLD_S / 2, 900, 1000, 10) == 0, "it is needed again"
    assert demand.surplus(HOLD_S, 200, 1000, 10) == 0
    assert demand.surplus(2 * HOLD_S, 200, 1000, 10) == 7, "of ten, two are needed and one more is kept"

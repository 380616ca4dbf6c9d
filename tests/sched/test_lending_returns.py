"""When a borrower asks for lent memory again: soon where that lasts, ever less often where it does not."""

from forebay.sched.lending_returns import KEPT_PAUSES, MOST_DOUBLINGS, SOON, Returns


def test_one_question_in_a_pause_and_the_next_part_sooner_while_there_is_more() -> None:
    pace = Returns(100.0, 10.0)
    assert pace.wait_s(100.0) == 10.0
    assert pace.wait_s(110.0) == 0.0
    pace.asked(110.0, 8, 0)
    assert pace.wait_s(110.0) == 10.0, "there was nothing"
    pace.asked(120.0, 8, 3)
    assert pace.wait_s(120.0) == 10.0, "that was all there was"
    pace.asked(130.0, 8, 8)
    assert pace.wait_s(130.0) == SOON * 10.0
    pace.asked(140.0, 0, 0)
    assert pace.wait_s(140.0) == 10.0, "nothing is on the host"


def test_after_memory_was_asked_back_there_is_a_pause() -> None:
    pace = Returns(0.0, 10.0)
    pace.asked_back(9.0)
    assert pace.wait_s(10.0) == 9.0


def test_memory_that_goes_to_and_fro_is_asked_for_ever_less_often_and_a_return_that_lasts_makes_good() -> None:
    pace, now, pauses = Returns(0.0, 10.0), 0.0, []
    for _ in range(MOST_DOUBLINGS + 2):
        now += pace.wait_s(now)
        pace.asked(now, 1, 1)
        now += 1.0
        pace.asked_back(now)
        pauses.append(pace.pause_s)
        assert pace.wait_s(now) == pace.pause_s
    assert pauses == [10.0 * 2 ** min(count, MOST_DOUBLINGS) for count in range(1, MOST_DOUBLINGS + 3)]
    now += pace.wait_s(now)
    pace.asked(now, 1, 1)
    now += KEPT_PAUSES * pace.pause_s
    pace.asked_back(now)
    assert pace.pause_s == 10.0


def test_memory_asked_back_twice_without_a_return_between_is_no_to_and_fro() -> None:
    pace = Returns(0.0, 10.0)
    for now in (1.0, 2.0, 3.0):
        pace.asked_back(now)
    assert pace.pause_s == 10.0

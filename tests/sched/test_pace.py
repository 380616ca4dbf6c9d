"""What a model's steps teach about how long an answer takes alone."""

import pytest

from forebay.sched.pace import Pace
from forebay.transport.messages import Sampling


def test_a_pace_learns_both_costs_from_its_steps() -> None:
    pace = Pace()
    for _ in range(400):
        pace.step(0.05, 0)
        pace.step(0.05 + 100 * 0.002, 100)
    assert pace.decode_s == pytest.approx(0.05, rel=0.01)
    assert pace.prefill_s == pytest.approx(0.002, rel=0.01)
    assert pace.alone_s(200, Sampling(10)) == pytest.approx(0.4 + 0.5, rel=0.01)


def test_a_step_faster_than_its_decodes_were_makes_prompts_free_at_most() -> None:
    pace = Pace(decode_s=1.0, prefill_s=0.0)
    pace.step(0.5, 10)
    assert pace.prefill_s == 0.0


def test_answers_that_end_early_make_the_next_ones_due_earlier() -> None:
    pace = Pace(decode_s=0.1, prefill_s=0.0)
    for _ in range(400):
        pace.ended(50, 500)
    assert pace.alone_s(0, Sampling(500)) == pytest.approx(5.0, rel=0.01)

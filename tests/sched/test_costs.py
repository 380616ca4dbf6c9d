"""What steps are expected to take: between measured points, and after steps have shown otherwise."""

import pytest

from forebay.sched.cost import DECODE_S, PREFILL_S, Costs
from forebay.sched.cost_table import CostError, CostRow, CostTable, parse_costs
from forebay.sched.overlap import Overlaps
from forebay.transport.messages import LaneKind, StepDone, StepPlan, Work

ROWS = (
    CostRow("m", 1, 100, 1, 100, 10.0, 4.0),
    CostRow("m", 1, 100, 1, 300, 30.0, 4.2),
    CostRow("m", 1, 100, 8, 100, 70.0, 5.4),
    CostRow("m", 1, 100, 8, 300, None, 7.0),
    CostRow("m", 1, 50, 1, 100, 18.0, 6.0),
    CostRow("m", 2, 100, 1, 100, 1.0, 1.0),
)


def test_between_measured_points_a_line() -> None:
    table = CostTable(ROWS)
    assert table.models == ["m"]
    assert table.prefill_s("m", 100) == pytest.approx(0.010)
    assert table.prefill_s("m", 200) == pytest.approx(0.020)
    assert table.prefill_s("m", 1300) == pytest.approx(0.110), "beyond the last point it goes on"
    assert table.prefill_s("m", 10) == pytest.approx(0.010), "all weights are read for one token, too"
    assert table.decode_s("m", 1, 200) == pytest.approx(0.0041)
    assert table.decode_s("m", 8, 200) == pytest.approx(0.0062)
    assert table.decode_s("m", 4, 100) == pytest.approx(0.0046)
    assert table.prefill_s("m", 100, 50) == pytest.approx(0.018)
    assert table.prefill_s("m", 100, 75) == pytest.approx(0.014)
    assert table.prefill_s("m", 100, 25) == pytest.approx(0.036)
    assert table.prefill_s("other", 100) is None
    assert table.decode_s("other", 1, 1) is None


def test_a_file_is_read_and_a_bad_one_is_named() -> None:
    good = b'{"m": {"1": {"100": {"1": {"32": {"prefill": 11.5, "decoding": -1}}}}}}'
    assert parse_costs(good, "c.json") == (CostRow("m", 1, 100, 1, 32, 11.5, None),)
    for bad, words in [
        (b"{", "c.json: not whole JSON"),
        (b'{"m": {"1": {"101": {}}}}', "m -> 1: the SM % is '101'; 1 to 100"),
        (b'{"m": {"1": {"9": {"1": {"1": {"prefill": 0, "decoding": 1}}}}}}', "prefill: is 0; milliseconds above 0"),
    ]:
        with pytest.raises(CostError, match=words):
            parse_costs(bad, "c.json")


def test_without_a_table_the_first_steps_say_what_steps_take() -> None:
    costs = Costs()
    costs.add_model("m")
    assert costs.decode_s("m", 4, 100) == DECODE_S
    assert costs.prefill_s("m", 100) == pytest.approx(100 * PREFILL_S)
    costs.decode_landed("m", 4, 100, 0.006, None)
    costs.prefill_landed("m", 200, 0.004, 0, False)
    assert costs.decode_s("m", 4, 100) == pytest.approx(0.006)
    assert costs.prefill_s("m", 100) == pytest.approx(0.002)


def test_a_table_is_corrected_by_what_landed_and_keeps_its_form() -> None:
    costs = Costs(ROWS)
    costs.add_model("served", "m")
    costs.decode_landed("served", 1, 100, 0.008, None)  # twice what the table says
    assert costs.decode_s("served", 8, 800) == pytest.approx(2 * 0.0054)


def run(overlaps: Overlaps, at: float, plan: StepPlan, seconds: float, until: float) -> None:
    overlaps.launched(at, plan)
    overlaps.landed(until, plan, StepDone(plan.step, b"", b"", seconds))


def plan(step: int, lane: LaneKind, tokens: int = 1, share: int = 0) -> StepPlan:
    return StepPlan(step, "m", (Work(1, 9, tokens, 0, (), True),), lane, share)


def test_only_steps_beside_a_prefill_teach_what_a_prefill_costs_them() -> None:
    costs = Costs()
    costs.add_model("m")
    overlaps = Overlaps(costs)
    guessed = costs.slow[48].decode
    run(overlaps, 0.0, plan(1, "decode"), 0.010, 0.010)
    assert costs.decode_s("m", 1, 10) == pytest.approx(0.010)
    prefill = plan(2, "prefill", 64, share=48)
    overlaps.launched(0.010, prefill)
    for number in range(60):
        run(overlaps, 0.010 + 0.015 * number, plan(3 + number, "decode"), 0.015, 0.025 + 0.015 * number)
    assert costs.slow[48].decode == pytest.approx(1.5, abs=0.02) != guessed
    assert costs.decode_s("m", 1, 10) == pytest.approx(0.010), "and not what a step alone takes"
    overlaps.landed(1.0, prefill, None)
    run(overlaps, 2.0, plan(99, "decode"), 0.012, 2.012)
    assert costs.decode_s("m", 1, 10) == pytest.approx(0.0102)


def mixed(step: int, decodes: int, along: int) -> StepPlan:
    works = [Work(number, 9, 1, 0, (), True) for number in range(decodes)]
    return StepPlan(step, "m", (*works, *((Work(99, 0, along, 0, (), True),) if along else ())), "decode", 0)


def test_steps_with_prompts_teach_what_these_cost_and_not_what_a_decode_costs() -> None:
    costs = Costs()
    costs.add_model("m")
    overlaps = Overlaps(costs)
    guessed = costs.ride_s("m", 200)
    run(overlaps, 0.0, mixed(1, 4, 200), 0.012, 0.012)
    assert costs.ride_s("m", 200) == guessed, "what the decodes take is not known yet"
    run(overlaps, 1.0, mixed(2, 4, 0), 0.010, 1.010)
    run(overlaps, 2.0, mixed(3, 4, 200), 0.012, 2.012)
    assert costs.ride_s("m", 200) == pytest.approx(0.002)
    assert costs.decode_s("m", 4, 40) == pytest.approx(0.010)
    overlaps.launched(3.0, plan(4, "prefill", 64))
    run(overlaps, 3.0, mixed(5, 4, 200), 0.030, 3.030)
    assert costs.ride_s("m", 200) == pytest.approx(0.002), "beside a prefill it says nothing"


def test_a_prompt_that_has_the_device_to_itself_in_a_decode_lane_teaches_what_a_prefill_costs() -> None:
    costs = Costs()
    costs.add_model("m")
    costs.add_model("other")
    overlaps = Overlaps(costs)
    prompt, ahead = mixed(1, 0, 100), mixed(2, 1, 0)
    overlaps.launched(0.0, prompt)
    overlaps.launched(0.001, ahead)
    overlaps.landed(0.006, prompt, StepDone(1, b"", b"", 0.006))
    overlaps.landed(0.010, ahead, StepDone(2, b"", b"", 0.004))
    assert costs.prefill_s("m", 100) == pytest.approx(0.006)
    overlaps.launched(1.0, mixed(3, 0, 100))
    overlaps.launched(1.0, StepPlan(4, "other", (Work(1, 9, 1, 0, (), True),), "decode", 0))
    overlaps.landed(1.020, mixed(3, 0, 100), StepDone(3, b"", b"", 0.020))
    assert costs.prefill_s("m", 100) == pytest.approx(0.006), "another model's decodes slowed it"


def test_a_step_that_is_partly_beside_a_prefill_says_nothing() -> None:
    costs = Costs()
    costs.add_model("m")
    overlaps = Overlaps(costs)
    decode = plan(1, "decode")
    overlaps.launched(0.0, decode)
    overlaps.launched(0.005, plan(2, "prefill", 64))
    overlaps.landed(0.010, decode, StepDone(1, b"", b"", 0.010))
    assert costs.decode_s("m", 1, 10) == DECODE_S

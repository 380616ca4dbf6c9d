"""The policies: who runs next, and that nobody starves."""

import pytest

from forebay.sched.lane_events import ModelOpened
from forebay.sched.launching import STEPS_AHEAD
from forebay.sched.pace import Pace
from forebay.sched.policy import PATIENCE, POLICIES, TURNS
from forebay.sched.sequence import Lane, Sequence
from tests.sched.world import World, make_world, start


def world(policy: str, **sizes: int) -> World:
    made = make_world(slabs=8, slab_bytes=1600, policy=policy)
    for model, popularity in sizes.items():
        made.send(ModelOpened(model, 100, 4, 16, popularity))
    return made


STEP_S = 0.001
"""What every step of a world takes."""


def known(policy: str) -> World:
    """A world of two models that had steps already."""
    made = world(policy, a=1, b=1)
    for request, model in enumerate("ab"):
        made.send(start(1000 + request, model, max_tokens=20))
        made.run_dry()
    return made


def models(made: World) -> str:
    return "".join(plan.model for plan in made.plans)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_ends_everything(policy: str) -> None:
    made = world(policy, a=12, b=5, c=3)
    for request in range(60):
        made.send(start(request, "aaabbc"[request % 6], prompt=1 + request % 50, max_tokens=1 + request % 20))
        if request % 3 == 0 and made.flying:
            made.land()
    made.run_dry()
    assert {finished.reason for finished in made.finished.values()} == {"length"}
    assert len(made.finished) == 60


def test_temporal_gives_the_device_to_the_model_of_the_oldest_request_until_it_has_ended() -> None:
    made = world("temporal", a=1, b=1)
    made.send(start(1, "a", max_tokens=10))
    made.send(start(2, "b", max_tokens=10))
    made.run_dry()
    assert models(made).startswith("a" * 10)
    assert models(made).endswith("b" * 9)


def test_roundrobin_takes_turns() -> None:
    made = world("roundrobin", a=1, b=1)
    made.send(start(1, "a", max_tokens=10))
    made.send(start(2, "b", max_tokens=10))
    made.run_dry()
    assert "abababab" in models(made)


def test_under_adbs_the_answer_that_is_due_first_goes_first() -> None:
    made = known("adbs")
    since = len(made.plans)
    made.send(start(1, "a", max_tokens=40, ignore_eos=True))
    made.send(start(2, "b", max_tokens=4, ignore_eos=True))
    made.run_dry()
    # Not before the third step: the first two were launched before the short one came, or as it came.
    assert models(made)[since + 2 :].startswith("b")
    assert list(made.finished)[-2:] == [(2, 0), (1, 0)]


def test_under_adbs_an_answer_that_can_only_be_late_yields_to_those_that_can_be_in_time() -> None:
    made = known("adbs")
    made.send(start(1, "a", max_tokens=60, ignore_eos=True))
    made.now += (PATIENCE - 0.8) * 60 * STEP_S  # not late yet, but more is left to do than there is time
    made.send(start(2, "b", max_tokens=20, ignore_eos=True))  # due after the other
    since = len(made.plans)
    for _ in range(8):
        made.land()
    assert models(made)[since:].count("b") >= 6
    made.run_dry()


def test_a_due_time_follows_what_steps_teach_and_leaves_out_who_needs_no_step() -> None:
    lane = Lane("a", 100, 4, 16)
    sequence = Sequence(1, 1, start(1, "a", prompt=5, max_tokens=10, ignore_eos=True), came=100.0)
    lane.wait(sequence)
    for _ in range(2):
        lane.pace.step(1.0, 5)
    assert lane.due(100.0) == pytest.approx(100.0 + PATIENCE * 10.0)
    assert lane.due(100.0 + (PATIENCE - 1) * 10.0 - 0.1) is not None
    assert lane.due(100.0 + (PATIENCE - 1) * 10.0 + 0.1) is None, "it cannot be in time any more"
    lane.pace = Pace(step_s=0.1, token_s=0.0)
    assert lane.due(100.0) == pytest.approx(100.0 + PATIENCE * 1.0)
    sequence.known += 10  # the last of them are in flight
    assert lane.due(100.0) is None


def test_an_answer_that_may_stop_by_itself_is_due_token_by_token() -> None:
    lane = Lane("a", 100, 4, 16, pace=Pace(step_s=1.0, token_s=0.0))
    sequence = Sequence(1, 1, start(1, "a", prompt=5, max_tokens=1000), came=100.0)
    lane.wait(sequence)
    assert lane.due(100.0) == pytest.approx(100.0 + PATIENCE)
    sequence.known += 3
    assert lane.due(100.0) == pytest.approx(100.0 + 4 * PATIENCE)


def test_a_request_that_came_with_a_part_of_its_answer_is_measured_by_what_is_left() -> None:
    lane = Lane("a", 100, 4, 16, pace=Pace(step_s=1.0, token_s=0.0))
    again = start(1, "a", prompt=5, max_tokens=10, delivered=6, ignore_eos=True)
    lane.wait(Sequence(1, 1, again, came=100.0))
    assert lane.due(100.0) == pytest.approx(100.0 + 4 * PATIENCE)


def test_under_adbs_no_model_waits_for_more_than_its_turns() -> None:
    made = world("adbs", a=1, b=1, c=1)
    made.send(start(1, "a", prompt=3, max_tokens=60))
    made.land()
    made.now += 1000.0  # late for good
    for request in range(2, 60):
        made.send(start(request, "bc"[request % 2], prompt=20, max_tokens=1))
    made.run_dry()
    waits, since = [], 0
    for plan in made.plans:
        if plan.model == "a":
            waits.append(since)
            since = 0
        else:
            since += 1
    assert max(waits) <= TURNS * 3 + STEPS_AHEAD, waits


@pytest.mark.parametrize("policy", ["adbs", "fix-adbs", "fix"])
def test_no_model_starves_behind_a_flood_of_another(policy: str) -> None:
    made = world(policy, a=1, b=1)
    for request in range(1, 200):
        made.send(start(request, "a", prompt=30, max_tokens=30))
    made.send(start(1000, "b", prompt=30, max_tokens=5))
    for _ in range(60):
        made.land()
    assert (1000, 0) in made.finished


@pytest.mark.parametrize(("policy", "bound"), [("fix", 2), ("adbs", 2), ("roundrobin", 5)])
def test_quotas_bound_what_a_model_takes(policy: str, bound: int) -> None:
    made = make_world(slabs=1, slab_bytes=1000, policy=policy)  # ten blocks
    for model in "ab":
        made.send(ModelOpened(model, 100, 10, 64, 1.0))
    for request in range(6):
        made.send(start(request, "a", prompt=16, max_tokens=10))  # two blocks each
    for _ in range(3):
        made.land()
    assert len({work.sequence for plan in made.flying for work in plan.work}) == bound


def test_quotas_follow_the_load_under_adbs_and_stay_under_fix_adbs() -> None:
    quotas = {}
    for policy in ("adbs", "fix-adbs"):
        made = make_world(slabs=1, slab_bytes=2000, policy=policy)
        for model in "ab":
            made.send(ModelOpened(model, 100, 10, 64, 1.0))
        for request in range(40):
            made.send(start(request, "a", prompt=30, max_tokens=30))
            made.now += 8.0
            if made.flying:
                made.land()
        quotas[policy] = made.core.memory.pool.quota("a")
    assert quotas["fix-adbs"] == 10
    assert quotas["adbs"] >= 15


def test_a_request_larger_than_its_models_quota_runs_alone() -> None:
    made = make_world(slabs=1, slab_bytes=1000, policy="fix")
    for model in "ab":
        made.send(ModelOpened(model, 100, 10, 200, 1.0))
    made.send(start(1, "a", prompt=100, max_tokens=20))
    made.run_dry()
    assert made.finished[1, 0].reason == "length"

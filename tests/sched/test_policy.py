"""The policies: who runs next, and that nobody starves."""

import pytest

from forebay.sched.lane_events import ModelOpened
from forebay.sched.launching import STEPS_AHEAD
from forebay.sched.policy import POLICIES, TURNS
from tests.sched.world import World, make_world, start


def world(policy: str, **sizes: int) -> World:
    made = make_world(slabs=8, slab_bytes=1600, policy=policy)
    for model, popularity in sizes.items():
        made.send(ModelOpened(model, 100, 4, 16, popularity))
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
    made = world("adbs", a=1, b=1)
    made.send(start(1, "a", max_tokens=40))
    made.send(start(2, "b", max_tokens=4))
    made.run_dry()
    # Not before the third step: the first two were launched before the short one came, or as it came.
    assert models(made)[2:].startswith("b")
    assert list(made.finished) == [(2, 0), (1, 0)]


def test_under_adbs_an_answer_that_is_late_yields_to_those_that_can_still_be_in_time() -> None:
    made = world("adbs", a=1, b=1)
    made.send(start(1, "a", max_tokens=60))
    made.now += 1000.0
    made.send(start(2, "b", max_tokens=8))
    since = len(made.plans)
    for _ in range(8):
        made.land()
    assert models(made)[since:].count("b") >= 6
    made.run_dry()


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

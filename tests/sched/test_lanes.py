"""A device with a lane for each model's decodes and one for prefills: lanes land in any order, and nobody starves."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from forebay.sched.fairness import FAIRNESS
from forebay.sched.lane_events import ModelOpened
from forebay.sched.partition import PARTITIONS, SPLITS
from forebay.sched.policy import POLICIES
from forebay.transport.messages import StepPlan
from tests.effort import effort
from tests.sched import test_spilling
from tests.sched.world import World, lane_of, make_world, start

DIVIDED = sorted(name for name, kind in PARTITIONS.items() if kind.divides)


def opened(model: str = "a", block_bytes: int = 100, max_sequences: int = 4, step_tokens: int = 8) -> ModelOpened:
    return ModelOpened(model, block_bytes, max_sequences, step_tokens)


def two_models(partition: str, **more: object) -> World:
    world = make_world(partition=partition, **more)  # type: ignore[arg-type]
    for model in "ab":
        world.send(opened(model))
    return world


def land(world: World, lane: str, model: str = "") -> StepPlan:
    """The oldest step of a lane lands."""
    return world.land(plan=next(plan for plan in world.flying if lane_of(plan) == (lane, model)))


def flying(world: World) -> Counter[tuple[str, str]]:
    return Counter(lane_of(plan) for plan in world.flying)


def test_prefills_of_all_models_share_a_lane_and_their_decodes_have_one_each() -> None:
    world = two_models("streams")
    for request, model in enumerate("ab", 1):
        world.send(start(request, model, prompt=3, max_tokens=9))
    assert flying(world) == {("prefill", ""): 2}
    assert {plan.model for plan in world.flying} == {"a", "b"}
    land(world, "prefill")
    land(world, "prefill")
    assert flying(world) == {("decode", "a"): 2, ("decode", "b"): 2}
    assert all(work.count == 1 for plan in world.flying for work in plan.work)
    world.run_dry()
    assert {len(tokens) for tokens in world.delivered.values()} == {9}


def test_the_first_decode_comes_after_the_last_chunk_has_landed() -> None:
    world = two_models("streams")
    world.send(start(1, prompt=20, max_tokens=5))
    chunks = []
    while not any(plan.lane == "decode" for plan in world.flying):
        chunks.append(land(world, "prefill").work[0])
    assert [(work.start, work.count, work.sample) for work in chunks] == [(0, 8, False), (8, 8, False), (16, 4, True)]
    assert flying(world) == {("decode", "a"): 2}, "the next is launched ahead within its lane"
    world.run_dry()
    assert len(world.delivered[1, 0]) == 5


def test_a_long_prompt_holds_up_no_decode_of_its_own_model() -> None:
    world = two_models("streams")
    world.send(start(1, prompt=2, max_tokens=40))
    land(world, "prefill")
    world.send(start(2, prompt=64, max_tokens=2))
    for _ in range(20):
        assert flying(world) == {("decode", "a"): 2, ("prefill", ""): 2}
        land(world, "decode", "a")
    world.run_dry()
    assert len(world.delivered[1, 0]) == 40


def test_a_prompt_that_the_cache_knows_but_for_its_last_token_goes_straight_to_the_decodes() -> None:
    world = two_models("streams", prefix_cache=True)
    for request in (1, 2):
        world.send(start(request, text=list(range(33)), max_tokens=3))
        world.run_dry()
    assert [plan.lane for plan in world.plans if plan.work[0].sequence == 2] == ["decode"] * 3
    assert world.reported[2, 0].cached == 32


def test_an_older_decode_takes_the_blocks_of_a_younger_prefill_in_the_other_lane() -> None:
    world = make_world(slabs=1, slab_bytes=600, partition="streams")  # six blocks
    world.send(opened(step_tokens=16))
    world.send(start(1, prompt=30, max_tokens=50))
    while not any(plan.lane == "decode" for plan in world.flying):
        land(world, "prefill")
    world.send(start(2, prompt=60, max_tokens=2))
    for _ in range(100):
        if world.core.preemptions:
            break
        lane = "decode" if ("decode", "a") in flying(world) else "prefill"
        land(world, lane, "a" if lane == "decode" else "")
    assert world.core.preemptions == 1
    world.run_dry()
    assert len(world.delivered[1, 0]) == 50
    assert len(world.delivered[2, 0]) == 2


def test_what_was_spilled_comes_back_to_the_decodes_while_the_prefill_lane_is_full() -> None:
    world = make_world(2, 600, host_slots=4, partition="streams")  # twelve blocks
    world.send(opened(step_tokens=16))
    for request in (1, 2, 3):
        world.send(start(request, prompt=40, max_tokens=60))
    world.run_dry()
    assert world.core.preemptions
    assert sum(work.count for plan in world.plans for work in plan.work) == 3 * (40 + 59)
    assert {len(tokens) for tokens in world.delivered.values()} == {60}


def test_green_binds_prefills_beside_decodes_and_no_others() -> None:
    world = two_models("green")
    world.send(start(1, prompt=2, max_tokens=9))
    assert [plan.share for plan in world.flying] == [0], "nothing else runs"
    land(world, "prefill")
    world.send(start(2, "b", prompt=30, max_tokens=2))
    shares = {plan.lane: plan.share for plan in world.flying}
    assert shares == {"decode": 0, "prefill": SPLITS[0]}


@pytest.mark.parametrize("partition", DIVIDED)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_model_waits_for_ever_behind_a_stream_of_others(partition: str, policy: str) -> None:
    """While requests of one model come without end, those of another begin and end."""
    world = two_models(partition, policy=policy, slabs=8)
    request = 0
    for _ in range(4):
        request += 1
        world.send(start(request, "a", prompt=12, max_tokens=20))
    request += 1
    other = request
    world.send(start(other, "b", prompt=30, max_tokens=20))
    for turn in range(1000):
        if (other, 0) in world.finished:
            break
        if len(world.core._lanes["a"].waiting) < 3:
            request += 1
            world.send(start(request, "a", prompt=12, max_tokens=20))
        heads = world.heads()
        world.land(plan=heads[turn % len(heads)])
    assert (other, 0) in world.finished
    world.run_dry()


class AnyOrder(test_spilling.AnyOrder):
    """The same story in lanes: steps of different lanes land in any order."""

    @initialize(
        slabs=st.integers(2, 5),
        policy=st.sampled_from(sorted(POLICIES)),
        fairness=st.sampled_from(sorted(FAIRNESS)),
        prefix_cache=st.booleans(),
        host_slots=st.integers(0, 3),
        lend=st.booleans(),
        partition=st.sampled_from(DIVIDED),
    )
    def open(  # type: ignore[override]
        self, slabs: int, policy: str, fairness: str, prefix_cache: bool, host_slots: int, lend: bool, partition: str
    ) -> None:
        self.world = make_world(
            slabs, policy=policy, prefix_cache=prefix_cache, fairness=fairness, host_slots=host_slots,
            lent_slots=test_spilling.LENT, lend=lend, partition=partition,
        )  # fmt: skip
        self.requests = 0
        self.silenced: set[int] = set()
        for model, size in test_spilling.SIZES.items():
            self.world.send(opened(model, size, max_sequences=3, step_tokens=16))

    @precondition(lambda self: self.world.flying)
    @rule(data=st.data(), ends=st.booleans(), bad=st.booleans())
    def land_any(self, data: st.DataObject, ends: bool, bad: bool) -> None:
        plan = data.draw(st.sampled_from(self.world.heads()))
        if bad and ends:
            return self.world.fail(plan)
        here = sorted(work.sequence for work in plan.work)
        some = data.draw(st.frozensets(st.sampled_from(here))) if ends else frozenset()
        self.world.land(stops=some, plan=plan)

    @precondition(lambda self: self.world.flying)
    @rule(data=st.data(), steps=st.integers(5, 40))
    def run_one_lane(self, data: st.DataObject, steps: int) -> None:
        """One lane is fast, the others do not land at all."""
        lane = lane_of(data.draw(st.sampled_from(self.world.heads())))
        for _ in range(steps):
            plan = next((plan for plan in self.world.flying if lane_of(plan) == lane), None)
            if plan is None:
                return
            self.world.land(plan=plan)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.pytestmark = [pytest.mark.timeout(300)]  # shrinking a failure takes longer than finding it
TestAnyOrder.settings = settings(max_examples=effort(25, 100), stateful_step_count=40, deadline=None)

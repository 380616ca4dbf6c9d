"""The lane core where not all models' weights fit: what happens to sequences while weights come and go."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forebay.sched.fairness import FAIRNESS
from forebay.sched.lane_events import ModelOpened, Reset, Tick
from forebay.sched.policy import POLICIES
from forebay.sched.tenancy import MOST_FAILURES
from forebay.transport.messages import Cancel, WeightsGone
from tests.effort import effort
from tests.sched.world import World, make_world, start

WEIGHTS = {"a": 10, "b": 10, "c": 15}
BLOCKS = {"a": 100, "b": 260, "c": 300}


def opened(model: str, max_sequences: int = 4, step_tokens: int = 8) -> ModelOpened:
    return ModelOpened(
        model, BLOCKS[model], max_sequences, step_tokens, weight_bytes=WEIGHTS[model]
    )  # fmt: skip


def world_of(budget: int, *models: str, **more: int) -> World:
    world = make_world(8, 1024, weights_memory=budget, **more)
    for model in models:
        world.send(opened(model))
    return world


def come(world: World) -> None:
    """Weights that are on their way arrive, until none are."""
    while moving := world.moving():
        world.land_weights(moving[0])


def test_weights_come_before_the_first_step_and_are_reported() -> None:
    world = world_of(10, "a")
    assert world.moving() == ["a"], "there is room, so nobody need ask"
    world.send(start(1))
    assert not world.plans
    world.land_weights("a", seconds=0.3)
    assert world.plans
    world.run_dry()
    assert [(moved.model, moved.resident, moved.seconds) for moved in world.moved] == [("a", True, 0.3)]


def test_an_idle_model_makes_room_and_both_are_served() -> None:
    world = world_of(10, "a", "b")
    come(world)
    world.send(start(1))
    world.run_dry()
    world.send(start(2, "b"))
    world.run_dry()
    assert world.reported[1, 0].reason == world.reported[2, 0].reason == "length"
    assert [(moved.model, moved.resident) for moved in world.moved] == [("a", True), ("a", False), ("b", True)]


def test_a_step_whose_sequence_has_ended_keeps_the_weights_until_it_lands() -> None:
    world = world_of(10, "a", "b")
    come(world)
    world.send(start(1))
    world.send(Cancel(1, 0))
    world.send(start(2, "b"))
    assert world.weights["a"] == "there"
    while world.flying:
        world.land()
    assert world.weights["a"] == "leaving"
    world.run_dry()
    assert world.reported[2, 0].reason == "length"


@pytest.mark.parametrize("host_slots", [0, 4], ids=["recompute", "spill"])
def test_a_long_answer_makes_room_after_its_turn_and_goes_on_later(host_slots: int) -> None:
    world = world_of(10, "a", "b", host_slots=host_slots)
    come(world)
    world.send(start(1, max_tokens=200))
    world.send(start(2, "b"))
    while (2, 0) not in world.reported:
        assert (1, 0) not in world.reported, "it should have made room"
        world.now += 0.05
        if world.moving():
            come(world)
        elif world.copies:
            world.land_copy()
        elif world.flying:
            world.land()
        else:
            world.send(Tick())
    assert world.core.preemptions >= 1
    world.now += 10
    world.run_dry()
    assert len(world.delivered[1, 0]) == 200
    assert bool(world.copied.get("out")) == bool(host_slots)


def test_requests_fail_with_the_reason_when_weights_do_not_come() -> None:
    world = world_of(10, "a")
    world.send(start(1))
    for _ in range(MOST_FAILURES):
        world.now += 10
        world.send(Tick())
        world.land_weights("a", fail=True)
    world.run_dry()
    assert world.finished[1, 0].detail == "the weights of model 'a' cannot be loaded: boom"
    world.send(start(2))
    world.run_dry()
    assert world.reported[2, 0].reason == "length", "another request is another try"


def test_a_request_that_waits_for_memory_does_not_hold_up_others_while_its_weights_are_away() -> None:
    """While one waits for KV blocks nobody who came later gets any; but not if its model cannot run anyhow."""
    world = world_of(25, "a", "b")
    come(world)
    world.send(opened("c"))
    world.send(start(1, "b", prompt=60, max_tokens=200))
    world.send(start(2, "a", prompt=1000, max_tokens=4))
    world.send(start(3, "c", prompt=10, max_tokens=4))
    for _ in range(200):
        if (3, 0) in world.reported:
            break
        world.now += 0.02
        if world.moving():
            come(world)
        else:
            world.land()
    assert world.weights["a"] == "away"
    assert world.reported[3, 0].reason == "length"
    assert not {(1, 0), (2, 0)} & set(world.reported)
    world.now += 10
    world.run_dry()
    assert {ended.reason for ended in world.reported.values()} == {"length"}


def test_an_answer_that_nobody_asked_for_is_an_error() -> None:
    world = make_world()
    with pytest.raises(ValueError, match="no budget for weights"):
        world.core.handle(0.0, WeightsGone("a"))


def test_a_model_larger_than_the_budget_is_refused() -> None:
    world = make_world(weights_memory=9)
    with pytest.raises(ValueError, match="model 'a' has 10 bytes of weights; the device's weights_memory is 9"):
        world.core.handle(0.0, opened("a"))


class AnyOrder(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        fairness=st.sampled_from(sorted(FAIRNESS)),
        host_slots=st.integers(0, 3),
        budget=st.integers(15, 30),
        slabs=st.integers(1, 4),
        partition=st.sampled_from(["none", "streams"]),
    )
    def begin(self, policy: str, fairness: str, host_slots: int, budget: int, slabs: int, partition: str) -> None:
        self.world = make_world(
            slabs, 1024, policy, True, fairness, host_slots, partition=partition, weights_memory=budget
        )
        for model in WEIGHTS:
            self.world.send(opened(model))
        self.requests = 0
        self.open: list[int] = []

    @rule(model=st.sampled_from("abc"), prompt=st.integers(1, 30), max_tokens=st.integers(1, 18))
    def ask(self, model: str, prompt: int, max_tokens: int) -> None:
        self.requests += 1
        self.world.send(start(self.requests, model, prompt, max_tokens))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.send(Cancel(data.draw(st.integers(1, self.requests)), 0))

    @precondition(lambda self: self.world.flying)
    @rule(data=st.data(), fails=st.integers(0, 9))
    def land(self, data: st.DataObject, fails: int) -> None:
        plan = data.draw(st.sampled_from(self.world.heads()))
        if fails:
            self.world.land(plan=plan)
        else:
            self.world.fail(plan)

    @precondition(lambda self: self.world.copies)
    @rule(data=st.data(), fails=st.integers(0, 5))
    def land_copy(self, data: st.DataObject, fails: int) -> None:
        self.world.land_copy(data.draw(st.integers(0, len(self.world.copies) - 1)), not fails)

    @precondition(lambda self: self.world.moving())
    @rule(data=st.data(), fails=st.integers(0, 5), seconds=st.floats(0, 1))
    def land_weights(self, data: st.DataObject, fails: int, seconds: float) -> None:
        self.world.land_weights(data.draw(st.sampled_from(self.world.moving())), not fails, seconds)

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.send(Tick())

    @rule()
    def forget(self) -> None:
        self.world.send(Reset("the scheduler was away"))

    @invariant()
    def the_budget_holds(self) -> None:
        self.world.core.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for _ in range(4000):
            if world.core.idle:
                assert not world.sequences
                return
            world.now += 0.1
            if world.moving():
                world.land_weights(world.moving()[0])
            elif world.copies:
                world.land_copy()
            elif world.flying:
                world.land()
            else:
                world.send(Tick())
        raise AssertionError("somebody waits for ever")


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=effort(25, 100), stateful_step_count=30, deadline=None)

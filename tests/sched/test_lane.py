"""The lane core: one ending a request, blocks conserved, nobody starves, whatever happens in whatever order."""

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forebay.sched.lane_events import ModelOpened, Reset
from forebay.sched.policy import POLICIES
from forebay.transport.messages import Cancel
from tests.effort import effort
from tests.sched.world import World, make_world, start

SIZES = {"a": 100, "b": 260, "c": 1500}  # bytes of a block, in slabs of 1,024


def opened(model: str = "a", block_bytes: int = 100, max_sequences: int = 4, step_tokens: int = 8) -> ModelOpened:
    return ModelOpened(model, block_bytes, max_sequences, step_tokens)


def test_a_lone_request_gets_its_tokens_and_one_ending() -> None:
    world = make_world()
    world.send(opened())
    world.send(start(1, prompt=5, max_tokens=4))
    world.run_dry()
    assert len(world.delivered[1, 0]) == 4
    assert world.finished[1, 0].reason == "length"
    assert world.reported[1, 0].generated == 4
    assert world.core.idle
    assert not world.sequences


def test_a_step_is_launched_before_the_one_ahead_of_it_has_landed() -> None:
    world = make_world()
    world.send(opened())
    world.send(start(1, prompt=5, max_tokens=4))
    assert [[(w.start, w.count, w.sample) for w in plan.work] for plan in world.flying] == [
        [(0, 5, True)],
        [(5, 1, True)],
    ]


def test_no_step_is_spent_beyond_max_tokens() -> None:
    world = make_world()
    world.send(opened())
    world.send(start(1, prompt=5, max_tokens=4))
    world.run_dry()
    assert sum(work.sample for plan in world.plans for work in plan.work) == 4


def test_a_sequence_that_stops_by_itself_wastes_one_slot_and_delivers_nothing_more() -> None:
    world = make_world()
    world.send(opened())
    world.send(start(1, max_tokens=50))
    world.land()
    world.land(stops=frozenset([1]))
    assert world.finished[1, 0].reason == "stop"
    world.run_dry()
    assert len(world.delivered[1, 0]) == 2
    assert world.core.wasted_slots == 1
    assert world.core.idle


def test_a_long_prompt_is_cut_into_chunks_and_delays_no_decode() -> None:
    world = make_world()
    world.send(opened(step_tokens=8))
    world.send(start(1, prompt=2, max_tokens=20))
    world.send(start(2, prompt=30, max_tokens=2))
    world.run_dry()
    chunks = [work.count for plan in world.plans for work in plan.work if work.sequence == 2 and not work.sample]
    assert chunks
    assert max(chunks) <= 7, "a decode's token comes first"
    mixed = [plan for plan in world.plans if {work.sequence for work in plan.work} == {1, 2}]
    assert len(mixed) >= 4
    assert all(sum(work.count for work in plan.work) <= 8 for plan in world.plans)


def test_models_take_turns() -> None:
    world = make_world()
    world.send(opened("a"))
    world.send(opened("b", 260))
    world.send(start(1, "a", max_tokens=10))
    world.send(start(2, "b", max_tokens=10))
    world.run_dry()
    order = [plan.model for plan in world.plans][2:16]
    assert all(first != second for first, second in pairwise(order)), order


def test_requests_are_admitted_in_the_order_of_their_arrival() -> None:
    world = make_world()
    world.send(opened(max_sequences=2))
    for request in range(1, 7):
        world.send(start(request, prompt=3, max_tokens=3))
    world.run_dry()
    first_steps = {}
    for plan in world.plans:
        for work in plan.work:
            first_steps.setdefault(work.sequence, plan.step)
    assert sorted(first_steps, key=first_steps.__getitem__) == [1, 2, 3, 4, 5, 6]


def test_an_older_sequence_takes_the_blocks_of_the_youngest_which_comes_back() -> None:
    world = make_world(slabs=1, slab_bytes=600)  # six blocks of 16 tokens
    world.send(opened(block_bytes=100, step_tokens=64))
    world.send(start(1, prompt=30, max_tokens=50))
    world.send(start(2, prompt=30, max_tokens=30))
    world.run_dry()
    assert world.core.preemptions >= 1
    assert len(world.delivered[1, 0]) == 50
    assert len(world.delivered[2, 0]) == 30
    assert {ended.reason for ended in world.reported.values()} == {"length"}


@pytest.mark.parametrize("how", ["stops", "leaves"])
def test_a_sequence_that_made_room_goes_on_when_the_older_one_is_gone(how: str) -> None:
    world = make_world(slabs=1, slab_bytes=600)  # six blocks
    world.send(opened(block_bytes=100, step_tokens=64))
    world.send(start(1, prompt=30, max_tokens=60))
    world.send(start(2, prompt=30, max_tokens=60))
    for _ in range(200):
        planned = {work.sequence for plan in world.flying for work in plan.work}
        if planned == {2} or any(s.held for s in world.core._lanes["a"].running):
            break
        world.land()
    if how == "stops":
        while (1, 0) not in world.finished:
            world.land(stops=frozenset([1]))
    else:
        world.send(Cancel(1, 0))
    world.run_dry()
    assert len(world.delivered[2, 0]) == 60
    assert world.core.idle


def test_two_models_that_hold_each_others_memory_do_not_stand_still() -> None:
    world = make_world(slabs=2, slab_bytes=300)
    world.send(opened("a", 100, step_tokens=64))
    world.send(opened("b", 100, step_tokens=64))
    for request, model in enumerate("abab"):
        world.send(start(request, model, prompt=16, max_tokens=60))
    world.run_dry()
    assert {len(tokens) for tokens in world.delivered.values()} == {60}


def test_a_stream_of_small_requests_does_not_keep_a_large_one_of_another_model_waiting() -> None:
    world = make_world(slabs=2, slab_bytes=300)  # six blocks
    world.send(opened("a", 100, step_tokens=64))
    world.send(opened("b", 100, step_tokens=64))
    world.send(start(1, "a", prompt=16, max_tokens=16))
    world.send(start(2, "b", prompt=79, max_tokens=2))  # needs five of the six
    for request in range(3, 40):
        world.send(start(request, "a", prompt=16, max_tokens=16))
        if world.flying:
            world.land()
    world.run_dry()
    ended = list(world.finished)
    assert ended.index((2, 0)) <= 1, f"ended after {ended.index((2, 0))} others"
    assert len(ended) == 39


def test_a_resumed_request_makes_only_what_is_missing() -> None:
    world = make_world()
    world.send(opened())
    world.send(start(1, prompt=5, max_tokens=6, epoch=1, delivered=4))
    world.run_dry()
    assert len(world.delivered[1, 1]) == 2
    assert world.reported[1, 1].generated == 2


def test_a_newer_epoch_silently_replaces_an_older_one() -> None:
    world = make_world()
    world.send(opened())
    world.send(start(1, max_tokens=50))
    world.send(start(1, max_tokens=50, epoch=1))
    world.run_dry()
    assert (1, 0) not in world.finished
    assert world.finished[1, 1].reason == "length"


def test_what_cannot_run_fails_with_a_reason() -> None:
    world = make_world(slabs=1, slab_bytes=300)
    world.send(opened())
    world.send(start(1, "z"))
    world.send(start(2, prompt=40, max_tokens=20))
    assert "'z' is not loaded on this worker (loaded: a)" in world.finished[1, 0].detail
    assert "needs 4 KV blocks of 'a', the whole pool holds 3" in world.finished[2, 0].detail
    assert world.core.idle


def test_logits_that_are_not_finite_fail_their_request_alone() -> None:
    world = make_world()
    world.send(opened())
    world.send(start(1, max_tokens=5))
    world.send(start(2, max_tokens=5))
    while (2, 0) not in world.delivered:
        world.land()
    world.land(invalid=frozenset([1]))
    world.run_dry()
    assert world.finished[1, 0].reason == "failed"
    assert "not finite" in world.finished[1, 0].detail
    assert len(world.delivered[2, 0]) == 5


def test_a_failed_step_fails_its_sequences_and_the_model_lives_on() -> None:
    world = make_world()
    world.send(opened())
    world.send(start(1, max_tokens=5))
    while world.flying:
        world.fail()
    assert world.finished[1, 0].detail == "a step of model 'a' failed: boom"
    world.send(start(2, max_tokens=3))
    world.run_dry()
    assert len(world.delivered[2, 0]) == 3


def test_a_second_request_with_the_same_beginning_computes_only_what_is_new() -> None:
    world = make_world(prefix_cache=True)
    world.send(opened(step_tokens=64))
    text = list(range(40))
    world.send(start(1, text=text, max_tokens=10))
    world.run_dry()
    again = text + [int(token) for token in world.delivered[1, 0]] + [77] * 5
    world.send(start(2, text=again, max_tokens=2))
    world.run_dry()
    (first, *_) = [work for plan in world.plans for work in plan.work if work.sequence == 2]
    assert (first.start, first.count) == (48, 7), "48 of the first turn's 49 computed tokens are in full blocks"
    assert world.reported[2, 0].cached == 48
    assert world.finished[2, 0].cached == 48
    assert world.reported[1, 0].cached == 0


def test_the_same_text_of_another_model_is_not_found() -> None:
    world = make_world(prefix_cache=True)
    for model in "ab":
        world.send(opened(model, step_tokens=64))
        world.send(start(ord(model), model, text=list(range(40)), max_tokens=2))
        world.run_dry()
    assert [ended.cached for ended in world.reported.values()] == [0, 0]


def test_a_prompt_that_is_wholly_known_still_computes_its_last_block() -> None:
    world = make_world(prefix_cache=True)
    world.send(opened(step_tokens=64))
    for request in (1, 2):
        world.send(start(request, text=list(range(32)), max_tokens=3))
        world.run_dry()
    assert world.reported[2, 0].cached == 16


def test_what_was_cached_longest_goes_first() -> None:
    world = make_world(slabs=1, slab_bytes=600, prefix_cache=True)  # six blocks
    world.send(opened(step_tokens=64))
    for request, first in enumerate((1, 2, 1, 3, 1, 2), start=1):
        world.send(start(request, text=[first] * 33, max_tokens=2))  # three blocks, two of them full
        world.run_dry()
    cached = [world.reported[request, 0].cached for request in range(1, 7)]
    assert cached == [0, 0, 32, 0, 32, 16], "the end of the second text made room for the third, its beginning stayed"


def test_without_the_cache_nothing_is_found() -> None:
    world = make_world(prefix_cache=False)
    world.send(opened(step_tokens=64))
    for request in (1, 2):
        world.send(start(request, text=list(range(40)), max_tokens=2))
        world.run_dry()
    assert world.reported[2, 0].cached == 0


TEXTS = [[number] * 7 + list(range(60)) for number in range(2)]


class AnyOrder(RuleBasedStateMachine):
    """Random requests, cancellations, endings and failures under any policy, against a pool that is far too small."""

    @initialize(slabs=st.integers(2, 5), policy=st.sampled_from(sorted(POLICIES)), prefix_cache=st.booleans())
    def open(self, slabs: int, policy: str, prefix_cache: bool) -> None:
        self.world: World = make_world(slabs, policy=policy, prefix_cache=prefix_cache)
        self.requests = 0
        self.epochs: dict[int, int] = {}
        self.silenced: set[tuple[int, int]] = set()
        for model, size in SIZES.items():
            self.world.send(opened(model, size, max_sequences=3, step_tokens=16))

    @rule(
        model=st.sampled_from("abcz"),
        prompt=st.integers(1, 60),
        max_tokens=st.integers(1, 60),
        text=st.sampled_from([None, *TEXTS]),
    )
    def submit(self, model: str, prompt: int, max_tokens: int, text: list[int] | None) -> None:
        self.requests += 1
        self.epochs[self.requests] = 0
        self.world.send(start(self.requests, model, prompt, max_tokens, text=text and text[:prompt]))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.integers(1, self.requests))
        self.world.send(Cancel(request, self.epochs[request]))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), delivered=st.integers(0, 3))
    def resubmit(self, data: st.DataObject, delivered: int) -> None:
        request = data.draw(st.integers(1, self.requests))
        old = (request, self.epochs[request])
        if old not in self.world.finished:
            self.silenced.add(old)
        self.epochs[request] += 1
        self.world.send(start(request, "a", 7, 9, self.epochs[request], delivered))

    @precondition(lambda self: self.world.flying)
    @rule(data=st.data(), ends=st.booleans())
    def land(self, data: st.DataObject, ends: bool) -> None:
        here = sorted(work.sequence for work in self.world.flying[0].work)
        some = data.draw(st.frozensets(st.sampled_from(here))) if ends else frozenset()
        self.world.land(stops=some, invalid=some if len(some) == 1 and len(here) > 3 else frozenset())

    @precondition(lambda self: self.world.flying)
    @rule(steps=st.integers(5, 40))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.world.flying:
                self.world.land()

    @precondition(lambda self: self.world.flying)
    @rule()
    def fail(self) -> None:
        self.world.fail()

    @rule(seconds=st.floats(0, 20))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds

    @rule()
    def reset(self) -> None:
        self.silenced |= {(r, e) for r, e in self.epochs.items() if (r, e) not in self.world.finished}
        self.world.send(Reset("the scheduler was restarted"))

    @invariant()
    def busy_unless_idle(self) -> None:
        assert self.world.flying or self.world.core.idle, "requests wait and nothing runs"

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.run_dry()
        assert self.world.core.idle
        assert not self.world.sequences, "sequences were never closed"
        started = {(r, e) for r, last in self.epochs.items() for e in range(last + 1)}
        assert set(self.world.finished) | self.silenced == started
        assert not set(self.world.finished) & self.silenced, "a silenced request spoke"
        assert set(self.world.finished) == set(self.world.reported)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.pytestmark = [pytest.mark.timeout(300)]  # shrinking a failure takes longer than finding it
TestAnyOrder.settings = settings(max_examples=effort(30, 100), stateful_step_count=60, deadline=None)

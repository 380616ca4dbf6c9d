"""Spilling, loading, lending and fairness in the lane core, with the content of every block followed (see world.py)."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forebay.sched.fairness import FAIRNESS
from forebay.sched.lane_events import ModelOpened, Reset, SpillRevoked, Tick
from forebay.sched.policy import POLICIES
from forebay.transport.messages import Cancel
from tests.effort import effort
from tests.sched.world import World, make_world, start

SIZES = {"a": 100, "b": 260, "c": 1500}  # bytes of a block, in slabs of 1,024
TEXTS = [[number] * 7 + list(range(60)) for number in range(2)]
LENT = 4


def opened(model: str = "a", block_bytes: int = 100, max_sequences: int = 4, step_tokens: int = 8) -> ModelOpened:
    return ModelOpened(model, block_bytes, max_sequences, step_tokens)


def run_requests(world: World, count: int, prompt: int = 33, max_tokens: int = 40, first: int = 1) -> None:
    for request in range(first, first + count):
        world.send(start(request, prompt=prompt, max_tokens=max_tokens))
    world.run_dry()


def test_a_sequence_that_lacks_a_block_makes_the_youngest_spill_and_nothing_is_computed_twice() -> None:
    world = make_world(1, 600, host_slots=2)  # six blocks
    world.send(opened(step_tokens=64))
    world.send(start(1, prompt=30, max_tokens=50))
    world.send(start(2, prompt=30, max_tokens=30))
    world.run_dry()
    assert world.core.preemptions >= 1
    assert world.copied["out"] == world.copied["in"] > 0
    assert sum(work.count for plan in world.plans for work in plan.work) == 30 + 49 + 30 + 29


def test_lent_slots_are_filled_before_the_hosts() -> None:
    world = make_world(1, 600, host_slots=2, lent_slots=2)
    world.lend_spill((2, 3))
    world.send(opened(step_tokens=64))
    world.send(start(1, prompt=30, max_tokens=50))
    world.send(start(2, prompt=30, max_tokens=30))
    while not world.copies:
        world.land()
    (copy, _) = world.copies[0]
    assert min(copy.target) * 100 >= 2 * 600
    world.run_dry()


def spilled(**more: int) -> World:
    """A world in which sequence 2 rests in lent slot 2 of the arena, and 1 runs."""
    world = make_world(1, 600, lent_slots=2, **more)
    slot = world.core.swap.space.host_slots
    world.lend_spill((slot,))
    world.send(opened(step_tokens=64))
    world.send(start(1, prompt=30, max_tokens=50))
    world.send(start(2, prompt=30, max_tokens=30))
    while not world.copies:
        world.land()
    world.land_copy()
    return world


def test_what_is_asked_back_moves_to_the_host_and_comes_back_from_there() -> None:
    world = spilled(host_slots=1)
    world.send(SpillRevoked((1,), 1.0))
    (copy, _) = world.copies[0]
    assert copy.kind == "move"
    assert max(copy.target) < 6
    world.land_copy()
    assert world.arena.absent == {1, 2}, "it is given back as soon as it is empty"
    world.run_dry()
    assert sum(work.count for plan in world.plans for work in plan.work) == 30 + 49 + 30 + 29


def test_what_cannot_be_moved_is_dropped_and_computed_again() -> None:
    world = spilled()
    world.send(SpillRevoked((0,), 1.0))
    assert world.arena.absent == {0, 1}
    assert not world.copies
    world.run_dry()
    assert {len(tokens) for tokens in world.delivered.values()} == {50, 30}


def test_moves_that_were_not_begun_by_the_deadline_are_dropped() -> None:
    world = make_world(2, 1200, host_slots=6, lent_slots=6, fairness="cfs")  # 24 blocks
    world.lend_spill(tuple(range(6, 12)))
    world.send(opened(step_tokens=64, max_sequences=4))
    for request in range(1, 16):
        world.send(start(request, prompt=33, max_tokens=60))
    resting = 0
    while resting < 5:
        while world.copies:
            world.land_copy()
        world.land()
        resting = sum(s.state == "spilled" for s in world.core._lanes["a"].waiting)
    while world.copies:
        world.land_copy()
    world.send(SpillRevoked(tuple(range(6, 12)), 1.0))
    moving = [copy for copy, _ in world.copies if copy.kind == "move"]
    assert 1 <= len(moving) <= 2
    world.now += 2
    world.send(Tick())
    states = [s.state for s in world.core._lanes["a"].waiting if s.away]
    assert len(states) <= 2 + 1, "those that are moved, and one that lay in the host's memory"
    while world.copies:
        world.land_copy()
    assert world.arena.absent == set(range(6, 12))
    world.run_dry()
    assert {len(tokens) for tokens in world.delivered.values()} == {60}


@pytest.mark.parametrize("kind", ["out", "in"])
def test_a_copy_that_fails_costs_time_and_no_text(kind: str) -> None:
    world = make_world(1, 600, host_slots=2, prefix_cache=True)
    world.send(opened(step_tokens=64))
    world.send(start(1, prompt=30, max_tokens=50))
    world.send(start(2, prompt=30, max_tokens=30))
    failed = False
    while world.flying or world.copies:
        if world.copies:
            this = not failed and world.copies[0][0].kind == kind
            failed |= this
            world.land_copy(fail=this)
        else:
            world.land()
    assert failed
    assert {len(tokens) for tokens in world.delivered.values()} == {50, 30}


@pytest.mark.parametrize("moment", ["out", "resting", "in"])
@pytest.mark.parametrize("how", ["cancel", "reset"])
def test_it_may_end_at_any_moment_of_its_way(moment: str, how: str) -> None:
    world = make_world(1, 600, host_slots=2)
    world.send(opened(step_tokens=64))
    world.send(start(1, prompt=30, max_tokens=50))
    world.send(start(2, prompt=30, max_tokens=30))
    while not (world.copies and world.copies[0][0].kind == ("in" if moment == "in" else "out")):
        world.land_copy() if world.copies else world.land()
    if moment == "resting":
        world.land_copy()
    world.send(Cancel(2, 0) if how == "cancel" else Reset("boom"))
    world.run_dry()
    assert world.core.idle
    assert ((2, 0) in world.finished) == (how == "cancel")
    world.core.check()


def test_a_shared_prefix_is_not_copied_with_each_sequence() -> None:
    world = make_world(1, 1200, host_slots=8, prefix_cache=True, fairness="cfs")
    world.send(opened(step_tokens=64, max_sequences=3))
    text = list(range(64))
    for request in range(1, 7):
        world.send(start(request, text=[*text, request], max_tokens=40))
    world.run_dry()
    assert world.core.preemptions >= 6
    own = 6 * (105 // 16 - 4)
    assert world.copied["out"] <= 4 + own + world.core.preemptions


def test_what_the_prefix_cache_has_to_evict_is_found_in_the_arena() -> None:
    world = make_world(1, 1600, host_slots=4, prefix_cache=True)
    world.send(opened(step_tokens=64))
    for request, first in enumerate((1, 2, 3, 4, 5, 6, 7, 8, 9, 1), start=1):
        world.send(start(request, text=[first] * 49, max_tokens=2))
        world.run_dry()
    assert world.reported[10, 0].cached == 48
    assert world.copied["in"] == 3


def test_need_beyond_the_pool_is_borrowed_and_given_back_when_it_is_over() -> None:
    world = make_world(1, 600, lent_slots=8, fairness="cfs")
    world.send(opened(step_tokens=64))
    for request in range(1, 6):
        world.send(start(request, prompt=33, max_tokens=30))
        world.now += 1
    assert world.wanted == 3 * 600, "nine blocks more than the pool has, and half as many again"
    world.lend_spill((0, 1, 2))
    world.run_dry()
    assert world.copied["in"] > 0
    for _ in range(3):
        world.now += 20
        world.send(Tick())
    assert world.arena.absent == set(range(8))


def test_idle_slabs_are_lent_and_asked_back_for_a_burst() -> None:
    world = make_world(16, 600, lend=True)
    world.send(opened(step_tokens=64, max_sequences=16))
    world.now += 11
    world.send(Tick())
    assert len(world.contents.absent) == 14, "all but a tenth, rounded up"
    for request in range(1, 17):
        world.now += 0.1
        world.send(start(request, prompt=33, max_tokens=30))
    assert world.to_come >= 6
    world.give_back(tuple(sorted(world.contents.absent)))
    world.run_dry()
    assert not world.core.preemptions


class AnyOrder(RuleBasedStateMachine):
    """Random requests, cancels, endings, failed steps, failed copies, memory that comes and goes, against a pool that
    is far too small."""

    @initialize(
        slabs=st.integers(2, 5),
        policy=st.sampled_from(sorted(POLICIES)),
        fairness=st.sampled_from(sorted(FAIRNESS)),
        prefix_cache=st.booleans(),
        host_slots=st.integers(0, 3),
        lend=st.booleans(),
        reserve=st.sampled_from([0, 2500]),
    )
    def open(
        self, slabs: int, policy: str, fairness: str, prefix_cache: bool, host_slots: int, lend: bool, reserve: int
    ) -> None:
        self.world: World = make_world(
            slabs, policy=policy, prefix_cache=prefix_cache, fairness=fairness, host_slots=host_slots, lent_slots=LENT,
            lend=lend, reserve=reserve,
        )  # fmt: skip
        self.requests = 0
        self.silenced: set[int] = set()
        for model, size in SIZES.items():
            self.world.send(opened(model, size, max_sequences=3, step_tokens=16))

    @rule(
        model=st.sampled_from("aaabc"),
        prompt=st.integers(1, 60),
        max_tokens=st.integers(1, 60),
        text=st.sampled_from([None, *TEXTS]),
        tenant=st.sampled_from(["", "one", "two"]),
    )
    def submit(self, model: str, prompt: int, max_tokens: int, text: list[int] | None, tenant: str) -> None:
        self.requests += 1
        request = start(self.requests, model, prompt, max_tokens, text=text and text[:prompt], tenant=tenant)
        self.world.send(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.send(Cancel(data.draw(st.integers(1, self.requests)), 0))

    @precondition(lambda self: self.world.flying)
    @rule(data=st.data(), ends=st.booleans())
    def land(self, data: st.DataObject, ends: bool) -> None:
        here = sorted(work.sequence for work in self.world.flying[0].work)
        some = data.draw(st.frozensets(st.sampled_from(here))) if ends else frozenset()
        self.world.land(stops=some)

    @precondition(lambda self: self.world.flying or self.world.copies)
    @rule(steps=st.integers(5, 40), every=st.integers(1, 5))
    def run(self, steps: int, every: int) -> None:
        for step in range(steps):
            if self.world.flying:
                self.world.land()
            if self.world.copies and step % every == 0:
                self.world.land_copy()

    @precondition(lambda self: self.world.flying)
    @rule()
    def fail(self) -> None:
        self.world.fail()

    @precondition(lambda self: self.world.copies)
    @rule(data=st.data(), fails=st.booleans())
    def copy(self, data: st.DataObject, fails: bool) -> None:
        self.world.land_copy(data.draw(st.integers(0, len(self.world.copies) - 1)), fails)

    @precondition(lambda self: self.lendable())
    @rule(data=st.data())
    def borrow(self, data: st.DataObject) -> None:
        slots = data.draw(st.sets(st.sampled_from(self.lendable()), min_size=1))
        self.world.lend_spill(tuple(sorted(slots)))

    def lendable(self) -> list[int]:
        space = self.world.core.swap.space
        return sorted(self.world.arena.absent & set(range(space.host_slots, space.slots)))

    @rule(data=st.data(), deadline=st.sampled_from([0.0, 0.01, 5.0]))
    def revoke(self, data: st.DataObject, deadline: float) -> None:
        space = self.world.core.swap.space
        slots = data.draw(st.sets(st.integers(space.host_slots, space.slots - 1), min_size=1))
        self.world.send(SpillRevoked(tuple(sorted(slots)), deadline))

    @precondition(lambda self: self.world.contents.absent - self.world.dropped)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        lent = self.world.contents.absent - self.world.dropped
        slabs = data.draw(st.sets(st.sampled_from(sorted(lent)), min_size=1))
        self.world.give_back(tuple(sorted(slabs)))

    @rule(free=st.sampled_from([0, 2000, 4000, 6000, 20_000]), seconds=st.sampled_from([0.0, 1.0, 6.0]), data=st.data())
    def neighbour(self, free: int, seconds: float, data: st.DataObject) -> None:
        self.world.now += seconds
        self.world.device_memory(free, data.draw(st.sampled_from([None, 0, 1])))

    @rule(seconds=st.floats(0, 20))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.send(Tick())

    @rule()
    def reset(self) -> None:
        self.silenced |= {r for r in range(1, self.requests + 1) if (r, 0) not in self.world.finished}
        self.world.send(Reset("the scheduler was restarted"))

    @invariant()
    def busy_unless_idle(self) -> None:
        world = self.world
        waits = world.to_come or world.dropped
        assert world.flying or world.copies or waits or world.core.idle, "requests wait and nothing runs"

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for _ in range(10):
            self.world.now += 6
            self.world.device_memory(1 << 30)
        assert not self.world.dropped, "the neighbour is gone"
        self.world.run_dry()
        assert self.world.core.idle
        assert not self.world.sequences, "sequences were never closed"
        ended = {request for request, _ in self.world.finished}
        assert ended | self.silenced == set(range(1, self.requests + 1))
        assert not ended & self.silenced
        assert set(self.world.finished) == set(self.world.reported)
        assert not self.world.due, "what was asked back is still here"


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.pytestmark = [pytest.mark.timeout(300)]  # shrinking a failure takes longer than finding it
TestAnyOrder.settings = settings(max_examples=effort(25, 100), stateful_step_count=40, deadline=None)

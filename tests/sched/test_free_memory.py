"""A neighbour takes the device's memory: what of the pool goes to the device, and what comes back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.sched.free_memory import CALM_S, MARGIN, TAKEN_AT_ONCE, FreeMemory
from forebay.sched.lane_events import SlabsFilled
from forebay.sched.quotas import Quotas
from tests.sched.test_lane import opened
from tests.sched.world import make_world, start

MIB = 1 << 20


def test_what_the_device_lacks_is_given_at_once_and_taken_again_slowly() -> None:
    memory = FreeMemory(512 * MIB, 40, 256 * MIB)
    assert memory.decide(0.0, 600 * MIB, 30) == 0
    assert memory.decide(1.0, 100 * MIB, 30) == 2, "412 MiB are two slabs"
    assert memory.decide(2.0, 0, 1) == 1, "no more than is idle"
    assert memory.decide(3.0, 1000 * MIB, 30) == 0, "with a slab less it would have to be given again"
    assert memory.decide(4.0, 1300 * MIB, 30) == 0
    assert memory.decide(4.0 + CALM_S, 1300 * MIB, 30) == -1, "after a while, one fits"
    assert memory.decide(11.0, 9000 * MIB, 30) == 0, "it is on its way"
    memory.taken(1)
    assert memory.decide(12.0, 9000 * MIB, 30) == -2, "it has been calm"
    memory.taken(1)
    assert memory.decide(13.0, 9000 * MIB, 30) == 0, "there was no memory after all: it begins anew"
    assert memory.decide(13.0 + CALM_S, 9000 * MIB, 30) == -1
    memory.taken(1)
    assert memory.given == 0


def test_a_tenth_is_kept_and_few_are_taken_at_once() -> None:
    memory = FreeMemory(512 * MIB, 40, 256 * MIB)
    assert memory.decide(0.0, 0, 40) == 2
    for second in range(1, 30):
        memory.decide(float(second), 0, 40)
    assert memory.given == 36
    memory.decide(40.0, 1 << 40, 0)
    assert memory.decide(40.0 + CALM_S, 1 << 40, 0) == -TAKEN_AT_ONCE


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 12), st.integers(0, 4), st.floats(0, 7))), st.data())
def test_slabs_are_conserved_and_the_device_keeps_its_reserve(steps, data) -> None:
    """The neighbour takes any amount; what is taken again never makes the device lack."""
    memory, now = FreeMemory(500, 12, 100), 0.0
    for free, idle, there, seconds in steps:
        now += seconds
        count = memory.decide(now, free, idle)
        memory.check()
        if count > 0:
            assert free < 500
            assert count <= idle
        if count < 0:
            assert free + count * 100 >= 500 + MARGIN * 100
            memory.taken(min(-count, there))
            memory.check()


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.lists(st.integers(1, 10_000), max_size=8))
def test_quotas_follow_in_proportion_and_none_is_lost(weights, sizes) -> None:
    quotas = Quotas(10_000)
    for number, weight in enumerate(weights):
        quotas.add(str(number), weight)
    for size in sizes:
        quotas.resize(size)
        quotas.check()


def test_a_pool_gives_idle_slabs_keeps_what_is_in_use_and_quotas_follow() -> None:
    world = make_world(8, 1000, policy="adbs", reserve=2000)
    world.send(opened("a", 100))
    world.send(opened("b", 100))
    pool = world.core.memory.pool
    assert pool.quota("a") == pool.quota("b") == 40
    world.send(start(1, "a", prompt=70, max_tokens=40))
    world.device_memory(100)
    assert len(world.dropped) == 2
    assert world.resized[-1].given == 2000
    assert pool.quota("a") == pool.quota("b") == 30
    for _ in range(5):
        world.device_memory(0)
    assert len(world.dropped) == 7, "all but the one with the request's blocks, which is the first"
    world.send(start(2, "b", prompt=20, max_tokens=4))
    world.run_dry()
    assert world.finished[1, 0].reason == "length"
    assert world.finished[2, 0].reason == "length"
    world.device_memory(12_000)
    world.now += CALM_S
    world.device_memory(12_000, there=2)
    assert len(world.dropped) == 5
    world.now += CALM_S
    for _ in range(8):
        world.now += CALM_S
        world.device_memory(12_000)
    assert not world.dropped
    assert (world.resized[-1].size, world.resized[-1].given) == (8000, 0)
    assert pool.quota("a") + pool.quota("b") == 80


def test_slabs_that_nobody_asked_for_are_refused() -> None:
    world = make_world(8, 1000, reserve=2000)
    world.send(opened("a", 100))
    with pytest.raises(ValueError, match="1 slabs of the pool were filled, 0 asked for"):
        world.core.handle(1.0, SlabsFilled(1))

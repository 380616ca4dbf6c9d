"""Who runs when not all can: slices, tenants, and that nobody waits for ever."""

from random import Random

import pytest

from forebay.sched.fairness import SLICE_TOKENS, VirtualTokenCounter, make_fairness
from forebay.sched.lane_events import ModelOpened
from forebay.transport.messages import BLOCK_TOKENS
from tests.sched.world import World, make_world, start

BLOCK = 100


def crowded(fairness: str, blocks: int = 12, host_blocks: int = 120, max_sequences: int = 4, **more: bool) -> World:
    """One model, a pool of so many blocks, and room for ten times as many in the arena."""
    world = make_world(
        1, blocks * BLOCK, fairness=fairness, host_slots=host_blocks // blocks, lent_slots=0, **more
    )  # fmt: skip
    world.check_every = 20
    world.send(ModelOpened("a", BLOCK, max_sequences, 64))
    return world


def step(world: World) -> None:
    """What is on its way lands: copies at once, then the oldest step."""
    while world.copies:
        world.land_copy()
    if world.flying:
        world.land()


def test_a_newcomer_need_not_wait_for_those_that_have_had_a_slice() -> None:
    steps = {}
    for fairness in ("fcfs", "cfs"):
        world = crowded(fairness)
        for request in range(1, 5):
            world.send(start(request, prompt=32, max_tokens=100))
        for _ in range(30):
            step(world)
        world.send(start(9, prompt=32, max_tokens=8))
        count = 0
        while (9, 0) not in world.delivered:
            step(world)
            count += 1
        steps[fairness] = count
        world.run_dry()
        assert len(world.finished) == 5
    assert steps["cfs"] <= SLICE_TOKENS + 6
    assert steps["fcfs"] > 3 * steps["cfs"]


def test_whoever_makes_room_comes_back_without_computing_anything_twice() -> None:
    world = crowded("cfs")
    for request in range(1, 9):
        world.send(start(request, prompt=33, max_tokens=60))
    world.run_dry()
    assert world.core.preemptions > 8
    assert world.core.swap.loads > 8
    assert {len(tokens) for tokens in world.delivered.values()} == {60}
    computed = sum(work.count for plan in world.plans for work in plan.work)
    assert computed == 8 * (33 + 60 - 1)


def test_without_room_to_spill_tokens_are_computed_again() -> None:
    world = crowded("cfs", host_blocks=0)
    for request in range(1, 9):
        world.send(start(request, prompt=33, max_tokens=60))
    world.run_dry()
    assert {len(tokens) for tokens in world.delivered.values()} == {60}
    assert sum(work.count for plan in world.plans for work in plan.work) > 8 * (33 + 60 - 1)
    assert not world.copied


def test_nobody_makes_room_for_others_before_it_has_had_its_slice() -> None:
    world = crowded("cfs", blocks=40)  # memory for all that run: only slots are scarce
    for request in range(1, 20):
        world.send(start(request, prompt=20, max_tokens=50))
    world.run_dry()
    drawn = sum(map(len, world.delivered.values()))
    assert drawn == 19 * 50
    assert 19 < world.core.preemptions <= drawn / SLICE_TOKENS


def test_what_was_written_once_is_not_written_again() -> None:
    world = crowded("cfs", prefix_cache=True)
    for request in range(1, 9):
        world.send(start(request, prompt=33, max_tokens=60))
    world.run_dry()
    full = 8 * ((33 + 60) // BLOCK_TOKENS)
    partial = world.core.preemptions
    assert world.copied["out"] <= full + partial, "each full block once, the last one of each spill"


@pytest.mark.parametrize("fairness", ["fcfs", "cfs", "vtc"])
@pytest.mark.parametrize("host_blocks", [0, 120])
def test_nobody_starves_under_a_stream_of_newcomers(fairness: str, host_blocks: int) -> None:
    world = crowded(fairness, host_blocks=host_blocks)
    world.send(start(1, prompt=40, max_tokens=80, tenant="slow"))
    request = 1
    for _ in range(3000):
        if (1, 0) in world.finished:
            break
        if len(world.core._by_request) < 12:
            request += 1
            world.send(start(request, prompt=8 + request % 30, max_tokens=1 + request % 20, tenant=f"t{request % 3}"))
        step(world)
    assert (1, 0) in world.finished, f"{len(world.delivered.get((1, 0), ()))} tokens after {request} newcomers"
    world.run_dry()
    assert len(world.finished) == request


def service(world: World, tenants: dict[int, str]) -> dict[str, int]:
    """What each tenant was given, in VTC's measure: prompts of started requests, output tokens twice."""
    given: dict[str, int] = {}
    for request, tenant in tenants.items():
        prompt = 24 if (request, 0) in world.started else 0
        given[tenant] = given.get(tenant, 0) + prompt + 2 * len(world.delivered.get((request, 0), ()))
    return given


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("host_blocks", [0, 120])
def test_two_tenants_of_equal_weight_get_equal_service_while_both_wait(seed: int, host_blocks: int) -> None:
    """One sends ten times as much as the other."""
    random = Random(seed)
    world = crowded("vtc", blocks=24, host_blocks=host_blocks, max_sequences=6)
    tenants: dict[int, str] = {}

    def submit(tenant: str) -> None:
        request = len(tenants) + 1
        tenants[request] = tenant
        world.send(start(request, prompt=24, max_tokens=random.randint(10, 40), tenant=tenant))

    def waits(tenant: str) -> bool:
        return any(sequence.start.tenant == tenant for sequence in world.core._lanes["a"].waiting)

    for _ in range(20):
        submit("greedy")
    for _ in range(40):  # the greedy one has the device for itself at first
        step(world)
    for index in range(240):
        submit("modest" if index % 11 == 0 else "greedy")
    before = service(world, tenants)
    while waits("modest") and waits("greedy"):
        step(world)
    after = service(world, tenants)
    gained = {tenant: after[tenant] - before[tenant] for tenant in after}
    assert min(gained.values()) > 500
    assert max(gained.values()) <= 1.1 * min(gained.values()), gained
    world.run_dry()


def test_service_follows_weights() -> None:
    world = crowded("vtc", blocks=24, max_sequences=6)
    world.core._fairness._weights["heavy"] = 3.0  # type: ignore[attr-defined]
    tenants = {}
    for request in range(1, 121):
        tenants[request] = "heavy" if request % 2 else "light"
        world.send(start(request, prompt=24, max_tokens=20, tenant=tenants[request]))
    while all(any(s.start.tenant == t for s in world.core._lanes["a"].waiting) for t in ("heavy", "light")):
        step(world)
    given = service(world, tenants)
    assert given["heavy"] / given["light"] == pytest.approx(3, rel=0.15)
    world.run_dry()


def test_a_tenant_that_was_away_has_saved_nothing_up() -> None:
    fairness = VirtualTokenCounter()
    world = crowded("vtc")
    world.core._fairness = world.core._residency.fairness = fairness
    for request in range(1, 9):
        world.send(start(request, prompt=24, max_tokens=20, tenant="busy"))
    for _ in range(60):
        step(world)
    world.send(start(20, prompt=24, max_tokens=20, tenant="newcomer"))
    assert fairness.counters["newcomer"] >= fairness.counters["busy"] > 0
    world.run_dry()


def test_an_unknown_fairness_and_a_weight_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="'lottery' is unknown; there is: fcfs, cfs, vtc"):
        make_fairness("lottery")
    with pytest.raises(ValueError, match="'x' has weight 0; a weight is more than 0"):
        make_fairness("vtc", {"x": 0})

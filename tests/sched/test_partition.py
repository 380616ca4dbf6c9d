"""Whether a chunk may run beside decodes, on which share of the SMs, and how large: pure answers of `auto`."""

import pytest

from forebay.sched.cost_table import CostRow
from forebay.sched.lane_events import ModelOpened
from forebay.sched.launching import Launching
from forebay.sched.partition import (
    LARGEST_SHORT_STEP,
    SHORT_STEP,
    SHORT_STEPS,
    SMALLEST_CHUNK,
    SPLITS,
    Auto,
    Chunk,
    Decoding,
    make_partition,
)
from forebay.sched.sequence import Lane, Sequence
from forebay.transport.messages import Sampling, Start, Targets
from tests.sched.test_costs import plan
from tests.sched.world import World, lane_of, make_world, start

ROWS = tuple(
    CostRow(model, 1, 100, batch, length, batch * length * 0.02, 5.0)
    for model in "ab"
    for batch in (1, 64)
    for length in (64, 4096)
)
"""5 ms a decode step, 50k tokens/s of prefill."""


def auto(tpot_s: float = 0.0, ttft_s: float = 0.0) -> Auto:
    partition = Auto({model: Targets(ttft_s, tpot_s) for model in "ab"}, ROWS)
    for model in "ab":
        partition.add_model(model, "")
    return partition


def lane(model: str) -> Lane:
    return Lane(model, 100, 64, 2048)


def newcomer(came: float, prompt: int = 4096) -> Sequence:
    return Sequence(1, 1, Start(1, 0, "b", bytes(4 * prompt), prompt, Sampling(9), ""), came=came)


def decoding(began: float, drawn: int) -> list[Decoding]:
    return [Decoding(lane("a"), 8, 800, ((began, drawn),) * 8)]


@pytest.mark.parametrize(
    ("tpot_s", "share"),
    [(0.0, 0), (0.023, 0), (0.0083, 61), (0.0079, 55), (0.0066, 48)],
)
def test_the_quickest_split_with_which_running_answers_keep_to_their_target(tpot_s: float, share: int) -> None:
    """A step of 5 ms slows to 20 beside a prefill on all SMs, to 7.35 on 61 % of them and to 6.5 on 48 %."""
    partition = auto(tpot_s)
    partition._share = share
    assert partition.chunk(1.0, lane("b"), newcomer(1.0), decoding(0.0, 1)) == Chunk(2048, share)


def test_a_change_to_a_harsher_split_needs_some_margin() -> None:
    partition = auto(0.0076)
    partition._share = SPLITS[0]
    assert partition.chunk(1.0, lane("b"), newcomer(1.0), decoding(0.0, 1)) == Chunk(2048, SPLITS[0])
    partition._share = SPLITS[1]
    assert partition.chunk(1.0, lane("b"), newcomer(1.0), decoding(0.0, 1)) == Chunk(2048, SPLITS[1])


def test_answers_that_are_ahead_of_a_tight_target_pay_for_a_chunk() -> None:
    partition = auto(0.006)  # 20 % above an undisturbed step, below any split
    ahead = partition.chunk(1.0, lane("b"), newcomer(1.0), decoding(0.5, 100))  # 100 ms ahead
    assert ahead == Chunk(2048, 48)
    some = partition.chunk(1.0, lane("b"), newcomer(1.0), decoding(0.5, 85))  # 10 ms ahead
    assert some is not None
    assert SMALLEST_CHUNK <= some.tokens < 2048
    assert partition.chunk(1.0, lane("b"), newcomer(1.0), decoding(0.5, 83)) is None
    assert partition.chunk(1.0, lane("b"), newcomer(1.0), decoding(0.5, 10)) is None


def test_what_chunks_in_flight_will_cost_is_spent_already() -> None:
    partition = auto(0.006)
    first = partition.chunk(1.0, lane("b"), newcomer(1.0), decoding(0.5, 85))
    assert first is not None
    partition.launched(1.0, plan(1, "prefill", first.tokens, first.share))
    assert partition.chunk(1.0, lane("b"), newcomer(1.0), decoding(0.5, 85)) is None
    partition.landed(1.1, plan(1, "prefill", first.tokens, first.share), None)
    assert partition.chunk(1.1, lane("b"), newcomer(1.0), decoding(0.6, 85)) == first


def test_a_prompt_waits_for_half_of_its_target_and_no_longer() -> None:
    partition = auto(0.006, ttft_s=1.0)
    assert partition.chunk(1.4, lane("b"), newcomer(1.0), decoding(0.5, 10)) is None
    assert partition.chunk(1.5, lane("b"), newcomer(1.0), decoding(0.5, 10)) == Chunk(2048, 48)


def test_answers_that_are_too_slow_by_themselves_hold_nobody_up() -> None:
    assert auto(0.004).chunk(1.0, lane("b"), newcomer(1.0), decoding(0.5, 1)) == Chunk(2048, 0)


def test_a_prefill_of_the_only_model_goes_along_in_its_decode_steps_as_far_as_the_target_allows() -> None:
    partition = auto(0.020)  # 15 ms left: 750 tokens
    mine = lane("a")
    mine.waiting.append(newcomer(0.0))
    partition.look(1.0, [mine])
    assert partition.ride(mine) == 2048, "nothing is delayed"
    mine.running += running(1)
    partition.look(1.0, [mine])
    assert partition.ride(mine) == 736
    assert partition.chunk(1.0, mine, newcomer(0.0), decoding(0.5, 1)) is None
    partition.look(1.1, [mine, lane("b")])
    assert partition.ride(mine) == 0
    partition.look(1.2, [mine])
    assert partition.ride(mine) == 0, "the other model may be back at once"
    partition.look(1.4, [mine])
    assert partition.ride(mine) == 736


def running(count: int) -> list[Sequence]:
    sequences = [newcomer(0.0, 16) for _ in range(count)]
    for sequence in sequences:
        sequence.state, sequence.computed = "running", 15
    return sequences


def test_short_prompts_go_along_beside_other_models_too_and_long_ones_do_not() -> None:
    partition = auto(0.020)
    mine, other = lane("a"), lane("b")
    mine.max_sequences = 512

    def ride(*prompts: int, decodes: int = 0) -> int:
        mine.waiting = [newcomer(1.0, prompt) for prompt in prompts]
        mine.running = running(decodes)
        partition.look(1.0, [mine, other])
        rides = partition.ride(mine)
        chunk = partition.chunk(1.0, mine, newcomer(1.0), decoding(0.5, 1))
        assert chunk is None or not rides, "a prompt goes one way or the other"
        return rides

    assert ride(160, decodes=27) == SHORT_STEP
    assert ride(160) == SHORT_STEP, "of a model without decodes as well"
    assert ride(SHORT_STEPS * SHORT_STEP, decodes=1) == SHORT_STEP
    assert ride(500, SHORT_STEPS * SHORT_STEP - 499, decodes=1) == 0, "the prefill lane is quicker"
    assert ride(160, decodes=LARGEST_SHORT_STEP - 100) == 100
    assert ride(160, decodes=LARGEST_SHORT_STEP - SMALLEST_CHUNK + 1) == 0, "that many decodes fill a step"
    assert ride(decodes=27) == 0
    partition._targets = {"a": Targets(0, 0.006)}  # 1 ms left: 50 tokens
    assert ride(160, decodes=27) == 0
    partition._targets = {"a": Targets(0, 0.004)}
    assert ride(160, decodes=27) == SHORT_STEP, "too slow by themselves"


def test_a_lone_models_steps_are_all_in_one_lane_and_launched_ahead() -> None:
    world = make_world(partition="auto")
    world.send(ModelOpened("a", 100, 4, 8))
    world.send(start(1, prompt=20, max_tokens=5))
    assert [(lane_of(plan), plan.work[0].count) for plan in world.flying] == [(("decode", "a"), 8)] * 2
    world.run_dry()
    assert len(world.delivered[1, 0]) == 5
    assert {plan.lane for plan in world.plans} == {"decode"}


def test_a_name_that_is_none() -> None:
    with pytest.raises(ValueError, match="'both' is unknown; there is: auto, streams, green, none"):
        make_partition("both")


class Device:
    """A device whose decodes and prefills slow each other as measured, in virtual time."""

    def __init__(self, world: World, step_s: float, token_s: float) -> None:
        self.world = world
        self.step_s = step_s
        self.token_s = token_s
        self.left: dict[int, float] = {}
        self.began: dict[int, float] = {}

    def advance(self) -> None:
        """Until the next step lands."""
        heads = self.world.heads()
        both = len({step.lane for step in heads}) == 2
        rates: dict[int, float] = {}
        for step in heads:
            tokens = sum(work.count for work in step.work)
            self.began.setdefault(step.step, self.world.now)
            self.left.setdefault(step.step, self.token_s * tokens if step.lane == "prefill" else self.step_s)
            share = next((other.share for other in heads if other.lane == "prefill"), 0)
            decode, prefill = {0: (4.0, 1.24), 61: (1.47, 2.19), 55: (1.42, 2.35), 48: (1.3, 2.8)}[share]
            rates[step.step] = 1 / (prefill if step.lane == "prefill" else decode) if both else 1.0
        first = min(heads, key=lambda step: self.left[step.step] / rates[step.step])
        passed = self.left[first.step] / rates[first.step]
        for step in heads:
            self.left[step.step] -= passed * rates[step.step]
        self.world.now += passed - 0.001  # sending an event takes the world a millisecond
        self.world.land(plan=first, seconds=self.world.now + 0.001 - self.began[first.step])


@pytest.mark.parametrize(("tpot_s", "most"), [(0.008, 1.6), (0.02, 4.0)])
def test_while_long_prompts_arrive_decodes_keep_to_their_target_and_prefills_go_on(tpot_s: float, most: float) -> None:
    """The issue's figure: decodes slow by 1.6 at most, and prefills keep at least 0.4 of the speed that they have
    alone."""
    world = make_world(slabs=4096, slab_bytes=102400)
    core = world.core
    core._launching = Launching(
        core._lanes,
        core._residency,
        core._launching._policy,
        Auto({model: Targets(0, tpot_s) for model in "ab"}, ROWS),
        core._launching._emit,
    )
    world.check_every = 1000
    for model in "ab":
        world.send(ModelOpened(model, 100, 64, 512))
    for request in range(8):
        world.send(start(request, "a", prompt=16, max_tokens=600))
    device = Device(world, 0.005, 1 / 50_000)
    while len(world.delivered) < 8 or any(len(tokens) < 50 for tokens in world.delivered.values()):
        device.advance()
    began, before, steps = world.now, len(world.plans), 0
    for request in range(100, 116):
        world.send(start(request, "b", prompt=2048, max_tokens=1))
    while (115, 0) not in world.finished:
        device.advance()
    took = world.now - began
    steps = sum(plan.lane == "decode" and plan.model == "a" for plan in world.plans[before:])
    assert took / steps <= most * 0.005 * 1.03
    assert 16 * 2048 / took >= 0.4 * 50_000

"""A small world around the lane core for its tests: a runner that computes nothing but checks every rule of a step."""

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from forebay.sched.blocks import BlockPool
from forebay.sched.fairness import make_fairness
from forebay.sched.lane import LaneCore
from forebay.sched.lane_events import (
    Deliver,
    DeviceMemory,
    DropSlabs,
    FillSlabs,
    LaneCommand,
    LaneEvent,
    LendSlabs,
    ModelOpened,
    Report,
    SlabsBack,
    SlabsFilled,
    SpillFreed,
    SpillGrew,
    SpillRevoked,
    TakeBackSlabs,
    WantSpill,
)
from forebay.sched.launching import STEPS_AHEAD
from forebay.sched.partition import make_partition
from forebay.sched.policy import POLICIES
from forebay.sched.spill import SpillSpace
from forebay.transport.messages import (
    BLOCK_TOKENS,
    CloseSequence,
    CopyBlocks,
    CopyDone,
    CopyFailed,
    Ended,
    EvictWeights,
    Finished,
    OpenSequence,
    PoolResized,
    RestoreWeights,
    Sampling,
    Start,
    StepDone,
    StepFailed,
    StepPlan,
    Tokens,
    WeightsBack,
    WeightsFailed,
    WeightsGone,
    WeightsMoved,
    Work,
)


@dataclass
class Mirror:
    """What a runner would hold of a sequence. `tokens` has a token only once it is drawn, `known` counts it before."""

    model: str
    tokens: list[int]
    known: int
    table: list[int] = field(default_factory=list)
    computed: int = 0


class Contents:
    """What lies in a range of slabs: for each block that was written, whose keys and values it holds, up to where.
    `absent` are slabs that are not there, or others'."""

    def __init__(self, slabs: int, slab_bytes: int) -> None:
        self.blocks: dict[tuple[str, int], tuple[Mirror, int]] = {}
        self.block_bytes: dict[str, int] = {}
        self.slabs = slabs
        self.slab_bytes = slab_bytes
        self.absent: set[int] = set()

    def text(self, model: str, block: int) -> list[int]:
        """All tokens up to the last one in the block; nothing if nobody wrote it since it changed hands."""
        if (model, block) not in self.blocks:
            return []
        mirror, end = self.blocks[model, block]
        return mirror.tokens[:end]

    def write(self, model: str, block: int, mirror: Mirror, end: int) -> None:
        """A block now holds what belongs to the tokens before `end`; whatever overlaps it is gone."""
        self.wipe(model, block)
        self.blocks[model, block] = mirror, end

    def wipe(self, model: str, block: int) -> None:
        """The block's bytes mean nothing any more."""
        first, last = self.span(model, block)
        assert not self.absent.intersection(self.touched(model, block)), f"block {block} of {model} is not ours"
        assert last <= self.slabs * self.slab_bytes
        for other, number in list(self.blocks):
            start, end = self.span(other, number)
            if start < last and first < end:
                del self.blocks[other, number]

    def span(self, model: str, block: int) -> tuple[int, int]:
        size = self.block_bytes[model]
        return block * size, (block + 1) * size

    def touched(self, model: str, block: int) -> range:
        """Slabs that the block lies in."""
        first, last = self.span(model, block)
        return range(first // self.slab_bytes, (last - 1) // self.slab_bytes + 1)

    def vanish(self, slab: int) -> None:
        """The slab is not there any more, nor what was in it."""
        assert slab not in self.absent
        for model, block in list(self.blocks):
            if slab in self.touched(model, block):
                del self.blocks[model, block]
        self.absent.add(slab)


class World:
    """Carries out commands as a worker would, in order, and asserts what a runner relies on."""

    def __init__(self, core: LaneCore) -> None:
        self.core = core
        pool, space = core.memory.pool, core.swap.space
        self.contents = Contents(pool.slabs, pool.slab_bytes)
        self.arena = Contents(space.slots, space.slab_bytes)
        self.arena.absent = set(range(space.host_slots, space.slots))
        self.copies: list[tuple[CopyBlocks, list[tuple[Mirror, int] | None]]] = []
        self.check_every = 1  # checks of the core cost more than its work: long stories do with fewer
        self.events = 0
        self.wanted = 0
        self.due: dict[int, float] = {}
        self.to_come = 0
        self.copied: dict[str, int] = {}
        self.now = 0.0
        self.sequences: dict[int, Mirror] = {}
        self.flying: deque[StepPlan] = deque()
        self.delivered: dict[tuple[int, int], list[int]] = {}
        self.finished: dict[tuple[int, int], Finished] = {}
        self.reported: dict[tuple[int, int], Ended] = {}
        self.started: set[tuple[int, int]] = set()
        self.plans: list[StepPlan] = []
        self.found = 0
        self.weights: dict[str, Literal["there", "away", "coming", "leaving"]] = {}
        self.moved: list[WeightsMoved] = []
        self.dropped: set[int] = set()
        self.filling: tuple[int, ...] = ()
        self.resized: list[PoolResized] = []

    def send(self, event: LaneEvent) -> list[LaneCommand]:
        self.now += 0.001
        if isinstance(event, ModelOpened):
            self.contents.block_bytes[event.model] = event.block_bytes
            self.arena.block_bytes[event.model] = event.block_bytes
            self.weights[event.model] = "away" if event.weight_bytes else "there"
        if isinstance(event, SpillRevoked):
            self.due |= dict.fromkeys(set(event.slots) - self.arena.absent, self.now + event.deadline_s)
        commands = self.core.handle(self.now, event)
        for command in commands:
            self._carry_out(command)
        self.events += 1
        if self.events % self.check_every == 0 or self.core.idle:
            self.core.check()
        for slot, deadline in self.due.items():
            assert self.now < deadline or self._in_use(slot), f"slot {slot} was not given back in time"
        return commands

    def _in_use(self, slot: int) -> bool:
        """Whether a copy reads from or writes to this slot of the arena."""
        for copy, _ in self.copies:
            ends = {"out": copy.target, "in": copy.source, "move": (*copy.source, *copy.target)}[copy.kind]
            if any(slot in self.arena.touched(copy.model, block) for block in ends):
                return True
        return False

    def land_copy(self, index: int = 0, fail: bool = False) -> None:
        """A copy ends, in whatever order; where it fails nobody knows what is at its target."""
        copy, before = self.copies.pop(index)
        source, target = self._ranges(copy)
        for block, place, content in zip(copy.source, copy.target, before, strict=True):
            assert source.blocks.get((copy.model, block)) == content, "written while it was copied"
            assert (copy.model, place) not in target.blocks, "written while it was copied to"
            if content is not None and not fail:
                target.write(copy.model, place, *content)
        self.copied[copy.kind] = self.copied.get(copy.kind, 0) + len(copy.source)
        self.send(CopyFailed(copy.copy, "boom") if fail else CopyDone(copy.copy))

    def moving(self) -> list[str]:
        """Models whose weights are on their way."""
        return [model for model, where in self.weights.items() if where in ("coming", "leaving")]

    def land_weights(self, model: str, fail: bool = False, seconds: float = 0.01) -> None:
        """A model's weights have come or gone, or have not."""
        came = self.weights[model] == "coming"
        self.weights[model] = "there" if came != fail else "away"
        gone_or_back = WeightsBack(model, seconds) if came else WeightsGone(model)
        self.send(WeightsFailed(model, "boom") if fail else gone_or_back)

    def _ranges(self, copy: CopyBlocks) -> tuple[Contents, Contents]:
        pool, arena = self.contents, self.arena
        return {"out": (pool, arena), "in": (arena, pool), "move": (arena, arena)}[copy.kind]

    def lend_spill(self, slots: tuple[int, ...]) -> None:
        """Memory of others appears in these slots of the arena."""
        self.arena.absent -= set(slots)
        self.send(SpillGrew(slots))

    def give_back(self, slabs: tuple[int, ...]) -> None:
        """Slabs that the pool had lent are its own again."""
        self.contents.absent -= set(slabs)
        self.to_come = max(0, self.to_come - len(slabs))
        self.send(SlabsBack(slabs))

    def device_memory(self, free: int, there: int | None = None) -> None:
        """The device has so many bytes free. If slabs are to be filled then, it has memory for `there` of them (None:
        all)."""
        self.send(DeviceMemory(free))
        if self.filling:
            slabs, self.filling = self.filling, ()
            filled = slabs[: there if there is not None else len(slabs)]
            self.contents.absent -= set(filled)
            self.dropped -= set(filled)
            self.send(SlabsFilled(len(filled)))

    def heads(self) -> list[StepPlan]:
        """The steps that run: of each lane the oldest in flight. Any of them may land next."""
        first: dict[object, StepPlan] = {}
        for plan in self.flying:
            first.setdefault(lane_of(plan), plan)
        return list(first.values())

    def land(
        self,
        stops: frozenset[int] = frozenset(),
        invalid: frozenset[int] = frozenset(),
        plan: StepPlan | None = None,
        seconds: float = 0.001,
    ) -> StepPlan:
        """A step in flight ends, the oldest if none is named; `stops` and `invalid` are sequences whose token stops, or
        means nothing."""
        plan = self._over(plan)
        sampled = [work.sequence for work in plan.work if work.sample]
        tokens = array("I", [self.draw(sequence) for sequence in sampled])
        flags = bytes(2 if s in invalid else 1 if s in stops else 0 for s in sampled)
        self.send(StepDone(plan.step, tokens.tobytes(), flags, seconds))
        return plan

    def _over(self, plan: StepPlan | None) -> StepPlan:
        plan = plan or self.flying[0]
        assert plan in self.heads(), "lanes do not overtake themselves"
        self.flying.remove(plan)
        return plan

    def fail(self, plan: StepPlan | None = None) -> None:
        """A step in flight raises: what it should have written is not there."""
        plan = self._over(plan)
        for work in plan.work:
            mirror = self.sequences[work.sequence]
            for index in range(work.start // BLOCK_TOKENS, -(-(work.start + work.count) // BLOCK_TOKENS)):
                if index < len(mirror.table):
                    self.contents.blocks.pop((mirror.model, mirror.table[index]), None)
        self.send(StepFailed(plan.step, "boom"))

    def draw(self, sequence: int) -> int:
        """The next token depends on the whole text before it, as a model's would."""
        mirror = self.sequences[sequence]
        token = (7 * sum(mirror.tokens) + len(mirror.tokens)) % 5
        mirror.tokens.append(token)
        return token

    def run_dry(self, bound: int = 10_000) -> None:
        """Lands what is in flight until nothing is; now one lane lags behind, now another."""
        while self.flying or self.copies or self.moving() or (self.contents.absent and not self.core.idle):
            bound -= 1
            assert bound, "the core goes on for ever"
            if self.copies and (bound % 2 or not self.flying):
                self.land_copy()
            elif self.moving() and (bound % 3 == 0 or not self.flying):
                self.land_weights(self.moving()[0])
            elif self.flying:
                heads = self.heads()
                self.land(plan=heads[bound % len(heads)])
            else:
                assert self.to_come, "it waits for memory that it has lent and does not ask back"
                self.give_back(tuple(self.contents.absent))

    def _carry_out(self, command: LaneCommand) -> None:
        match command:
            case OpenSequence(sequence, model, tokens):
                assert sequence not in self.sequences
                known = array("I", tokens).tolist()
                self.sequences[sequence] = Mirror(model, known, len(known))
            case CloseSequence(sequence):
                del self.sequences[sequence]
                assert not any(w.sequence == sequence for plan in self.flying for w in plan.work), "closed in flight"
            case CopyBlocks():
                self._copy(command)
            case WantSpill(size):
                self.wanted = size
            case SpillFreed(slots):
                assert slots
                for slot in slots:
                    assert not self._in_use(slot), f"slot {slot} is given back while a copy uses it"
                    self.arena.vanish(slot)
                    self.due.pop(slot, None)
            case LendSlabs(slabs):
                for slab in slabs:
                    self.contents.vanish(slab)
            case DropSlabs(slabs):
                for slab in slabs:
                    assert slab, "graphs are captured with the first block"
                    self.contents.vanish(slab)
                    self.dropped.add(slab)
            case FillSlabs(slabs):
                assert self.dropped.issuperset(slabs)
                self.filling = slabs
            case Report(PoolResized() as resized):
                self.resized.append(resized)
            case TakeBackSlabs(count):
                self.to_come += count
                assert self.to_come <= len(self.contents.absent), "more is taken back than was lent"
            case StepPlan():
                self._launch(command)
            case Deliver(_, messages):
                for message in messages:
                    self._deliver(message)
            case Report(Ended() as ended):
                key = (ended.request, ended.epoch)
                assert key not in self.reported, f"{key} ended twice"
                self.reported[key] = ended
            case RestoreWeights(model):
                assert self.weights[model] == "away"
                self.weights[model] = "coming"
            case EvictWeights(model):
                assert self.weights[model] == "there"
                assert not any(plan.model == model for plan in self.flying), "weights leave under a step"
                self.weights[model] = "leaving"
            case Report(WeightsMoved() as moved):
                self.moved.append(moved)
            case Report(message):
                key = (message.request, message.epoch)  # type: ignore[union-attr]
                assert key not in self.started, f"{key} started twice"
                self.started.add(key)

    def _copy(self, copy: CopyBlocks) -> None:
        source, target = self._ranges(copy)
        assert copy.source, "an empty copy"
        assert len(copy.source) == len(copy.target) == len(set(copy.target))
        before: list[tuple[Mirror, int] | None] = []
        for block in copy.source:
            assert not source.absent.intersection(source.touched(copy.model, block)), (
                "read from memory that is not there"
            )
            before.append(source.blocks.get((copy.model, block)))
        for block in copy.target:
            target.wipe(copy.model, block)
        self.copies.append((copy, before))

    def _launch(self, plan: StepPlan) -> None:
        assert plan.work, "an empty step"
        assert self.weights[plan.model] == "there", "a step without weights"
        assert len({work.sequence for work in plan.work}) == len(plan.work), "a sequence twice in a step"
        for work in plan.work:
            mirror = self.sequences[work.sequence]
            assert mirror.model == plan.model
            if work.kept == 0:
                mirror.table, mirror.computed = list(work.blocks), work.start
                self._check_found(mirror, work)
            else:
                assert work.kept == len(mirror.table), "blocks of the table were dropped in mid-run"
                mirror.table.extend(work.blocks)
            assert work.start == mirror.computed, "tokens computed twice or skipped"
            mirror.computed += work.count
            for index in range(work.start // BLOCK_TOKENS, -(-mirror.computed // BLOCK_TOKENS)):
                end = min(mirror.computed, (index + 1) * BLOCK_TOKENS)
                self.contents.write(mirror.model, mirror.table[index], mirror, end)
            assert mirror.computed <= mirror.known, "a token computed before it is known"
            assert len(mirror.table) * BLOCK_TOKENS >= mirror.computed, "no block for a token"
            assert work.sample == (mirror.computed == mirror.known)
            mirror.known += work.sample
        elsewhere = {
            work.sequence for flying in self.flying if lane_of(flying) != lane_of(plan) for work in flying.work
        }
        assert not elsewhere & {work.sequence for work in plan.work}, "a sequence in two lanes at once"
        self.flying.append(plan)
        ahead = sum(lane_of(flying) == lane_of(plan) for flying in self.flying)
        assert ahead <= STEPS_AHEAD, f"{ahead} steps in flight in lane {lane_of(plan)}"
        self.plans.append(plan)
        self._check_shared()

    def _check_found(self, mirror: Mirror, work: Work) -> None:
        """What counts as computed before the first step is in the blocks: of this model, and of this very text."""
        assert work.start < mirror.known, "nothing is left to draw the next token from"
        for index in range(-(-work.start // BLOCK_TOKENS)):
            end = min(work.start, (index + 1) * BLOCK_TOKENS)
            found = self.contents.text(mirror.model, mirror.table[index])
            assert len(found) >= end, f"block {mirror.table[index]} holds {len(found)} tokens, not {end}"
            assert found[:end] == mirror.tokens[:end], f"block {mirror.table[index]} holds {found}"
            self.found += 1

    def _check_shared(self) -> None:
        """Sequences in flight share a block only where it holds the same text for both."""
        live = {work.sequence for flying in self.flying for work in flying.work}
        holders: dict[tuple[str, int], tuple[int, Mirror]] = {}
        for number in live:
            mirror = self.sequences[number]
            for index, block in enumerate(mirror.table):
                place, other = holders.setdefault((mirror.model, block), (index, mirror))
                if other is not mirror:
                    end = (index + 1) * BLOCK_TOKENS
                    assert place == index
                    assert mirror.tokens[:end] == other.tokens[:end], "two texts in one block"

    def _deliver(self, message: object) -> None:
        match message:
            case Tokens(requests, epochs, tokens):
                columns = (array("Q", requests), array("I", epochs), array("I", tokens))
                for request, epoch, token in zip(*columns, strict=True):
                    assert (request, epoch) not in self.finished, "a token after the end"
                    self.delivered.setdefault((request, epoch), []).append(token)
            case Finished(request, epoch):
                assert (request, epoch) not in self.finished, "finished twice"
                self.finished[request, epoch] = message


def lane_of(plan: StepPlan) -> tuple[str, str]:
    """Each model has a lane of its own for decodes; the others are the device's."""
    return plan.lane, plan.model if plan.lane == "decode" else ""


def make_world(
    slabs: int = 8,
    slab_bytes: int = 1024,
    policy: str = "roundrobin",
    prefix_cache: bool = False,
    fairness: str = "fcfs",
    host_slots: int = 0,
    lent_slots: int = 0,
    lend: bool = False,
    partition: str = "none",
    weights_memory: int = 0,
    reserve: int = 0,
) -> World:
    """`lent_slots`: so many slots of the arena may hold memory of others; none do at first."""
    space = SpillSpace(host_slots + lent_slots, host_slots, slab_bytes)
    pool = BlockPool(slabs, slab_bytes)
    core = LaneCore(
        pool,
        POLICIES[policy](),
        prefix_cache,
        make_fairness(fairness),
        space,
        lend,
        make_partition(partition),
        weights_memory,
        reserve,
    )
    return World(core)


def start(
    request: int,
    model: str = "a",
    prompt: int = 5,
    max_tokens: int = 4,
    epoch: int = 0,
    delivered: int = 0,
    sink: str = "ipc:///sink",
    text: list[int] | None = None,
    tenant: str = "",
    ignore_eos: bool = False,
) -> Start:
    """A request whose prompt is `text`, or one of that length that no other request has."""
    tokens = text if text is not None else [1_000 * request + place for place in range(prompt)]
    tokens = tokens + [9] * delivered
    return Start(
        request,
        epoch,
        model,
        array("I", tokens).tobytes(),
        len(tokens) - delivered,
        Sampling(max_tokens, ignore_eos=ignore_eos),
        sink,
        tenant,
    )

"""A small world around the lane core for its tests: a runner that computes nothing but checks every rule of a step."""

from array import array
from collections import deque
from dataclasses import dataclass, field

from forebay.sched.blocks import BlockPool
from forebay.sched.lane import LaneCore
from forebay.sched.lane_events import Deliver, LaneCommand, LaneEvent, ModelOpened, Report
from forebay.sched.policy import POLICIES
from forebay.transport.messages import (
    BLOCK_TOKENS,
    CloseSequence,
    Ended,
    Finished,
    OpenSequence,
    Sampling,
    Start,
    StepDone,
    StepFailed,
    StepPlan,
    Tokens,
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
    """What lies in the pool's bytes: for each block that was written, whose keys and values it holds, up to where."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, int], tuple[Mirror, int]] = {}
        self.block_bytes: dict[str, int] = {}

    def text(self, model: str, block: int) -> list[int]:
        """All tokens up to the last one in the block; nothing if nobody wrote it since it changed hands."""
        if (model, block) not in self.blocks:
            return []
        mirror, end = self.blocks[model, block]
        return mirror.tokens[:end]

    def write(self, model: str, block: int, mirror: Mirror, end: int) -> None:
        """A block now holds what belongs to the tokens before `end`; whatever overlaps it is gone."""
        first, last = block * self.block_bytes[model], (block + 1) * self.block_bytes[model]
        for other, number in list(self.blocks):
            size = self.block_bytes[other]
            if number * size < last and first < (number + 1) * size:
                del self.blocks[other, number]
        self.blocks[model, block] = mirror, end


class World:
    """Carries out commands as a worker would, in order, and asserts what a runner relies on."""

    def __init__(self, core: LaneCore) -> None:
        self.core = core
        self.now = 0.0
        self.sequences: dict[int, Mirror] = {}
        self.flying: deque[StepPlan] = deque()
        self.delivered: dict[tuple[int, int], list[int]] = {}
        self.finished: dict[tuple[int, int], Finished] = {}
        self.reported: dict[tuple[int, int], Ended] = {}
        self.started: set[tuple[int, int]] = set()
        self.plans: list[StepPlan] = []
        self.contents = Contents()
        self.found = 0

    def send(self, event: LaneEvent) -> list[LaneCommand]:
        self.now += 0.001
        if isinstance(event, ModelOpened):
            self.contents.block_bytes[event.model] = event.block_bytes
        commands = self.core.handle(self.now, event)
        for command in commands:
            self._carry_out(command)
        self.core.check()
        return commands

    def land(self, stops: frozenset[int] = frozenset(), invalid: frozenset[int] = frozenset()) -> StepPlan:
        """The oldest step in flight ends; `stops` and `invalid` are sequences whose token stops, or means nothing."""
        plan = self.flying.popleft()
        sampled = [work.sequence for work in plan.work if work.sample]
        tokens = array("I", [self.draw(sequence) for sequence in sampled])
        flags = bytes(2 if s in invalid else 1 if s in stops else 0 for s in sampled)
        self.send(StepDone(plan.step, tokens.tobytes(), flags, 0.001))
        return plan

    def fail(self) -> None:
        """The oldest step in flight raises: what it should have written is not there."""
        plan = self.flying.popleft()
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
        while self.flying:
            bound -= 1
            assert bound, "the core goes on for ever"
            self.land()

    def _carry_out(self, command: LaneCommand) -> None:
        match command:
            case OpenSequence(sequence, model, tokens):
                assert sequence not in self.sequences
                known = array("I", tokens).tolist()
                self.sequences[sequence] = Mirror(model, known, len(known))
            case CloseSequence(sequence):
                del self.sequences[sequence]
                assert not any(w.sequence == sequence for plan in self.flying for w in plan.work), "closed in flight"
            case StepPlan():
                self._launch(command)
            case Deliver(_, messages):
                for message in messages:
                    self._deliver(message)
            case Report(Ended() as ended):
                key = (ended.request, ended.epoch)
                assert key not in self.reported, f"{key} ended twice"
                self.reported[key] = ended
            case Report(message):
                key = (message.request, message.epoch)  # type: ignore[union-attr]
                assert key not in self.started, f"{key} started twice"
                self.started.add(key)

    def _launch(self, plan: StepPlan) -> None:
        assert plan.work, "an empty step"
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
        self.flying.append(plan)
        self.plans.append(plan)
        self._check_shared()

    def _check_found(self, mirror: Mirror, work: Work) -> None:
        """What counts as computed before the first step is in the blocks: of this model, and of this very text."""
        assert work.start % BLOCK_TOKENS == 0
        assert work.start < mirror.known, "nothing is left to draw the next token from"
        for index in range(work.start // BLOCK_TOKENS):
            found = self.contents.text(mirror.model, mirror.table[index])
            wanted = mirror.tokens[: (index + 1) * BLOCK_TOKENS]
            assert found == wanted, f"block {mirror.table[index]} holds {found}, not {wanted}"
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


def make_world(slabs: int = 8, slab_bytes: int = 1024, policy: str = "roundrobin", prefix_cache: bool = False) -> World:
    return World(LaneCore(BlockPool(slabs, slab_bytes), POLICIES[policy](), prefix_cache))


def start(
    request: int,
    model: str = "a",
    prompt: int = 5,
    max_tokens: int = 4,
    epoch: int = 0,
    delivered: int = 0,
    sink: str = "ipc:///sink",
    text: list[int] | None = None,
) -> Start:
    """A request whose prompt is `text`, or one of that length that no other request has."""
    tokens = text if text is not None else [1_000 * request + place for place in range(prompt)]
    tokens = tokens + [9] * delivered
    return Start(
        request, epoch, model, array("I", tokens).tobytes(), len(tokens) - delivered, Sampling(max_tokens), sink
    )

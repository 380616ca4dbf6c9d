"""A small world around the lane core for its tests: a runner that computes nothing but checks every rule of a step."""

from array import array
from collections import deque
from dataclasses import dataclass, field

from forebay.sched.blocks import BlockPool
from forebay.sched.lane import LaneCore
from forebay.sched.lane_events import Deliver, LaneCommand, LaneEvent, Report
from forebay.sched.policy import FirstComeFirstServed
from forebay.sched.sequence import BLOCK_TOKENS
from forebay.transport.messages import (
    CloseSequence,
    Ended,
    Finished,
    OpenSequence,
    Sampling,
    Start,
    StepDone,
    StepPlan,
    Tokens,
)


@dataclass
class Mirror:
    """What a runner would hold of a sequence."""

    model: str
    known: int
    table: list[int] = field(default_factory=list)
    computed: int = 0


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

    def send(self, event: LaneEvent) -> list[LaneCommand]:
        self.now += 0.001
        commands = self.core.handle(self.now, event)
        for command in commands:
            self._carry_out(command)
        self.core.check()
        return commands

    def land(self, stops: frozenset[int] = frozenset(), invalid: frozenset[int] = frozenset()) -> StepPlan:
        """The oldest step in flight ends; `stops` and `invalid` are sequences whose token stops, or means nothing."""
        plan = self.flying.popleft()
        sampled = [work.sequence for work in plan.work if work.sample]
        tokens = array("I", [1000 + sequence for sequence in sampled])
        flags = bytes(2 if s in invalid else 1 if s in stops else 0 for s in sampled)
        self.send(StepDone(plan.step, tokens.tobytes(), flags, 0.001))
        return plan

    def run_dry(self, bound: int = 10_000) -> None:
        while self.flying:
            bound -= 1
            assert bound, "the core goes on for ever"
            self.land()

    def _carry_out(self, command: LaneCommand) -> None:
        match command:
            case OpenSequence(sequence, model, tokens):
                assert sequence not in self.sequences
                self.sequences[sequence] = Mirror(model, len(tokens) // 4)
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
            if work.start == 0:
                mirror.table, mirror.computed = [], 0
            mirror.table.extend(work.blocks)
            assert work.start == mirror.computed, "tokens computed twice or skipped"
            mirror.computed += work.count
            assert mirror.computed <= mirror.known, "a token computed before it is known"
            assert len(mirror.table) * BLOCK_TOKENS >= mirror.computed, "no block for a token"
            assert work.sample == (mirror.computed == mirror.known)
            mirror.known += work.sample
        self.flying.append(plan)
        self.plans.append(plan)
        # Whatever runs now must not share a block with any other sequence that has computed tokens of value.
        tables = [b for m in self.sequences.values() if m.model == plan.model and m.computed for b in m.table]
        live = {work.sequence for flying in self.flying for work in flying.work}
        used = [b for s in live if self.sequences[s].model == plan.model for b in self.sequences[s].table]
        assert len(used) == len(set(used)), "two sequences in flight share a block"
        assert tables

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


def make_world(slabs: int = 8, slab_bytes: int = 1024) -> World:
    return World(LaneCore(BlockPool(slabs, slab_bytes), FirstComeFirstServed()))


def start(
    request: int,
    model: str = "a",
    prompt: int = 5,
    max_tokens: int = 4,
    epoch: int = 0,
    delivered: int = 0,
    sink: str = "ipc:///sink",
) -> Start:
    tokens = array("I", range(prompt + delivered)).tobytes()
    return Start(request, epoch, model, tokens, prompt, Sampling(max_tokens), sink)

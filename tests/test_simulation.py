"""The desk, the central core and the lane cores together, with every message a thing that can be late, and workers that
are killed or freeze at any moment. What a client reads must be the same text, each token once, with one ending.

Tokens are known beforehand: output token i of the request whose prompt is made of `identity` is `text(identity, i)`.
"""

from array import array
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from forebay.runtime.desk import Delivery, Desk
from forebay.sched.blocks import BlockPool
from forebay.sched.central import CentralCore
from forebay.sched.central_events import CentralEvent, CentralSettings, Dismiss, PeerGone, Placement, Received, Tick
from forebay.sched.central_events import Send as SendTo
from forebay.sched.lane import LaneCore
from forebay.sched.lane_events import Deliver, LaneEvent, ModelOpened, Report, Reset
from forebay.sched.partition import make_partition
from forebay.sched.policy import AdaptiveBatching
from forebay.transport.codec import encode, read_to_front_door, read_to_scheduler, read_to_worker
from forebay.transport.messages import (
    PROTOCOL_VERSION,
    Cancel,
    CloseSequence,
    DeviceSettings,
    Heartbeat,
    Join,
    Load,
    Message,
    ModelReady,
    ModelSpec,
    Open,
    OpenSequence,
    Rejoin,
    Sampling,
    Start,
    StepDone,
    StepPlan,
)
from forebay.transport.session import Session
from tests.effort import effort

DEVICES = ("cpu:0", "cpu:1")
SETTINGS = CentralSettings(
    tuple(
        Placement(ModelSpec(model, "/m", max_sequences=3, step_tokens=8), gpus)
        for model, gpus in (("a", ("cpu:0", "cpu:1")), ("b", ("cpu:0",)))
    ),
    {gpu: DeviceSettings(1) for gpu in DEVICES},
    queue_bound=1000,
    silence_s=10.0,
)


def text(identity: int, index: int) -> int:
    return identity * 1000 + index


def stops_at(identity: int) -> int | None:
    """Which output token of a request ends it by itself."""
    return identity % 5 + 1 if identity % 3 == 0 else None


@dataclass
class Worker:
    """A worker process: a lane core and a runner that knows the text beforehand."""

    id: str
    gpu: str
    partition: str = "none"
    core: LaneCore = field(init=False)
    opened: set[str] = field(default_factory=set)
    sequences: dict[int, tuple[int, int]] = field(default_factory=dict)  # -> identity, next output index
    flying: deque[tuple[StepPlan, StepDone]] = field(default_factory=deque)
    session: Session = field(default_factory=Session)
    frozen: bool = False

    def __post_init__(self) -> None:
        partition = make_partition(self.partition)
        self.core = LaneCore(BlockPool(4, 1000), AdaptiveBatching(), partition=partition)

    def next_to_land(self, any_of: int) -> StepDone:
        """A step that runs lands: each lane's steps in their order, lanes in any."""
        heads: dict[tuple[str, str], int] = {}
        for index, (plan, _) in enumerate(self.flying):
            heads.setdefault((plan.lane, plan.model if plan.lane == "decode" else ""), index)
        index = list(heads.values())[any_of % len(heads)]
        _, done = self.flying[index]
        del self.flying[index]
        return done

    def join(self) -> Join:
        return Join(PROTOCOL_VERSION, self.session.renew(), self.gpu, 1, "host")

    def run(self, plan: StepPlan) -> None:
        tokens, stopped = array("I"), bytearray()
        for work in plan.work:
            if work.sample:
                identity, index = self.sequences[work.sequence]
                self.sequences[work.sequence] = identity, index + 1
                tokens.append(text(identity, index))
                stopped.append(stops_at(identity) == index + 1)
        self.flying.append((plan, StepDone(plan.step, tokens.tobytes(), bytes(stopped), 0.01)))


class AnyOrder(RuleBasedStateMachine):
    partition = "none"

    @initialize()
    def begin(self) -> None:
        self.set_up()

    def set_up(self) -> None:
        self.now = 0.0
        self.central = CentralCore(SETTINGS)
        self.links: dict[tuple[str, str], deque[bytes]] = {}
        self.events: deque[CentralEvent] = deque()
        self.desk = Desk(lambda message: self.post("door", "central", message))
        self.deliveries: dict[int, Delivery] = {}
        self.workers: dict[str, Worker] = {}
        self.births = 0
        self.post("door", "central", Open(PROTOCOL_VERSION, 1, 1, "door", "http://x"))
        for gpu in DEVICES:
            self.born(gpu)
        self.settle()

    # The network -----------------------------------------------------------------------------------------------------

    def post(self, source: str, target: str, *messages: Message) -> None:
        self.links.setdefault((source, target), deque()).append(encode(messages))

    def carry(self, link: tuple[str, str]) -> None:
        source, target = link
        frame = self.links[link].popleft()
        if target == "central":
            for message in read_to_scheduler()(frame):
                self.decide(Received(source, message))
        elif target == "door":
            for answer in read_to_front_door()(frame):
                self.desk.receive(answer)
        elif (worker := self.workers.get(target)) is not None:
            for order in filter(worker.session.admits, read_to_worker()(frame)):
                self.obey(worker, order)

    def ready_links(self) -> list[tuple[str, str]]:
        return sorted(
            (source, target)
            for (source, target), frames in self.links.items()
            if frames and not (target in self.workers and self.workers[target].frozen)
        )

    def decide(self, event: CentralEvent) -> None:
        for command in self.central.handle(self.now, event):
            if isinstance(command, SendTo):
                self.post("central", command.peer, command.message)
            elif isinstance(command, Dismiss):
                assert "cannot" not in command.reason, f"a well-behaved peer was dismissed: {command.reason}"
        self.central.check()

    # Workers ---------------------------------------------------------------------------------------------------------

    def born(self, gpu: str) -> None:
        self.births += 1
        worker = Worker(f"w{self.births}", gpu, self.partition)
        self.workers[worker.id] = worker
        self.post(worker.id, "central", worker.join())

    def obey(self, worker: Worker, order: Message) -> None:
        match order:
            case Load(spec):
                if spec.name not in worker.opened:
                    worker.opened.add(spec.name)
                    self.lane(worker, ModelOpened(spec.name, 100 if spec.name == "a" else 270, 3, 8))
                self.post(worker.id, "central", ModelReady(spec.name, 500, 1, 1))
            case Start() | Cancel():
                self.lane(worker, order)
            case Rejoin(reason):
                self.lane(worker, Reset(reason))
                self.post(worker.id, "central", worker.join())

    def lane(self, worker: Worker, event: LaneEvent) -> None:
        for command in worker.core.handle(self.now, event):
            match command:
                case OpenSequence(sequence, _, tokens, prompt_tokens):
                    known = array("I", tokens)
                    assert known[prompt_tokens:].tolist() == [
                        text(known[0], index) for index in range(len(known) - prompt_tokens)
                    ], "resumed with another text than was delivered"
                    worker.sequences[sequence] = known[0], len(known) - prompt_tokens
                case CloseSequence(sequence):
                    del worker.sequences[sequence]
                case StepPlan():
                    worker.run(command)
                case Deliver(sink, messages):
                    self.post(worker.id, sink, *messages)
                case Report(message):
                    self.post(worker.id, "central", message)
        worker.core.check()

    # What may happen -------------------------------------------------------------------------------------------------

    @rule(model=st.sampled_from("ab"), prompt=st.integers(1, 30), max_tokens=st.integers(1, 30))
    def submit(self, model: str, prompt: int, max_tokens: int) -> None:
        identity = len(self.deliveries) + 1
        self.deliveries[identity] = self.desk.open(model, [identity] * prompt, Sampling(max_tokens))

    @precondition(lambda self: self.deliveries)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.deliveries[data.draw(st.sampled_from(sorted(self.deliveries)))].close()

    @precondition(lambda self: self.ready_links())
    @rule(data=st.data(), frames=st.integers(1, 4))
    def travel(self, data: st.DataObject, frames: int) -> None:
        link = data.draw(st.sampled_from(self.ready_links()))
        for _ in range(min(frames, len(self.links[link]))):
            self.carry(link)

    @rule()
    def tokens_are_slow(self) -> None:
        """Everything arrives but what workers have for the door: it may then be of an older epoch."""
        while links := [link for link in self.ready_links() if link[1] != "door" or link[0] == "central"]:
            for link in links:
                while self.links[link]:
                    self.carry(link)

    @precondition(lambda self: any(w.flying and not w.frozen for w in self.workers.values()))
    @rule(data=st.data(), steps=st.integers(1, 6))
    def land(self, data: st.DataObject, steps: int) -> None:
        busy = sorted(w.id for w in self.workers.values() if w.flying and not w.frozen)
        worker = self.workers[data.draw(st.sampled_from(busy))]
        any_of = data.draw(st.integers(0, 2))
        for _ in range(steps):
            if worker.flying:
                self.lane(worker, worker.next_to_land(any_of))

    @rule(data=st.data(), heard=st.booleans())
    def kill(self, data: st.DataObject, heard: bool) -> None:
        """SIGKILL: what it had not sent is lost, from some point on; the supervisor notices and starts another."""
        worker = self.workers.pop(data.draw(st.sampled_from(sorted(self.workers))))
        for target in ("central", "door"):
            if (frames := self.links.get((worker.id, target))) and not heard:
                for _ in range(data.draw(st.integers(0, len(frames)))):
                    frames.pop()
        self.links.pop(("central", worker.id), None)
        self.born(worker.gpu)
        self.decide(PeerGone(worker.id, "its process was ended by SIGKILL"))

    @rule(data=st.data())
    def freeze(self, data: st.DataObject) -> None:
        """SIGSTOP, or a machine that swaps: it is lost for the scheduler, and later goes on as if nothing happened."""
        worker = self.workers[data.draw(st.sampled_from(sorted(self.workers)))]
        worker.frozen = True

    @rule()
    def time_passes(self) -> None:
        for _ in range(4):
            self.now += 4.0
            for peer in ["door", *(w.id for w in self.workers.values() if not w.frozen)]:
                self.post(peer, "central", Heartbeat())
                while self.links[peer, "central"]:
                    self.carry((peer, "central"))
            self.decide(Tick())

    @rule()
    def thaw(self) -> None:
        for worker in self.workers.values():
            worker.frozen = False

    @rule()
    def settle(self) -> None:
        """Everything that is on its way arrives, until nothing moves."""
        for _ in range(100_000):
            links = self.ready_links()
            busy = [w for w in self.workers.values() if w.flying and not w.frozen]
            if not links and not busy:
                return
            for link in links:
                while self.links[link]:
                    self.carry(link)
            for worker in busy:
                if worker.flying:
                    self.lane(worker, worker.next_to_land(len(worker.flying)))
        raise AssertionError("it goes on for ever")

    def teardown(self) -> None:
        if not hasattr(self, "central"):
            return
        self.thaw()
        for _ in range(3):  # a thawed worker may first have to be found silent, then to join anew
            self.settle()
            self.time_passes()
        self.settle()
        for identity, delivery in self.deliveries.items():
            expected = [text(identity, index) for index in range(delivery.sampling.max_tokens)]
            got = delivery._tokens[delivery.prompt_tokens :].tolist()
            if delivery.state == "closed":
                assert got == expected[: len(got)]
                continue
            assert delivery.state == "finished", (identity, delivery.state, delivery._failure)
            stop = stops_at(identity)
            if stop is not None and stop <= len(expected):
                assert (got, delivery.finish_reason) == (expected[:stop], "stop")
            else:
                assert (got, delivery.finish_reason) == (expected, "length")
        assert self.central.live == 0
        assert self.desk.live == 0
        for worker in self.workers.values():
            assert worker.core.idle
            assert not worker.sequences


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.pytestmark = [pytest.mark.timeout(300)]  # shrinking a failure takes longer than finding it
TestAnyOrder.settings = settings(max_examples=effort(40, 120), stateful_step_count=50, deadline=None)


class AnyOrderInLanes(AnyOrder):
    """Each worker has lanes for decodes and for prefills, which land in any order."""

    @initialize(partition=st.sampled_from(["streams", "auto"]))
    def begin(self, partition: str) -> None:  # type: ignore[override]
        self.partition = partition
        self.set_up()


TestAnyOrderInLanes = AnyOrderInLanes.TestCase
TestAnyOrderInLanes.pytestmark = TestAnyOrder.pytestmark
TestAnyOrderInLanes.settings = settings(max_examples=25, stateful_step_count=50, deadline=None)

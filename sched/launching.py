"""Which step a device takes next: it fills the lanes with steps, some ahead of those that have landed.

Where the device is not partitioned it has one lane, and a step holds decodes and prefills of one model. Else each model
has a lane for its decodes, all models at once, and the device has one for prefills, whose next model the policy chooses
and whose next chunk the partition (partition.py) allows. A sequence is in flight in one lane at a time, so its first
decode comes after its last chunk has landed.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from forebay.sched.lane_events import LaneCommand, Report
from forebay.sched.partition import Chunk, Decoding, Partition
from forebay.sched.policy import Policy
from forebay.sched.residency import Residency
from forebay.sched.sequence import Lane, Sequence, prefills
from forebay.transport.messages import LaneKind, Started, StepDone, StepPlan, Work

STEPS_AHEAD = 2
"""Steps in flight in each lane: one that runs and one that is ready when it lands."""


class Flight(NamedTuple):
    plan: StepPlan
    sequences: list[Sequence]


@dataclass(frozen=True, slots=True)
class Prefills:
    """A model that has something to prefill, as the policy sees it: of its sequences only those matter that wait for
    their first token, or to come back."""

    lane: Lane
    oldest: int

    @property
    def launched(self) -> int:
        return self.lane.launched

    def due(self, now: float) -> float | None:
        return self.lane.due(now, filter(prefills, self.lane))


class Launching:
    """`emit` takes commands, in order."""

    def __init__(
        self,
        lanes: Mapping[str, Lane],
        residency: Residency,
        policy: Policy,
        partition: Partition,
        emit: Callable[[LaneCommand], None],
    ) -> None:
        self.partition = partition
        self.in_flight: dict[int, Flight] = {}
        self._lanes = lanes
        self._residency = residency
        self._policy = policy
        self._emit = emit
        self._steps = 0
        self._turns = 0
        self._decoded: dict[str, int] = {}
        self._now = 0.0
        self._admitted = False

    def landed(self, now: float, step: int, done: StepDone | None) -> Flight:
        """Takes a step out of its lane: it has landed, or failed (None)."""
        flight = self.in_flight.pop(step)
        for sequence in flight.sequences:
            sequence.in_flight -= 1
        plan = flight.plan
        self.partition.landed(now, plan, done)
        if done is not None:
            self._lanes[plan.model].pace.step(done.seconds, sum(work.count for work in plan.work))
        return flight

    def fill(self, now: float) -> None:
        """Launches all that can be launched."""
        self._now = now
        swap = self._residency.swap
        while True:
            busy = [
                lane for lane in self._lanes.values() if lane.present and (lane.running or lane.waiting or lane.going)
            ]
            if not self.partition.divides:
                if len(self.in_flight) >= STEPS_AHEAD:
                    return
                launched = any(self._mixed(lane) for lane in self._policy.choose(now, busy))
            else:
                launched = self._divided(busy)
            self._begin_copies()
            if launched:
                continue
            if self.in_flight or swap.in_flight or not self._residency.break_stall(busy):
                return
            self._begin_copies()

    def _begin_copies(self) -> None:
        swap = self._residency.swap
        for command in swap.commands:
            self._emit(command)
        swap.commands.clear()

    def begin(self, sequence: Sequence) -> None:
        """It is on the device, for the first time or again."""
        if not sequence.started:
            sequence.started = True
            self._residency.fairness.admits(sequence)
            self._emit(Report(Started(sequence.start.request, sequence.start.epoch)))

    # One lane for all ------------------------------------------------------------------------------------------------

    def _mixed(self, lane: Lane) -> bool:
        """Launches a step of this model if there is anything to compute: decodes first, so that a long prompt delays
        no running answer of its model by more than a chunk; then prefills and newcomers, oldest first."""
        for sequence in lane.running:
            sequence.held = None  # whoever needed its blocks may be gone; if not, it says so again
        step = _Step(lane.step_tokens)
        self._take(lane, step, "mixed", decodes=True)
        self._take(lane, step, "mixed", decodes=False)
        self._take_newcomers(lane, step, "mixed")
        return self._launch(lane, step, "mixed", 0)

    # A lane for each model's decodes, and one for prefills ------------------------------------------------------------

    def _divided(self, busy: list[Lane]) -> bool:
        """One step for each lane that has room; whether any was launched, or any sequence admitted, for which another
        lane may now launch one."""
        self._admitted = False
        self.partition.look(self._now, busy)
        launched = 0
        ahead = dict.fromkeys(self._lanes, 0)
        chunks = 0
        for flight in self.in_flight.values():
            if flight.plan.lane == "prefill":
                chunks += 1
            else:
                ahead[flight.plan.model] += 1
        # Who had a step longest ago is first, for what memory there is.
        for lane in sorted(busy, key=lambda lane: self._decoded.get(lane.model, 0)):
            if ahead[lane.model] < STEPS_AHEAD:
                launched += self._decode(lane)
        if chunks < STEPS_AHEAD:
            waiting = [Prefills(lane, min(s.arrival for s in lane if prefills(s))) for lane in busy if _waits(lane)]
            launched += any(self._prefill(one.lane, busy) for one in self._policy.choose(self._now, waiting))
        return launched > 0 or self._admitted

    def _decode(self, lane: Lane) -> bool:
        self._reset_holds(lane, decodes=True)
        step = _Step(lane.max_sequences)
        self._take(lane, step, "decode", decodes=True)
        while step.budget > 0 and (back := self._residency.admit(lane, spilled_only=True)) is not None:
            self._come(back)
            if back.state == "running" and back.pending == 1:
                self._add(lane, step, back, "decode")
        share = self.partition.decode_share()
        if (ride := self.partition.ride(lane)) > 0:
            self._reset_holds(lane, decodes=False)
            step.budget = ride
            self._take(lane, step, "decode", decodes=False)
            self._take_newcomers(lane, step, "decode")
        return self._launch(lane, step, "decode", share)

    def _prefill(self, lane: Lane, busy: list[Lane]) -> bool:
        chunk: Chunk | None = Chunk(lane.step_tokens, 0)
        decoding = [flight.plan.model for flight in self.in_flight.values() if flight.plan.lane == "decode"]
        if decoding:
            oldest = min(sequence for sequence in lane if prefills(sequence))
            chunk = self.partition.chunk(self._now, lane, oldest, self._decoding(busy, set(decoding)))
        if chunk is None:
            return False
        self._reset_holds(lane, decodes=False)
        step = _Step(min(chunk.tokens, lane.step_tokens))
        self._take(lane, step, "prefill", decodes=False)
        self._take_newcomers(lane, step, "prefill")
        return self._launch(lane, step, "prefill", chunk.share)

    @staticmethod
    def _decoding(busy: list[Lane], models: set[str]) -> Iterable[Decoding]:
        for lane in busy:
            if lane.model in models:
                running = [s for s in lane.running if s.lane == "decode" and s.in_flight and s.state == "running"]
                yield Decoding(
                    lane,
                    len(running),
                    sum(sequence.known for sequence in running),
                    tuple((sequence.began, sequence.stretch) for sequence in running),
                )

    @staticmethod
    def _reset_holds(lane: Lane, decodes: bool) -> None:
        """Whoever needed their blocks may be gone; if not, it says so again, now that it is planned."""
        for sequence in lane.running:
            holder = sequence.held
            if holder is not None and (holder.state != "running" or (holder.pending == 1) == decodes):
                sequence.held = None

    # Steps -----------------------------------------------------------------------------------------------------------

    def _take(self, lane: Lane, step: "_Step", kind: LaneKind, decodes: bool) -> None:
        """The decodes among those that run, or the prefills."""
        for sequence in list(lane.running):
            if step.budget == 0 or sequence.state != "running" or (sequence.pending == 1) != decodes:
                continue
            self._add(lane, step, sequence, kind)

    def _take_newcomers(self, lane: Lane, step: "_Step", kind: LaneKind) -> None:
        while step.budget > 0 and (newcomer := self._residency.admit(lane)) is not None:
            self._come(newcomer)
            if newcomer.state == "loading" or (kind == "prefill" and newcomer.pending == 1):
                continue
            taken = self._add(lane, step, newcomer, kind)
            assert taken, "a sequence is admitted with the blocks of its first steps"

    def _come(self, newcomer: Sequence) -> None:
        self._admitted = True
        newcomer.began = self._now
        if newcomer.state != "loading":
            self.begin(newcomer)

    def _add(self, lane: Lane, step: "_Step", sequence: Sequence, kind: LaneKind) -> bool:
        """This sequence's part of a step, if it has something to compute and memory to put it."""
        if sequence.exhausted or sequence.held or sequence.leaving:
            return False
        if sequence.in_flight and sequence.lane != kind:
            return False
        count = min(sequence.pending, step.budget)
        if not self._residency.grow(lane, sequence, sequence.computed + count):
            return False
        kept, start = sequence.placed, sequence.computed
        sequence.placed = len(sequence.blocks)
        sequence.computed += count
        sample = sequence.pending == 0
        if sample:
            if not sequence.stretch:
                sequence.began = self._now
            sequence.known += 1
            sequence.stretch += 1
            self._residency.fairness.draws(sequence)
        sequence.in_flight += 1
        sequence.lane = kind
        step.budget -= count
        step.work.append(Work(sequence.number, start, count, kept, tuple(sequence.blocks[kept:]), sample))
        step.sequences.append(sequence)
        return True

    def _launch(self, lane: Lane, step: "_Step", kind: LaneKind, share: int) -> bool:
        if not step.work:
            return False
        self._steps += 1
        if kind == "decode":
            self._decoded[lane.model] = self._steps
        else:
            self._turns += 1
            lane.launched = self._turns
        plan = StepPlan(self._steps, lane.model, tuple(step.work), kind, share)
        self.in_flight[plan.step] = Flight(plan, step.sequences)
        self.partition.launched(self._now, plan)
        self._emit(plan)
        return True


class _Step:
    """A step that is being put together."""

    __slots__ = ("budget", "sequences", "work")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.work: list[Work] = []
        self.sequences: list[Sequence] = []


def _waits(lane: Lane) -> bool:
    return bool(lane.waiting) or any(sequence.state == "running" and sequence.pending > 1 for sequence in lane.running)

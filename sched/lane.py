"""The lane core: what a worker's device does next. It runs in the worker, because a step cannot wait for a round trip.

It launches a step before the one ahead of it has landed: it counts tokens and never looks at one. That a sequence has
ended by itself it learns when the step lands, one step late; what that sequence had drawn meanwhile is dropped.

Who has memory is decided in residency.py, in what order in fairness.py, which model is next in policy.py, and what is
borrowed from and lent to other devices in neighbours.py.
"""

from typing import assert_never

from forebay.sched.blocks import BlockPool
from forebay.sched.fairness import Fairness, FirstComeFirstServed
from forebay.sched.lane_events import (
    Deliver,
    LaneCommand,
    LaneEvent,
    ModelOpened,
    Report,
    Reset,
    SlabsBack,
    SpillFreed,
    SpillGrew,
    SpillRevoked,
    Tick,
)
from forebay.sched.neighbours import Neighbours
from forebay.sched.policy import PATIENCE, Policy
from forebay.sched.residency import Residency
from forebay.sched.sequence import Lane, Sequence
from forebay.sched.spill import SpillSpace
from forebay.transport.messages import (
    BLOCK_TOKENS,
    Cancel,
    CloseSequence,
    CopyDone,
    CopyFailed,
    Ended,
    Finished,
    FinishReason,
    OpenSequence,
    Start,
    Started,
    StepDone,
    StepFailed,
    StepPlan,
    ToFrontDoor,
    Tokens,
    Work,
)

STEPS_AHEAD = 2
"""Steps in flight: one that runs and one that is ready when it lands."""

TOKEN_STOPS, TOKEN_INVALID = 1, 2
"""Values of `StepDone.stopped`."""


class LaneCore:
    """Several calls to `handle`, one after the other; the commands of each are to be carried out in order."""

    def __init__(
        self,
        pool: BlockPool,
        policy: Policy,
        prefix_cache: bool = True,
        fairness: Fairness | None = None,
        space: SpillSpace | None = None,
        lend: bool = False,
    ) -> None:
        """`space` is where preempted sequences go (none: they compute their tokens again), `lend` whether idle slabs of
        the pool are lent to others."""
        self._fairness = fairness or FirstComeFirstServed()
        space = space or SpillSpace(0, 0, pool.slab_bytes)
        self._residency = Residency(pool, policy.division, prefix_cache, self._fairness, space)
        self._neighbours = Neighbours(self._residency, lend)
        self.memory = self._residency.memory
        self.swap = self._residency.swap
        self._policy = policy
        self._lanes: dict[str, Lane] = {}
        self._by_request: dict[int, Sequence] = {}
        self._in_flight: dict[int, tuple[StepPlan, list[Sequence]]] = {}
        self._sequences = 0
        self._steps = 0
        self._commands: list[LaneCommand] = []
        self._outbox: dict[str, list[ToFrontDoor]] = {}
        self.wasted_slots = 0

    def handle(self, now: float, event: LaneEvent) -> list[LaneCommand]:
        match event:
            case StepDone():
                self._land(event)
            case Start():
                self._start(now, event)
            case Cancel(request, epoch):
                sequence = self._by_request.get(request)
                if sequence is not None and sequence.start.epoch == epoch:
                    self._end(sequence, "aborted")
            case ModelOpened(model, block_bytes, max_sequences, step_tokens, popularity):
                self._residency.add_model(model, block_bytes, popularity)
                self._lanes[model] = Lane(model, block_bytes, max_sequences, step_tokens)
            case StepFailed(step, reason):
                self._fail_step(step, reason)
            case CopyDone(copy) | CopyFailed(copy):
                self._copied(copy, isinstance(event, CopyDone))
            case SpillGrew(slots):
                self.swap.space.grow(slots)
            case SpillRevoked(slots, deadline_s):
                self.swap.space.revoke(slots, now + deadline_s)
            case SlabsBack(slabs):
                self._neighbours.back(slabs)
            case Tick():
                pass
            case Reset():
                for sequence in list(self._by_request.values()):
                    sequence.reported = True
                    self._end(sequence, "aborted")
            case _:
                assert_never(event)
        self.memory.adapt(now, self._lanes.values())
        self._make_room(now)
        self._launch(now)
        self._commands.extend(self._neighbours.decide(now, self._lanes.values()))
        self._commands.extend(Deliver(sink, tuple(messages)) for sink, messages in self._outbox.items())
        self._outbox.clear()
        commands, self._commands = self._commands, []
        return commands

    @property
    def idle(self) -> bool:
        return not self._by_request and not self._in_flight and not self.swap.in_flight

    @property
    def preemptions(self) -> int:
        """How often a sequence had to make room."""
        return self._residency.preemptions

    def check(self) -> None:
        """Asserts that every block in use belongs to one sequence, and that idle means empty."""
        copying = self.swap.copying
        flying = {id(s): s for _, sequences in self._in_flight.values() for s in sequences}
        flying |= {id(s): s for s in copying}
        self._residency.check(self._lanes.values(), (s for s in flying.values() if s.state == "ending"))
        self._neighbours.check()
        live = {id(s) for lane in self._lanes.values() for s in lane}
        assert live == {id(s) for s in self._by_request.values()}, "requests and sequences differ"
        for sequence in flying.values():
            count = sum(sequence in sequences for _, sequences in self._in_flight.values())
            assert sequence.in_flight == count + (sequence in copying), sequence

    # Requests ------------------------------------------------------------------------------------------------------

    def _start(self, now: float, start: Start) -> None:
        old = self._by_request.get(start.request)
        if old is not None:  # the same request under a newer epoch: whatever runs under the old one is nobody's
            old.reported = True
            self._end(old, "aborted")
        refusal = self._refusal(start)
        if refusal:
            self._post(start.sink, Finished(start.request, start.epoch, "failed", refusal))
            self._commands.append(Report(Ended(start.request, start.epoch, "failed", 0)))
            return
        self._sequences += 1
        lane = self._lanes[start.model]
        due = now + PATIENCE * lane.pace.alone_s(start.prompt_tokens, start.sampling)
        sequence = Sequence(self._sequences, self._sequences, start, due)
        self._by_request[start.request] = sequence
        self._fairness.arrives(sequence)
        lane.wait(sequence)
        self._commands.append(
            OpenSequence(sequence.number, start.model, start.tokens, start.prompt_tokens, start.sampling)
        )

    def _refusal(self, start: Start) -> str:
        """Why a request cannot run here, or nothing."""
        if start.model not in self._lanes:
            return f"model {start.model!r} is not loaded on this worker (loaded: {', '.join(self._lanes) or 'none'})"
        known = len(start.tokens) // 4
        if not 0 < start.prompt_tokens <= known or len(start.tokens) % 4:
            return f"the request has {len(start.tokens)} bytes of tokens and says {start.prompt_tokens} are its prompt"
        last = start.prompt_tokens + start.sampling.max_tokens
        if known >= last:
            return f"the request has no token left to make (max_tokens {start.sampling.max_tokens})"
        blocks, capacity = -(-last // BLOCK_TOKENS), self.memory.pool.capacity(start.model)
        if blocks > capacity:
            return f"the request needs {blocks} KV blocks of {start.model!r}, the whole pool holds {capacity}"
        return ""

    def _end(self, sequence: Sequence, reason: FinishReason, detail: str = "") -> None:
        """The one place where a sequence ends."""
        del self._by_request[sequence.start.request]
        self._lanes[sequence.model].remove(sequence)
        self._residency.forget(sequence)
        self._fairness.departs(sequence)
        sequence.move("end_in_flight" if sequence.in_flight else "end")
        if sequence.state == "ended":
            self._bury(sequence)
        if not sequence.reported:
            sequence.reported = True
            start = sequence.start
            made = start.prompt_tokens + sequence.delivered - sequence.came_with
            if reason in ("stop", "length"):
                self._lanes[sequence.model].pace.ended(sequence.delivered, start.sampling.max_tokens)
            self._post(start.sink, Finished(start.request, start.epoch, reason, detail, sequence.cached))
            self._commands.append(Report(Ended(start.request, start.epoch, reason, made, sequence.cached)))

    def _bury(self, sequence: Sequence) -> None:
        self._residency.bury(sequence)
        self._commands.append(CloseSequence(sequence.number, sequence.model))

    def _post(self, sink: str, message: ToFrontDoor) -> None:
        self._outbox.setdefault(sink, []).append(message)

    # Steps that land -----------------------------------------------------------------------------------------------

    def _land(self, done: StepDone) -> None:
        plan, sequences = self._in_flight.pop(done.step)
        self._lanes[plan.model].pace.step(done.seconds, sum(work.count for work in plan.work if work.count > 1))
        drawn = iter(zip(memoryview(done.tokens).cast("I"), done.stopped, strict=True))
        columns: dict[str, tuple[bytearray, bytearray, bytearray]] = {}
        ended: list[tuple[Sequence, FinishReason, str]] = []
        for work, sequence in zip(plan.work, sequences, strict=True):
            sequence.in_flight -= 1
            if sequence.state == "running":
                self.memory.landed(sequence, work.start + work.count)
            token, stopped = next(drawn) if work.sample else (0, 0)
            if sequence.state == "ending":
                self.wasted_slots += work.sample
                if not sequence.in_flight:
                    sequence.move("land")
                    self._bury(sequence)
            elif work.sample and stopped == TOKEN_INVALID:
                ended.append((sequence, "failed", f"model {plan.model!r} produced logits that are not finite"))
            elif work.sample:
                sequence.delivered += 1
                sequence.keys.append(token)
                start = sequence.start
                requests, epochs, tokens = columns.setdefault(start.sink, (bytearray(), bytearray(), bytearray()))
                requests += start.request.to_bytes(8, "little")
                epochs += start.epoch.to_bytes(4, "little")
                tokens += token.to_bytes(4, "little")
                if stopped == TOKEN_STOPS:
                    ended.append((sequence, "stop", ""))
                elif sequence.delivered == start.sampling.max_tokens:
                    ended.append((sequence, "length", ""))
        for sink, (requests, epochs, tokens) in columns.items():
            self._post(sink, Tokens(bytes(requests), bytes(epochs), bytes(tokens)))
        for sequence, reason, detail in ended:
            self._end(sequence, reason, detail)

    def _fail_step(self, step: int, reason: str) -> None:
        plan, sequences = self._in_flight.pop(step)
        for sequence in sequences:
            sequence.in_flight -= 1
            if sequence.state == "running":
                self._end(sequence, "failed", f"a step of model {plan.model!r} failed: {reason}")
            elif sequence.state == "ending" and not sequence.in_flight:
                sequence.move("land")
                self._bury(sequence)

    # Memory ----------------------------------------------------------------------------------------------------------

    def _make_room(self, now: float) -> None:
        """Lets sequences change places, and empties what was asked back."""
        for lane in self._lanes.values():
            self._residency.exchange(lane)
        if slots := self._residency.vacate(now, self._lanes.values()):
            self._commands.append(SpillFreed(slots))
        self._residency.clean(self._lanes.values())
        self._begin_copies()

    def _begin_copies(self) -> None:
        self._commands.extend(self.swap.commands)
        self.swap.commands.clear()

    def _copied(self, copy: int, whole: bool) -> None:
        sequence = self._residency.copied(self._lanes, copy, whole)
        if sequence is None:
            return
        if sequence.state == "ending":
            if not sequence.in_flight:
                sequence.move("land")
                self._bury(sequence)
        elif sequence.state == "running":
            self._begin(sequence)

    def _begin(self, sequence: Sequence) -> None:
        """It is on the device, for the first time or again."""
        if not sequence.started:
            sequence.started = True
            self._fairness.admits(sequence)
            self._commands.append(Report(Started(sequence.start.request, sequence.start.epoch)))

    # Steps that are launched -----------------------------------------------------------------------------------------

    def _launch(self, now: float) -> None:
        while len(self._in_flight) < STEPS_AHEAD:
            busy = [lane for lane in self._lanes.values() if lane.running or lane.waiting or lane.going]
            launched = any(self._launch_step(lane) for lane in self._policy.choose(now, busy))
            self._begin_copies()
            if launched:
                continue
            if self._in_flight or self.swap.in_flight or not self._residency.break_stall(busy):
                return
            self._begin_copies()

    def _launch_step(self, lane: Lane) -> bool:
        """Launches a step of this model if there is anything to compute: decodes first, so that a long prompt delays
        no running answer of its model by more than a chunk; then prefills and newcomers, oldest first."""
        work: list[Work] = []
        sequences: list[Sequence] = []
        budget = lane.step_tokens
        for sequence in lane.running:
            sequence.held = False  # whoever needed its blocks may be gone; if not, it says so again
        for decode in (True, False):
            for sequence in list(lane.running):
                if budget == 0 or sequence.state != "running" or (sequence.pending == 1) != decode:
                    continue
                if (share := self._share(lane, sequence, budget)) is not None:
                    budget -= share.count
                    work.append(share)
                    sequences.append(sequence)
        while budget > 0 and (newcomer := self._residency.admit(lane)) is not None:
            if newcomer.state == "loading":
                continue
            self._begin(newcomer)
            share = self._share(lane, newcomer, budget)
            assert share is not None, "a sequence is admitted with the blocks of its first steps"
            budget -= share.count
            work.append(share)
            sequences.append(newcomer)
        if not work:
            return False
        self._steps += 1
        lane.launched = self._steps
        plan = StepPlan(self._steps, lane.model, tuple(work))
        self._in_flight[plan.step] = (plan, sequences)
        self._commands.append(plan)
        return True

    def _share(self, lane: Lane, sequence: Sequence, budget: int) -> Work | None:
        """This sequence's part of a step, or None if it has nothing to compute or no memory to put it."""
        if sequence.exhausted or sequence.held or sequence.leaving:
            return None
        count = min(sequence.pending, budget)
        if not self._residency.grow(lane, sequence, sequence.computed + count):
            return None
        kept, start = sequence.placed, sequence.computed
        sequence.placed = len(sequence.blocks)
        sequence.computed += count
        sample = sequence.pending == 0
        if sample:
            sequence.known += 1
            sequence.stretch += 1
            self._fairness.draws(sequence)
        sequence.in_flight += 1
        return Work(sequence.number, start, count, kept, tuple(sequence.blocks[kept:]), sample)

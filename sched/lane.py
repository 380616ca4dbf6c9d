"""The lane core: what a worker's device does next. It runs in the worker, because a step cannot wait for a round trip.

It launches a step before the one ahead of it has landed: it counts tokens and never looks at one. That a sequence has
ended by itself it learns when the step lands, one step late; what that sequence had drawn meanwhile is dropped.

Which steps are launched is decided in launching.py, who has memory in residency.py, in what order in fairness.py, which
model is next in policy.py, how phases share the device in partition.py, whose weights are there in tenancy.py, and what
is borrowed from and lent to other devices in neighbours.py.
"""

from typing import assert_never

from forebay.sched.blocks import BlockPool
from forebay.sched.fairness import Fairness, FirstComeFirstServed
from forebay.sched.lane_events import (
    Deliver,
    DeviceMemory,
    LaneCommand,
    LaneEvent,
    ModelOpened,
    Report,
    Reset,
    SlabsBack,
    SlabsFilled,
    SpillFreed,
    SpillGrew,
    SpillRevoked,
    Tick,
)
from forebay.sched.lane_weights import LaneWeights
from forebay.sched.launching import Launching
from forebay.sched.neighbours import Neighbours
from forebay.sched.partition import Partition, Turns
from forebay.sched.policy import Policy
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
    StepDone,
    StepFailed,
    ToFrontDoor,
    Tokens,
    WeightsBack,
    WeightsFailed,
    WeightsGone,
)

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
        partition: Partition | None = None,
        weights_memory: int = 0,
        reserve: int = 0,
    ) -> None:
        """`space` is where preempted sequences go (none: they compute their tokens again), `lend` whether idle slabs of
        the pool are lent to others, `partition` how prefills and decodes share the device (none: in turns),
        `weights_memory` how many bytes of weights are there at once (0: all), `reserve` how many bytes of the device
        other processes are to find free (0: they are not looked after)."""
        self._fairness = fairness or FirstComeFirstServed()
        space = space or SpillSpace(0, 0, pool.slab_bytes)
        self._residency = Residency(pool, policy.division, prefix_cache, self._fairness, space)
        self._neighbours = Neighbours(self._residency, lend, reserve)
        self._weights = LaneWeights(weights_memory, self._residency)
        self.memory = self._residency.memory
        self.swap = self._residency.swap
        self._lanes: dict[str, Lane] = {}
        self._by_request: dict[int, Sequence] = {}
        self._sequences = 0
        self._commands: list[LaneCommand] = []
        self._outbox: dict[str, list[ToFrontDoor]] = {}
        self._launching = Launching(
            self._lanes,
            self._residency,
            policy,
            partition or Turns(),
            lambda command: self._commands.append(command),
        )
        self.wasted_slots = 0

    def handle(self, now: float, event: LaneEvent) -> list[LaneCommand]:
        match event:
            case StepDone():
                self._land(now, event)
            case Start():
                self._start(now, event)
            case Cancel(request, epoch):
                sequence = self._by_request.get(request)
                if sequence is not None and sequence.start.epoch == epoch:
                    self._end(sequence, "aborted")
            case ModelOpened(model, block_bytes, max_sequences, step_tokens, popularity, cost_name, weight_bytes):
                self._launching.partition.add_model(model, cost_name)
                self._residency.add_model(model, block_bytes, popularity)
                self._lanes[model] = Lane(model, block_bytes, max_sequences, step_tokens)
                self._weights.open(self._lanes[model], weight_bytes, popularity)
            case StepFailed(step, reason):
                self._fail_step(now, step, reason)
            case CopyDone(copy) | CopyFailed(copy):
                self._copied(now, copy, isinstance(event, CopyDone))
            case SpillGrew(slots):
                self.swap.space.grow(slots)
            case SpillRevoked(slots, deadline_s):
                self.swap.space.revoke(slots, now + deadline_s)
            case SlabsBack(slabs):
                self._neighbours.back(slabs)
            case WeightsGone() | WeightsBack() | WeightsFailed():
                self._commands.extend(self._weights.answered(now, event))
            case DeviceMemory(free):
                largest = max((lane.block_bytes for lane in self._lanes.values()), default=0)
                self._commands.extend(self._neighbours.device_memory(now, free, largest))
            case SlabsFilled(count):
                self._commands.extend(self._neighbours.filled(count))
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
        self._move_weights(now)
        self._launching.fill(now)
        self._commands.extend(self._neighbours.decide(now, self._lanes.values()))
        self._commands.extend(Deliver(sink, tuple(messages)) for sink, messages in self._outbox.items())
        self._outbox.clear()
        commands, self._commands = self._commands, []
        return commands

    @property
    def idle(self) -> bool:
        return not self._by_request and not self._launching.in_flight and not self.swap.in_flight

    @property
    def preemptions(self) -> int:
        """How often a sequence had to make room."""
        return self._residency.preemptions

    def check(self) -> None:
        """Asserts that every block in use belongs to one sequence, and that idle means empty."""
        copying = self.swap.copying
        flights = self._launching.in_flight.values()
        flying = {id(s): s for flight in flights for s in flight.sequences}
        flying |= {id(s): s for s in copying}
        self._residency.check(self._lanes.values(), (s for s in flying.values() if s.state == "ending"))
        self._neighbours.check()
        self._weights.check(self._lanes, self._flying)
        live = {id(s) for lane in self._lanes.values() for s in lane}
        assert live == {id(s) for s in self._by_request.values()}, "requests and sequences differ"
        for sequence in flying.values():
            lanes = [flight.plan.lane for flight in flights if sequence in flight.sequences]
            assert sequence.in_flight == len(lanes) + (sequence in copying), sequence
            assert all(lane == sequence.lane for lane in lanes), f"in two lanes at once: {sequence}"

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
        sequence = Sequence(self._sequences, self._sequences, start, came=now)
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
            self._post(start.sink, Finished(start.request, start.epoch, reason, detail, sequence.cached))
            self._commands.append(Report(Ended(start.request, start.epoch, reason, made, sequence.cached)))

    def _bury(self, sequence: Sequence) -> None:
        self._residency.bury(sequence)
        self._commands.append(CloseSequence(sequence.number, sequence.model))

    def _post(self, sink: str, message: ToFrontDoor) -> None:
        self._outbox.setdefault(sink, []).append(message)

    # Steps that land -----------------------------------------------------------------------------------------------

    def _land(self, now: float, done: StepDone) -> None:
        plan, sequences = self._launching.landed(now, done.step, done)
        drawn = iter(zip(memoryview(done.tokens).cast("I"), done.stopped, strict=True))
        columns: dict[str, tuple[bytearray, bytearray, bytearray]] = {}
        ended: list[tuple[Sequence, FinishReason, str]] = []
        for work, sequence in zip(plan.work, sequences, strict=True):
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

    def _fail_step(self, now: float, step: int, reason: str) -> None:
        plan, sequences = self._launching.landed(now, step, None)
        for sequence in sequences:
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
        self._commands.extend(self.swap.commands)
        self.swap.commands.clear()

    def _move_weights(self, now: float) -> None:
        """Lets models come and go, where not all fit."""
        commands, given_up = self._weights.decide(now, self._lanes, self._flying)
        self._commands.extend(self.swap.commands)  # of those that were put aside
        self.swap.commands.clear()
        self._commands.extend(commands)
        for model, reason in given_up:
            for sequence in list(self._lanes[model]):
                self._end(sequence, "failed", f"the weights of model {model!r} cannot be loaded: {reason}")

    @property
    def _flying(self) -> set[str]:
        """Models with steps in flight."""
        return {flight.plan.model for flight in self._launching.in_flight.values()}

    def _copied(self, now: float, copy: int, whole: bool) -> None:
        sequence = self._residency.copied(self._lanes, copy, whole)
        if sequence is None:
            return
        if sequence.state == "ending":
            if not sequence.in_flight:
                sequence.move("land")
                self._bury(sequence)
        elif sequence.state == "running":
            sequence.began = now
            self._launching.begin(sequence)

"""The lane core: what a worker's device does next. It runs in the worker, because a step cannot wait for a round trip.

It launches a step before the one ahead of it has landed: it counts tokens and never looks at one. That a sequence has
ended by itself it learns when the step lands, one step late; what that sequence had drawn meanwhile is dropped.

Memory: a sequence is admitted with blocks for all its known tokens and grows block by block. An older sequence that
finds no block takes those of the youngest one of its model, which waits and later computes again what is not cached.
"""

from typing import assert_never

from forebay.sched.blocks import BlockPool
from forebay.sched.lane_events import Deliver, LaneCommand, LaneEvent, ModelOpened, Report, Reset
from forebay.sched.memory import LaneMemory
from forebay.sched.policy import PATIENCE, Policy
from forebay.sched.sequence import Lane, Sequence
from forebay.transport.messages import (
    BLOCK_TOKENS,
    Cancel,
    CloseSequence,
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

    def __init__(self, pool: BlockPool, policy: Policy, prefix_cache: bool = True) -> None:
        self.memory = LaneMemory(pool, policy.division, prefix_cache)
        self._policy = policy
        self._lanes: dict[str, Lane] = {}
        self._by_request: dict[int, Sequence] = {}
        self._in_flight: dict[int, tuple[StepPlan, list[Sequence]]] = {}
        self._sequences = 0
        self._steps = 0
        self._starved: Sequence | None = None
        self._commands: list[LaneCommand] = []
        self._outbox: dict[str, list[ToFrontDoor]] = {}
        self.preemptions = 0
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
                self.memory.add_model(model, block_bytes, popularity)
                self._lanes[model] = Lane(model, block_bytes, max_sequences, step_tokens)
            case StepFailed(step, reason):
                self._fail_step(step, reason)
            case Reset():
                for sequence in list(self._by_request.values()):
                    sequence.reported = True
                    self._end(sequence, "aborted")
            case _:
                assert_never(event)
        self.memory.adapt(now, self._lanes.values())
        self._launch(now)
        self._commands.extend(Deliver(sink, tuple(messages)) for sink, messages in self._outbox.items())
        self._outbox.clear()
        commands, self._commands = self._commands, []
        return commands

    @property
    def idle(self) -> bool:
        return not self._by_request and not self._in_flight

    def check(self) -> None:
        """Asserts that every block in use belongs to one sequence, and that idle means empty."""
        self.memory.check()
        flying = {id(s): s for _, sequences in self._in_flight.values() for s in sequences}
        for lane in self._lanes.values():
            assert all(s.state == "waiting" and not s.blocks for s in lane.waiting), lane.model
            assert all(s.state == "running" for s in lane.running), lane.model
            assert len(lane.running) <= lane.max_sequences, lane.model
            ending = [s for s in flying.values() if s.model == lane.model and s.state == "ending"]
            held = [block for s in [*lane.running, *ending] for block in s.blocks]
            assert len(set(held)) == self.memory.pool.used(lane.model), f"{lane.model}: blocks leaked"
        live = {id(s) for lane in self._lanes.values() for s in lane}
        assert live == {id(s) for s in self._by_request.values()}, "requests and sequences differ"
        for sequence in flying.values():
            count = sum(sequence in sequences for _, sequences in self._in_flight.values())
            assert sequence.in_flight == count, sequence

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
        lane = self._lanes[sequence.model]
        del self._by_request[sequence.start.request]
        (lane.waiting if sequence.state == "waiting" else lane.running).remove(sequence)
        if self._starved is sequence:
            self._starved = None
        sequence.move("end_in_flight" if sequence.in_flight and sequence.state == "running" else "end")
        if sequence.state == "ended":
            self._bury(sequence)
        if not sequence.reported:
            sequence.reported = True
            start = sequence.start
            made = start.prompt_tokens + sequence.delivered - sequence.came_with
            if reason in ("stop", "length"):
                lane.pace.ended(sequence.delivered, start.sampling.max_tokens)
            self._post(start.sink, Finished(start.request, start.epoch, reason, detail, sequence.cached))
            self._commands.append(Report(Ended(start.request, start.epoch, reason, made, sequence.cached)))

    def _bury(self, sequence: Sequence) -> None:
        self.memory.release(sequence)
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

    # Steps that are launched -----------------------------------------------------------------------------------------

    def _launch(self, now: float) -> None:
        while len(self._in_flight) < STEPS_AHEAD:
            busy = [lane for lane in self._lanes.values() if lane.running or lane.waiting]
            if any(self._launch_step(lane) for lane in self._policy.choose(now, busy)):
                continue
            if self._in_flight or not self._break_stall(busy):
                return

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
        while budget > 0 and (newcomer := self._admit(lane)) is not None:
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
        if sequence.exhausted or sequence.held:
            return None
        count = min(sequence.pending, budget)
        if not self._grow(lane, sequence, sequence.computed + count):
            return None
        kept, start = sequence.placed, sequence.computed
        sequence.placed = len(sequence.blocks)
        sequence.computed += count
        sample = sequence.pending == 0
        if sample:
            sequence.known += 1
        sequence.in_flight += 1
        return Work(sequence.number, start, count, kept, tuple(sequence.blocks[kept:]), sample)

    def _grow(self, lane: Lane, sequence: Sequence, tokens: int) -> bool:
        """Blocks for that many tokens, at the cost of younger sequences of the model if need be."""
        while not self.memory.grow(sequence, tokens, alone=len(lane.running) == 1):
            victim = lane.running[-1]
            if victim is sequence:
                return False
            if victim.in_flight:  # its blocks are in use until that step lands
                victim.held = True
                return False
            self._preempt(lane, victim)
        return True

    def _preempt(self, lane: Lane, victim: Sequence) -> None:
        victim.move("preempt")
        lane.running.remove(victim)
        self.memory.release(victim)
        lane.wait(victim)
        self.preemptions += 1

    def _admit(self, lane: Lane) -> Sequence | None:
        """The oldest waiting sequence, now running and with blocks for all that is known of it, if there is room.

        While one waits for memory that others hold, no younger one of any model is admitted: else a stream of small
        requests would keep a large one waiting for ever. One that waits for its own model's quota delays only that."""
        if not lane.waiting or len(lane.running) >= lane.max_sequences:
            return None
        sequence = lane.waiting[0]
        if self._starved is not None and self._starved.arrival < sequence.arrival:
            return None
        if any(other.held for other in lane.running):
            return None
        if not self.memory.admit(sequence, alone=not lane.running):
            if self.memory.within_quota(sequence):
                self._starved = sequence
            return None
        if self._starved is sequence:
            self._starved = None
        del lane.waiting[0]
        sequence.move("admit")
        lane.run(sequence)
        if not sequence.started:
            sequence.started = True
            self._commands.append(Report(Started(sequence.start.request, sequence.start.epoch)))
        return sequence

    def _break_stall(self, busy: list[Lane]) -> bool:
        """Nothing is in flight and nothing can be launched: every lane lacks blocks that other lanes hold. Whoever
        came last gives way, until the oldest can go on; alone it fits, because longer requests are refused."""
        running = sorted(sequence for lane in busy for sequence in lane.running)
        oldest = min((sequence for lane in busy for sequence in lane), default=None)
        victims = [sequence for sequence in running if sequence is not oldest]
        if not victims:
            return False
        self._preempt(self._lanes[victims[-1].model], victims[-1])
        return True

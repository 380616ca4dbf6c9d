"""Which sequences of a device have memory: who is admitted, who makes room, what is written to the spill arena and what
comes back from it. The order is the fairness policy's; steps are the lane core's.

A sequence is admitted with blocks for all its known tokens and grows block by block. Who makes room is spilled, or,
where there is nowhere to spill to, computes its tokens again later. Blocks of a copy stay in use at both ends until it
lands.
"""

from collections.abc import Iterable
from heapq import nsmallest

from forebay.sched.blocks import BlockPool
from forebay.sched.fairness import Fairness, slice_tokens
from forebay.sched.memory import LaneMemory
from forebay.sched.policy import Division
from forebay.sched.sequence import Lane, Sequence
from forebay.sched.spill import SpillSpace
from forebay.sched.swap import CLEAN_BELOW, MOVES_AT_ONCE, Swap

EXCHANGED_AT_ONCE = 8
"""Sequences of a model that are exchanged for others at one time, at most half of those that run: the other half
computes while blocks are copied."""


class Residency:
    def __init__(
        self, pool: BlockPool, division: Division, prefix_cache: bool, fairness: Fairness, space: SpillSpace
    ) -> None:
        self.memory = LaneMemory(pool, division, prefix_cache)
        self.fairness = fairness
        self.swap = Swap(self.memory, space)
        self.preemptions = 0
        self.short = False
        """Some sequence was found to lack memory since this was last asked and unset."""
        self._starved: Sequence | None = None

    def add_model(self, model: str, block_bytes: int, popularity: float) -> None:
        self.memory.add_model(model, block_bytes, popularity)
        self.swap.space.add_model(model, block_bytes)

    # Who comes -------------------------------------------------------------------------------------------------------

    def admit(self, lane: Lane, spilled_only: bool = False) -> Sequence | None:
        """The waiting or spilled sequence that is next, now running or being loaded, with blocks for all that is known
        of it, if there is room.

        While one waits for memory that others hold, none of any model that ranks behind it is admitted: else a stream
        of small requests would keep a large one waiting for ever. One that waits for its own model's quota delays only
        that. With `spilled_only` it is admitted only if it was here before and its blocks are in the arena."""
        if spilled_only:
            if not self.swap.space.capacity or not lane.waiting:
                return None
        else:
            lane.blocked = ""
        if not lane.admits:
            return None
        candidates = [sequence for sequence in lane.waiting if not sequence.in_flight]
        if not candidates:
            return None
        if spilled_only and min(candidates, key=self.fairness.rank).state != "spilled":
            return None
        if len(lane.running) >= lane.max_sequences:
            lane.blocked = "slots"
            return None
        sequence = min(candidates, key=self.fairness.rank)
        if self._starved not in (None, sequence) and self.fairness.rank(self._starved) < self.fairness.rank(sequence):
            return None
        if any(other.held for other in lane.running):
            return None
        if not self.swap.load(sequence, alone=not lane.running):
            if self.memory.within_quota(sequence, sequence.known + 1):
                self._starved = sequence
                self.short = True
            self.short |= not lane.running  # alone it may exceed its quota
            lane.blocked = "memory"
            return None
        if self._starved is sequence:
            self._starved = None
        lane.waiting.remove(sequence)
        lane.run(sequence)
        sequence.stretch = 0
        return sequence

    def forget(self, sequence: Sequence) -> None:
        """It has ended: nobody waits for it."""
        if self._starved is sequence:
            self._starved = None

    def bury(self, sequence: Sequence) -> None:
        """Nothing in flight uses its blocks any more."""
        self.memory.release(sequence)
        self.swap.drop_away(sequence)

    # Who goes --------------------------------------------------------------------------------------------------------

    def grow(self, lane: Lane, sequence: Sequence, tokens: int) -> bool:
        """Blocks for that many tokens, at the cost of the sequence of its model that ranks last, if need be."""
        while not self.memory.grow(sequence, tokens, alone=(alone := len(lane.running) == 1)):
            self.short |= alone or self.memory.within_quota(sequence, tokens)
            if lane.going or any(other.leaving for other in lane.running):
                return False  # blocks are on their way
            victim = max(lane.running, key=self.fairness.rank)
            if victim is sequence:
                return False
            if victim.in_flight:  # its blocks are in use until that step, or copy, lands
                victim.held = sequence
                return False
            self._preempt(lane, victim)
        return True

    def exchange(self, lane: Lane) -> None:
        """Lets sequences that have had their slice make room for those that have had less."""
        self._send_off(lane)
        blocked, lane.blocked = lane.blocked, ""
        if not lane.waiting:
            for sequence in lane.running:
                sequence.leaving = False
        if not lane.waiting or not blocked:
            return
        leaving = [sequence for sequence in lane.running if sequence.leaving]
        room = min(EXCHANGED_AT_ONCE, max(1, len(lane.running) // 2)) - len(leaving) - len(lane.going)
        slots = lane.max_sequences - len(lane.running) + len(leaving)
        coming = sum(len(sequence.blocks) for sequence in (*leaving, *lane.going))
        runners = [s for s in lane.running if s.state == "running" and not s.leaving and not s.exhausted]
        runners.sort(key=self.fairness.rank, reverse=True)
        waiting = (sequence for sequence in lane.waiting if not sequence.in_flight)
        for candidate in nsmallest(EXCHANGED_AT_ONCE, waiting, key=self.fairness.rank):
            need = candidate.blocks_for(candidate.known + 1) if blocked == "memory" else 0
            while slots < 1 or coming < need:
                victim = next((runner for runner in runners if self._gives_way(runner, candidate)), None)
                if victim is None or room < 1:
                    return self._send_off(lane)
                runners.remove(victim)
                victim.leaving = True
                room -= 1
                slots += 1
                coming += len(victim.blocks)
            slots -= 1
            coming -= need
        self._send_off(lane)

    def _gives_way(self, runner: Sequence, candidate: Sequence) -> bool:
        spills = self.swap.space.capacity > 0
        return self.fairness.gives_way(runner, candidate, slice_tokens(runner, spills))

    def put_aside(self, lane: Lane, but: Sequence | None) -> None:
        """All that runs but one makes room, because the model's weights are to leave; what is in flight does when it
        lands."""
        for sequence in lane.running:
            sequence.leaving = sequence is not but
        self._send_off(lane)

    def _send_off(self, lane: Lane) -> None:
        for sequence in [s for s in lane.running if s.leaving and not s.in_flight]:
            self._preempt(lane, sequence)

    def _preempt(self, lane: Lane, victim: Sequence) -> None:
        lane.running.remove(victim)
        victim.held = None
        victim.leaving = False
        self.preemptions += 1
        if not self.swap.spill(victim):
            victim.move("preempt")
            self.memory.release(victim)
        if victim.state == "spilling":
            lane.going.append(victim)
        else:
            lane.wait(victim)

    def break_stall(self, busy: list[Lane]) -> bool:
        """Nothing is in flight and nothing can be launched: every lane lacks blocks that other lanes hold. Whoever
        ranks last makes room, until the first can go on; alone it fits, because longer requests are refused."""
        first = min((sequence for lane in busy for sequence in lane), key=self.fairness.rank, default=None)
        victims = [(lane, sequence) for lane in busy for sequence in lane.running if sequence is not first]
        if not victims:
            return False
        self._preempt(*max(victims, key=lambda victim: self.fairness.rank(victim[1])))
        return True

    # Copies that land, slots that are asked back ---------------------------------------------------------------------

    def copied(self, lanes: dict[str, Lane], number: int, whole: bool) -> Sequence | None:
        """A copy has landed, or failed (not `whole`): then its sequence computes its tokens again. Gives the sequence
        that it was for, unless it was for the prefix cache."""
        copy = self.swap.take(number)
        sequence, command = copy.sequence, copy.command
        if not whole and command.kind != "out":
            self.swap.distrust(copy)
        if sequence is None:
            self.swap.cleaned(copy, whole)
            return None
        lane = lanes[sequence.model]
        sequence.in_flight -= 1
        if sequence.state == "ending":
            if command.kind == "move":
                self.swap.space.release(command.model, command.target)
            return sequence
        if command.kind == "move":
            self.swap.moved(copy, whole)
            if not whole:
                self._drop(sequence)
        elif not whole:
            lane.remove(sequence)
            sequence.move("fail")
            self.bury(sequence)
            lane.wait(sequence)
        elif command.kind == "out":
            lane.remove(sequence)
            self.swap.spilled(copy)
            lane.wait(sequence)
        else:
            self.swap.loaded(copy)
        return sequence

    def vacate(self, now: float, lanes: Iterable[Lane]) -> tuple[int, ...]:
        """Moves what lies in slots that were asked back, a few sequences at a time, and drops what cannot be moved in
        time. Gives the slots that are empty now."""
        space = self.swap.space
        if space.deadline is None:
            return ()
        for lane in lanes:
            for sequence in lane.waiting:
                if sequence.state != "spilled" or sequence.in_flight or not self.swap.leaves(sequence):
                    continue
                late = self.swap.overdue(sequence, now)
                if late or (self.swap.moving < MOVES_AT_ONCE and not self.swap.move(sequence)):
                    self._drop(sequence)
        return space.freed()

    def _drop(self, sequence: Sequence) -> None:
        sequence.move("drop")
        self.swap.drop_away(sequence)

    def clean(self, lanes: Iterable[Lane]) -> None:
        """Keeps what the prefix cache is about to lose."""
        space, prefix_cache = self.swap.space, self.memory.prefix_cache
        if not prefix_cache or not space.capacity or self.swap.cleaning or not self.memory.pool.scarce(CLEAN_BELOW):
            return
        for lane in lanes:
            if self.swap.clean(lane.model):
                return

    def check(self, lanes: Iterable[Lane], ending: Iterable[Sequence]) -> None:
        """`ending`: sequences that have ended and that something in flight still uses."""
        self.memory.check()
        self.fairness.check()
        pool, ending = self.memory.pool, list({id(sequence): sequence for sequence in ending}.values())
        for lane in lanes:
            name = lane.model
            assert all(s.state in ("waiting", "spilled") and not s.blocks for s in lane.waiting), name
            assert all(s.state in ("running", "loading") for s in lane.running), name
            assert all(s.state == "spilling" for s in lane.going), name
            assert len(lane.running) <= lane.max_sequences, name
            last = [sequence for sequence in ending if sequence.model == name]
            held = {block for s in [*lane.running, *lane.going, *last] for block in s.blocks}
            assert len(held | self.swap.pinned(name)) == pool.used(name), f"{name}: blocks leaked"
            if self.swap.space.slots:
                self.swap.check(name, [*lane, *last])
            for sequence in lane:
                away = sequence.state in ("spilling", "spilled", "loading")
                assert away or not (sequence.away or sequence.saved), sequence

"""Copies between the pool and the spill arena: what is on its way, and which blocks each copy holds at both ends.

Content is found by its key, in the pool and in the arena alike. So a block is written once: a copy that came back stays
in the arena until its room is needed, a block that others use is not copied at all (its text finds it again), and a
request that begins with a text of which the pool has forgotten the keys and values gets them from the arena.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from forebay.sched.memory import LaneMemory
from forebay.sched.sequence import Sequence
from forebay.sched.spill import SpillSpace
from forebay.transport.messages import BLOCK_TOKENS, CopyBlocks

CLEANED_AT_ONCE = 16
"""Blocks of the prefix cache that one copy writes to the arena ahead of their eviction."""

CLEAN_BELOW = 0.125
"""Part of the pool that is free below which cached blocks are written to the arena: they will be evicted soon."""

MOVES_AT_ONCE = 2
"""Sequences that are moved out of slots asked back at one time. Those whose turn has not come by the deadline are
dropped; what a copy still reads cannot be."""


@dataclass(slots=True, eq=False)
class Copy:
    """One copy on its way. `sequence` is whose blocks it copies, None for blocks of the prefix cache. `keys` of the
    blocks that it copies (None: has none), `places` where they stand in the sequence, `pinned` see BlockPool.pin."""

    command: CopyBlocks
    sequence: Sequence | None
    keys: tuple[bytes | None, ...]
    places: tuple[int, ...] = ()
    pinned: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class Missing:
    """What has to be copied for one sequence: block numbers at the source, their keys and places."""

    source: list[int] = field(default_factory=list)
    keys: list[bytes | None] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    def add(self, source: int, key: bytes | None, place: int) -> None:
        self.source.append(source)
        self.keys.append(key)
        self.places.append(place)


class Swap:
    """Copies of one device. Methods that begin a copy append it to `commands`."""

    def __init__(self, memory: LaneMemory, space: SpillSpace) -> None:
        self.memory = memory
        self.space = space
        self.commands: list[CopyBlocks] = []
        self.spills = 0
        self.loads = 0
        self.moves = 0
        self._copies: dict[int, Copy] = {}
        self._number = 0
        self._written: dict[str, dict[int, bytes]] = {}

    @property
    def in_flight(self) -> int:
        return len(self._copies)

    @property
    def copying(self) -> list[Sequence]:
        """Sequences for which a copy is on its way."""
        return [copy.sequence for copy in self._copies.values() if copy.sequence is not None]

    def take(self, number: int) -> Copy:
        """A copy that has landed, or failed."""
        return self._copies.pop(number)

    # Out of the pool -------------------------------------------------------------------------------------------------

    def spill(self, sequence: Sequence) -> bool:
        """Begins to write what is computed of a sequence to the arena, or only notes where it is already; its state
        becomes `spilling` or `spilled`. False: there is no room (or nothing to keep), and nothing was changed."""
        model, pool = sequence.model, self.memory.pool
        kept = -(-sequence.landed // BLOCK_TOKENS)
        if not kept or not self.space.slots:
            return False
        keys = self._keys(sequence, sequence.landed // BLOCK_TOKENS)
        away: list[int | None] = []
        missing = Missing()
        for place, block in enumerate(sequence.blocks[:kept]):
            key = keys[place] if place < len(keys) else None
            there = self.space.take(model, key) if key is not None else None
            away.append(there)
            if there is None and (key is None or place >= sequence.published or pool.users(model, block) == 1):
                missing.add(block, key, place)
        target = self.space.allocate(model, len(missing.source))
        if target is None:
            self._release(model, away)
            return False
        for place, block in zip(missing.places, target, strict=True):
            away[place] = block
        sequence.away, sequence.saved = away, sequence.landed
        self.spills += 1
        sequence.move("spill")
        pool.release(model, sequence.blocks[kept:])
        del sequence.blocks[kept:]
        if missing.source:
            self._begin(sequence, model, "out", missing, target)
        else:
            self._rest(sequence)
        return True

    def spilled(self, copy: Copy) -> None:
        """The copy out has landed: the sequence rests in the arena, its blocks in the pool are others'."""
        assert copy.sequence is not None
        self._publish(copy)
        self._rest(copy.sequence)

    def _rest(self, sequence: Sequence) -> None:
        self.memory.release(sequence)
        sequence.move("copied")

    def clean(self, model: str) -> bool:
        """Begins to write the blocks of the prefix cache that will be evicted next to the arena, as far as they are not
        there. False: there is none, or no room."""
        pool = self.memory.pool
        written = self._written.setdefault(model, {})
        keys: list[bytes] = []
        for block, key in pool.next_evictions(model, CLEANED_AT_ONCE):
            # Once only: where the arena is too small for all, the blocks of two models would take turns for ever.
            if written.get(block) != key and not self.space.holds(model, key):
                keys.append(key)
            written[block] = key
        if not keys or (target := self.space.allocate(model, len(keys))) is None:
            return False
        pinned = tuple(pool.pin(model, key) for key in keys)
        missing = Missing([block for block, _ in pinned], [*keys], [0] * len(keys))
        self._begin(None, model, "out", missing, target).pinned = pinned
        return True

    def cleaned(self, copy: Copy, whole: bool) -> None:
        """The copy of cached blocks has landed, or failed (not `whole`)."""
        if whole:
            self._publish(copy)
        self.memory.pool.unpin(copy.command.model, copy.pinned)
        self.space.release(copy.command.model, copy.command.target)

    @property
    def cleaning(self) -> bool:
        return any(copy.sequence is None for copy in self._copies.values())

    # Into the pool ---------------------------------------------------------------------------------------------------

    def load(self, sequence: Sequence, alone: bool) -> bool:
        """Blocks for all that is known of a waiting or spilled sequence and for the token after it, as many as possible
        with content: found in the pool, or to be copied from the arena. Its state becomes `running`, or `loading` while
        a copy is on its way. False: there is no memory, and nothing was changed."""
        if not self.memory.admit(sequence, alone):
            return False
        missing = self._content(sequence, sequence.computed // BLOCK_TOKENS)
        if not missing.source:
            sequence.move("admit")
            self.drop_away(sequence)
            return True
        self.loads += 1
        sequence.move("load")
        target = tuple(sequence.blocks[place] for place in missing.places)
        self._begin(sequence, sequence.model, "in", missing, target)
        return True

    def _content(self, sequence: Sequence, found: int) -> Missing:
        """What the arena has of a sequence after its first `found` blocks, up to the first block that is nowhere;
        `saved` says up to which token that is."""
        model, away = sequence.model, sequence.away
        # The last known token is always computed, for the next one is drawn from it.
        keys = self._keys(sequence, (sequence.known - 1) // BLOCK_TOKENS)
        missing = Missing()
        saved = found * BLOCK_TOKENS
        for place in range(found, max(len(keys), len(away))):
            key = keys[place] if place < len(keys) else None
            there = away[place] if place < len(away) else None
            whole = there is not None and sequence.saved >= (place + 1) * BLOCK_TOKENS
            if not whole and key is not None and (better := self.space.take(model, key)) is not None:
                if there is not None:
                    self.space.release(model, [there])
                away.extend([None] * (place + 1 - len(away)))
                away[place] = there = better
                whole = True
            if there is None:
                break
            missing.add(there, key if whole else None, place)
            saved = (place + 1) * BLOCK_TOKENS if whole else sequence.saved
            if not whole:
                break
        sequence.saved = saved
        return missing

    def loaded(self, copy: Copy) -> None:
        """The copy in has landed: what was saved counts as computed."""
        sequence = copy.sequence
        assert sequence is not None
        sequence.computed = sequence.saved
        self.memory.landed(sequence, sequence.saved)
        if not sequence.started:
            sequence.cached = sequence.computed
        self.drop_away(sequence)
        sequence.move("copied")

    # Within the arena ------------------------------------------------------------------------------------------------

    def leaves(self, sequence: Sequence) -> bool:
        """Whether some block of a spilled sequence lies in a slot that was asked back."""
        return any(block is not None and self.space.leaves(sequence.model, block) for block in sequence.away)

    def overdue(self, sequence: Sequence, now: float) -> bool:
        """Whether one lies in a slot that should be empty by now."""
        return any(block is not None and self.space.overdue(sequence.model, block, now) for block in sequence.away)

    def move(self, sequence: Sequence) -> bool:
        """Begins to move the blocks of a spilled sequence out of slots that were asked back. False: no room."""
        model = sequence.model
        keys = self._keys(sequence, sequence.saved // BLOCK_TOKENS)
        missing = Missing()
        for place, block in enumerate(sequence.away):
            if block is None or not self.space.leaves(model, block):
                continue
            key = keys[place] if place < len(keys) else None
            there = self.space.take(model, key) if key is not None else None
            if there is None:
                missing.add(block, key, place)
            else:
                sequence.away[place] = there
                self.space.release(model, [block])
        if not missing.source:
            return True
        target = self.space.allocate(model, len(missing.source))
        if target is None:
            return False
        self.moves += 1
        self._begin(sequence, model, "move", missing, target)
        return True

    def moved(self, copy: Copy, whole: bool) -> None:
        """A move has landed, or failed (not `whole`): then the sequence's content is lost."""
        sequence, command = copy.sequence, copy.command
        assert sequence is not None
        if not whole:
            self.space.release(command.model, command.target)
            return
        self._publish(copy)
        for place, block in zip(copy.places, command.target, strict=True):
            sequence.away[place] = block
        self.space.release(command.model, command.source)

    @property
    def moving(self) -> int:
        return sum(copy.command.kind == "move" for copy in self._copies.values())

    # Ends ------------------------------------------------------------------------------------------------------------

    def distrust(self, copy: Copy) -> None:
        """A copy failed that read from the arena: nobody shall find there what it could not read."""
        for block, key in zip(copy.command.source, copy.keys, strict=True):
            if key is not None:
                self.space.forget(copy.command.model, block)

    def drop_away(self, sequence: Sequence) -> None:
        """Nothing in the arena is the sequence's any more."""
        self._release(sequence.model, sequence.away)
        sequence.away = []
        sequence.saved = 0

    def _release(self, model: str, blocks: list[int | None]) -> None:
        self.space.release(model, [block for block in blocks if block is not None])

    def _keys(self, sequence: Sequence, blocks: int) -> list[bytes]:
        return sequence.keys.first(blocks) if self.memory.prefix_cache else []

    def _begin(
        self,
        sequence: Sequence | None,
        model: str,
        kind: Literal["out", "in", "move"],
        missing: Missing,
        target: tuple[int, ...],
    ) -> Copy:
        self._number += 1
        command = CopyBlocks(self._number, model, kind, tuple(missing.source), target)
        copy = Copy(command, sequence, tuple(missing.keys), tuple(missing.places))
        self._copies[self._number] = copy
        self.commands.append(command)
        if sequence is not None:
            sequence.in_flight += 1
        return copy

    def _publish(self, copy: Copy) -> None:
        for block, key in zip(copy.command.target, copy.keys, strict=True):
            if key is not None:
                self.space.publish(copy.command.model, block, key)

    def pinned(self, model: str) -> set[int]:
        """Blocks of the pool that are in use for a copy of the prefix cache."""
        return {block for copy in self._copies.values() if copy.command.model == model for block, _ in copy.pinned}

    def check(self, model: str, sequences: Iterable[Sequence]) -> None:
        """Asserts that the blocks in use in the arena are those of these sequences, all of the model, and of copies."""
        self.space.check()
        held = {block for sequence in sequences for block in sequence.away if block is not None}
        for copy in self._copies.values():
            if copy.command.model == model and copy.command.kind != "in":
                held.update(copy.command.target)
        assert len(held) == self.space.used(model), f"{model}: blocks of the arena leaked"

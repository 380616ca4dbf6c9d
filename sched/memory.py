"""The lane core's memory: which blocks a sequence holds, what others may find in them, how much each model may use.

A model's only running sequence may exceed its model's quota: else a request larger than the quota would never run.
"""

from collections.abc import Iterable

from forebay.sched.blocks import BlockPool
from forebay.sched.policy import Division
from forebay.sched.quotas import ADAPT_S, Need, Quotas
from forebay.sched.sequence import Lane, Sequence
from forebay.transport.messages import BLOCK_TOKENS


class LaneMemory:
    """Blocks of all sequences of one device. With `prefix_cache` they are found again by their text."""

    def __init__(self, pool: BlockPool, division: Division, prefix_cache: bool) -> None:
        self.pool = pool
        self.prefix_cache = prefix_cache
        self._division = division
        self._quotas = Quotas(pool.size)
        self._next_adaptation = 0.0

    def add_model(self, model: str, block_bytes: int, popularity: float) -> None:
        self.pool.add_model(model, block_bytes)
        if self._division != "shared":
            self._quotas.add(model, popularity * block_bytes)
            self._apply_quotas()

    def admit(self, sequence: Sequence, alone: bool) -> bool:
        """Blocks for all that is known of a waiting sequence and for the token after it; what of its beginning is in
        blocks already counts as computed. All or nothing."""
        found: tuple[int, ...] = ()
        if self.prefix_cache:
            # The last known token is always computed, for the next one is drawn from it.
            found = self.pool.find(sequence.model, sequence.keys.first((sequence.known - 1) // BLOCK_TOKENS))
        sequence.blocks.extend(found)
        fresh = self.pool.allocate(sequence.model, sequence.blocks_for(sequence.known + 1), beyond_quota=alone)
        if fresh is None:
            self.release(sequence)
            return False
        sequence.blocks.extend(fresh)
        sequence.published = len(found)
        sequence.computed = sequence.landed = len(found) * BLOCK_TOKENS
        if not sequence.started:
            sequence.cached = sequence.computed
        return True

    def within_quota(self, sequence: Sequence, tokens: int) -> bool:
        """Whether a sequence that found no memory for so many tokens may have it: then others hold what it lacks."""
        pool = self.pool
        return pool.used(sequence.model) + sequence.blocks_for(tokens) <= pool.quota(sequence.model)

    def grow(self, sequence: Sequence, tokens: int, alone: bool) -> bool:
        """Blocks for that many tokens of a running sequence."""
        need = sequence.blocks_for(tokens)
        if need:
            blocks = self.pool.allocate(sequence.model, need, beyond_quota=alone)
            if blocks is None:
                return False
            sequence.blocks.extend(blocks)
        return True

    def landed(self, sequence: Sequence, tokens: int) -> None:
        """The keys and values of its first `tokens` tokens are in its blocks."""
        sequence.landed = tokens
        if self.prefix_cache:
            full = tokens // BLOCK_TOKENS
            if full > sequence.published:
                keys = sequence.keys.first(full)
                for index in range(sequence.published, full):
                    self.pool.publish(sequence.model, sequence.blocks[index], keys[index])
                sequence.published = full

    def release(self, sequence: Sequence) -> None:
        """Gives all its blocks back; nothing of it counts as computed any more."""
        self.pool.release(sequence.model, sequence.blocks)
        sequence.blocks.clear()
        sequence.computed = sequence.landed = sequence.placed = sequence.published = 0
        sequence.held = None

    def adapt(self, now: float, lanes: Iterable[Lane]) -> None:
        """Lets quotas follow the load, every ADAPT_S seconds."""
        if self._division != "adaptive" or now < self._next_adaptation:
            return
        self._next_adaptation = now + ADAPT_S
        needs = {lane.model: Need(self.pool.used(lane.model) * lane.block_bytes, bool(lane.waiting)) for lane in lanes}
        if self._quotas.adapt(needs):
            self._apply_quotas()

    def resize(self, size: int) -> None:
        """So many bytes of the pool are there now: quotas follow."""
        self._quotas.resize(size)
        self._apply_quotas()

    def check(self) -> None:
        self.pool.check()
        self._quotas.check()

    def _apply_quotas(self) -> None:
        for model, share in self._quotas.bytes.items():
            self.pool.set_quota(model, share // self.pool.block_bytes(model))

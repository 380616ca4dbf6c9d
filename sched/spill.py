"""The spill arena: where a worker keeps KV blocks that its pool has no room for. Pure bookkeeping.

The arena is one range of slots. The first ones are host memory and always there; the others are lent by other devices:
they appear, and are asked back. A block is cut as in the pool: block i of a model lies at i * block_bytes from the
arena's base. Lent slots are filled before the host's, because the way to a peer is the shorter one.
"""

from collections.abc import Iterable, Sequence

from forebay.sched.blocks import BlockPool


class SpillSpace:
    """`slots` of `slab_bytes`, of which the first `host_slots` are host memory; 0 slots: there is no room at all."""

    def __init__(self, slots: int, host_slots: int, slab_bytes: int) -> None:
        if not 0 <= host_slots <= slots:
            raise ValueError(f"the arena has {slots} slots, {host_slots} of them host memory; 0 to {slots} can be")
        self.slots = slots
        self.host_slots = host_slots
        self.slab_bytes = slab_bytes
        # Two pools over one range of slots, each closed where the other one is.
        self._lent = BlockPool(max(1, slots), slab_bytes)
        self._host = BlockPool(max(1, slots), slab_bytes)
        for slot in range(max(1, slots)):
            self._lent.close(slot)
            if slot >= host_slots:
                self._host.close(slot)
        self._there: set[int] = set()
        self._leaving: dict[int, float] = {}
        self._models: dict[str, int] = {}

    def add_model(self, model: str, block_bytes: int) -> None:
        """A model whose blocks are larger than the arena is never spilled."""
        if block_bytes <= self.slots * self.slab_bytes:
            for pool in (self._lent, self._host):
                pool.add_model(model, block_bytes)
            self._models[model] = block_bytes

    @property
    def capacity(self) -> int:
        """Bytes that are there to be used, now."""
        return (self.host_slots + len(self._there) - len(self._leaving)) * self.slab_bytes

    @property
    def lent_slots(self) -> int:
        """Slots of other devices that are there and not asked back."""
        return len(self._there) - len(self._leaving)

    # Blocks ----------------------------------------------------------------------------------------------------------

    def allocate(self, model: str, count: int) -> tuple[int, ...] | None:
        """`count` blocks, all or none, in lent slots as far as there is room."""
        if model not in self._models:
            return None
        if (blocks := self._lent.allocate(model, count)) is not None:
            return blocks
        got: list[int] = []
        while len(got) < count and (one := self._lent.allocate(model, 1)) is not None:
            got += one
        rest = self._host.allocate(model, count - len(got))
        if rest is None:
            self._lent.release(model, got)
            return None
        return (*got, *rest)

    def release(self, model: str, blocks: Iterable[int]) -> None:
        """One user less for each; what has a key can be found until its room is needed."""
        groups: dict[bool, list[int]] = {}
        for block in blocks:
            groups.setdefault(self._is_host(model, block), []).append(block)
        for host, group in groups.items():
            (self._host if host else self._lent).release(model, group)

    def take(self, model: str, key: bytes) -> int | None:
        """The block with this content, with one user more."""
        if model in self._models:
            for pool in (self._lent, self._host):
                if found := pool.find(model, [key]):
                    return found[0]
        return None

    def holds(self, model: str, key: bytes) -> bool:
        return model in self._models and (self._lent.holds(model, key) or self._host.holds(model, key))

    def publish(self, model: str, block: int, key: bytes) -> None:
        """The content of a used block is whole, and can be found from now on."""
        if not self.holds(model, key) and not self.leaves(model, block):
            self._pool(model, block).publish(model, block, key)

    def forget(self, model: str, block: int) -> None:
        """The content of a used block is not to be trusted: it cannot be found from now on."""
        self._pool(model, block).forget(model, block)

    def used(self, model: str) -> int:
        return self._lent.used(model) + self._host.used(model) if model in self._models else 0

    def _pool(self, model: str, block: int) -> BlockPool:
        return self._host if self._is_host(model, block) else self._lent

    def _is_host(self, model: str, block: int) -> bool:
        return block * self._models[model] < self.host_slots * self.slab_bytes

    # Slots that come and go ------------------------------------------------------------------------------------------

    def grow(self, slots: Sequence[int]) -> None:
        """Lent memory is mapped in these slots. Raises ValueError for slots that are host memory, none, or there."""
        for slot in slots:
            if not self.host_slots <= slot < self.slots or slot in self._there:
                raise ValueError(
                    f"slot {slot} of the arena cannot be lent memory: slots {self.host_slots} to {self.slots - 1} can, "
                    f"of which {sorted(self._there)} are there"
                )
            self._lent.reopen(slot)
            self._there.add(slot)

    def revoke(self, slots: Iterable[int], deadline: float) -> None:
        """These slots are to be emptied by `deadline`. What is cached in them is dropped at once; slots that are not
        there any more do not count: the wish crossed with `freed`."""
        for slot in self._there.intersection(slots):
            self._leaving[slot] = min(deadline, self._leaving.get(slot, deadline))
            self._lent.close(slot)

    def surplus(self, count: int) -> None:
        """Gives up to `count` lent slots back that nobody's block is in."""
        for slot in self._lent.emptiest()[:count]:
            self.revoke([slot], 0.0)

    @property
    def idle_slots(self) -> int:
        """Lent slots that are there and hold no used block."""
        return len(self._lent.emptiest())

    @property
    def deadline(self) -> float | None:
        """When the first of the leaving slots has to be empty."""
        return min(self._leaving.values(), default=None)

    def leaves(self, model: str, block: int) -> bool:
        """Whether the block lies in a slot that was asked back."""
        return bool(self._leaving) and any(slot in self._leaving for slot in self._span(model, block))

    def overdue(self, model: str, block: int, now: float) -> bool:
        """Whether the block lies in a slot whose deadline has passed."""
        return any(self._leaving.get(slot, now + 1) <= now for slot in self._span(model, block))

    def freed(self) -> tuple[int, ...]:
        """Slots that were asked back and that nothing of ours is in any more; each is told once."""
        empty = tuple(slot for slot in sorted(self._leaving) if self._lent.vacant(slot))
        for slot in empty:
            del self._leaving[slot]
            self._there.remove(slot)
        return empty

    def _span(self, model: str, block: int) -> range:
        size = self._models[model]
        return range(block * size // self.slab_bytes, ((block + 1) * size - 1) // self.slab_bytes + 1)

    def check(self) -> None:
        self._lent.check()
        self._host.check()
        assert set(self._leaving) <= self._there, "a slot leaves that is not there"
        assert self._lent.open_slabs == self.lent_slots, "slots of the arena were lost or invented"
        assert self._host.open_slabs == (self.host_slots if self.slots else 0), "host memory of the arena was lost"

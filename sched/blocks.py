"""Who owns which slab of a pool, and which KV blocks are free. Pure bookkeeping: the memory itself is gpu's.

The pool is one address range of equal slabs. Each model cuts its slabs into blocks of its own size; block i of a model
lies at i * block_bytes from the range's base, whatever slabs the model owns, so a block may straddle two slabs if the
model owns both. A slab moves to another model only while none of its blocks is used.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Share:
    """One model's part of the pool."""

    block_bytes: int
    free: list[int] = field(default_factory=list)
    used: set[int] = field(default_factory=set)


class BlockPool:
    """Blocks of several models over shared slabs. `slabs` of `slab_bytes` each."""

    def __init__(self, slabs: int, slab_bytes: int) -> None:
        if slabs < 1 or slab_bytes < 1:
            raise ValueError(f"a pool has at least one slab of at least one byte, not {slabs} of {slab_bytes} bytes")
        self.slabs = slabs
        self.slab_bytes = slab_bytes
        self._owner: list[str | None] = [None] * slabs
        self._used_in_slab = [0] * slabs
        self._shares: dict[str, _Share] = {}

    def add_model(self, model: str, block_bytes: int) -> None:
        """Raises ValueError for a second model of that name, or for blocks larger than the whole pool."""
        if model in self._shares:
            raise ValueError(f"model {model!r} has its share of the pool already")
        if not 0 < block_bytes <= self.slabs * self.slab_bytes:
            raise ValueError(
                f"model {model!r} has KV blocks of {block_bytes} bytes; the pool holds "
                f"{self.slabs * self.slab_bytes}: give the device more memory"
            )
        self._shares[model] = _Share(block_bytes)

    def capacity(self, model: str) -> int:
        """The most blocks that the model could ever hold."""
        return self.slabs * self.slab_bytes // self._shares[model].block_bytes

    def used(self, model: str) -> int:
        return len(self._shares[model].used)

    def allocate(self, model: str, count: int) -> tuple[int, ...] | None:
        """`count` blocks, all or none. Takes slabs that nobody uses as needed."""
        share = self._shares[model]
        while len(share.free) < count:
            if not self._grow(model, share):
                return None
        if count == 0:
            return ()
        blocks = share.free[-count:]
        del share.free[-count:]
        share.used.update(blocks)
        for block in blocks:
            for slab in self._span(block, share.block_bytes):
                self._used_in_slab[slab] += 1
        return tuple(blocks)

    def free(self, model: str, blocks: Iterable[int]) -> None:
        """Raises KeyError for a block that is not in use: freeing twice is a bug of the caller."""
        share = self._shares[model]
        for block in blocks:
            share.used.remove(block)
            share.free.append(block)
            for slab in self._span(block, share.block_bytes):
                self._used_in_slab[slab] -= 1

    def check(self) -> None:
        """Asserts that blocks and slabs are conserved. Every test calls it at its end."""
        used_in_slab = [0] * self.slabs
        for model, share in self._shares.items():
            assert len(share.free) == len(set(share.free)), f"{model}: a block is free twice"
            assert not share.used.intersection(share.free), f"{model}: a block is both used and free"
            owned = {slab for slab, owner in enumerate(self._owner) if owner == model}
            whole = {
                block
                for slab in owned
                for block in self._touching(slab, share.block_bytes)
                if owned.issuperset(self._span(block, share.block_bytes))
            }
            assert whole == share.used.union(share.free), f"{model}: blocks lost or invented"
            for block in share.used:
                for slab in self._span(block, share.block_bytes):
                    used_in_slab[slab] += 1
        assert used_in_slab == self._used_in_slab, "use counts of slabs are off"

    def _span(self, block: int, block_bytes: int) -> range:
        first = block * block_bytes
        return range(first // self.slab_bytes, (first + block_bytes - 1) // self.slab_bytes + 1)

    def _touching(self, slab: int, block_bytes: int) -> range:
        """Blocks of this size that lie in the slab, wholly or in part, and in the pool."""
        first = slab * self.slab_bytes // block_bytes
        last = ((slab + 1) * self.slab_bytes - 1) // block_bytes
        return range(first, min(last, self.slabs * self.slab_bytes // block_bytes - 1) + 1)

    def _grow(self, model: str, share: _Share) -> bool:
        """Takes the fewest unused slabs that make at least one more block, next to own ones where it can."""
        best: tuple[int, bool, int] | None = None
        chosen: list[int] = []
        for slab in range(self.slabs):
            if self._owner[slab] == model or self._used_in_slab[slab]:
                continue
            candidates = self._touching(slab, share.block_bytes)
            for block in {candidates[0], candidates[min(1, len(candidates) - 1)]} if candidates else ():
                span = self._span(block, share.block_bytes)
                missing = [other for other in span if self._owner[other] != model]
                if not missing or any(self._used_in_slab[other] for other in missing):
                    continue
                foreign = sum(self._owner[other] is not None for other in missing)
                # Free slabs before another model's idle ones; few before many; growth at an edge before an island.
                island = not any(
                    0 <= edge < self.slabs and self._owner[edge] == model for edge in (missing[0] - 1, missing[-1] + 1)
                )
                rank = (len(missing) + foreign * self.slabs, island, block)
                if best is None or rank < best:
                    best, chosen = rank, missing
        for slab in chosen:
            self._take(model, share, slab)
        return best is not None

    def _take(self, model: str, share: _Share, slab: int) -> None:
        previous = self._owner[slab]
        if previous is not None:
            loser = self._shares[previous]
            gone = set(self._touching(slab, loser.block_bytes))
            loser.free = [block for block in loser.free if block not in gone]
        self._owner[slab] = model
        for block in reversed(self._touching(slab, share.block_bytes)):
            if all(self._owner[other] == model for other in self._span(block, share.block_bytes)):
                share.free.append(block)

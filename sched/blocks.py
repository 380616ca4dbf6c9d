"""Who owns which slab of a pool, which KV blocks are used, cached or free, and how much each model may use.

Pure bookkeeping: the memory itself is gpu's. The pool is one address range of equal slabs. Each model cuts its slabs
into blocks of its own size; block i of a model lies at i * block_bytes from the range's base, whatever slabs the model
owns, so a block may straddle two slabs if the model owns both.

A block is *used* while a sequence counts on it (several may, read-only), *cached* when none does but its content has a
key under which it can be found again, and *free* otherwise. Cached blocks go when memory is needed, least recently used
first; a slab changes hands when none of its blocks is used.

A slab may be *closed*: nothing new is put into it, and once its last used block is released it belongs to nobody here.
So a pool gives slabs away, and so an arena has slots that are empty.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter


@dataclass(slots=True)
class _Share:
    """One model's part of the pool. `quota` in blocks; `cached` maps a block to when it was last used, oldest first."""

    block_bytes: int
    quota: int
    free: list[int] = field(default_factory=list)
    used: dict[int, int] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    block_of: dict[bytes, int] = field(default_factory=dict)
    key_of: dict[int, bytes] = field(default_factory=dict)


class BlockPool:
    """Blocks of several models over shared slabs. `slabs` of `slab_bytes` each."""

    def __init__(self, slabs: int, slab_bytes: int) -> None:
        if slabs < 1 or slab_bytes < 1:
            raise ValueError(f"a pool has at least one slab of at least one byte, not {slabs} of {slab_bytes} bytes")
        self.slabs = slabs
        self.slab_bytes = slab_bytes
        self._owner: list[str | None] = [None] * slabs
        self._closed = [False] * slabs
        self._used_in_slab = [0] * slabs
        self._cached_in_slab = [0] * slabs
        self._last_cached = [0] * slabs
        self._shares: dict[str, _Share] = {}
        self._releases = 0
        self.evictions = 0

    @property
    def size(self) -> int:
        """In bytes."""
        return self.slabs * self.slab_bytes

    def add_model(self, model: str, block_bytes: int) -> None:
        """Its quota is the whole pool. Raises ValueError for a second model of that name, or for blocks larger than the
        pool."""
        if model in self._shares:
            raise ValueError(f"model {model!r} has its share of the pool already")
        if not 0 < block_bytes <= self.size:
            raise ValueError(
                f"model {model!r} has KV blocks of {block_bytes} bytes; the pool holds {self.size}: "
                "give the device more memory"
            )
        self._shares[model] = _Share(block_bytes, self.size // block_bytes)

    def block_bytes(self, model: str) -> int:
        return self._shares[model].block_bytes

    def capacity(self, model: str) -> int:
        """The most blocks that the model could ever hold."""
        return self.size // self._shares[model].block_bytes

    def used(self, model: str) -> int:
        return len(self._shares[model].used)

    def cached(self, model: str) -> int:
        return len(self._shares[model].cached)

    def quota(self, model: str) -> int:
        return self._shares[model].quota

    def set_quota(self, model: str, blocks: int) -> None:
        """Bounds what the model may use from now on; what it uses beyond that it keeps."""
        self._shares[model].quota = blocks

    def users(self, model: str, block: int) -> int:
        """How many count on the block; 0 for one that is not in use."""
        return self._shares[model].used.get(block, 0)

    # Slabs that come and go ------------------------------------------------------------------------------------------

    @property
    def open_slabs(self) -> int:
        return self.slabs - sum(self._closed)

    @property
    def busy_slabs(self) -> int:
        """Those with a used block."""
        return sum(map(bool, self._used_in_slab))

    def emptiest(self) -> list[int]:
        """Open slabs without a used block; first those that hold nothing, the last ones before the first, so that what
        stays is in one piece; then by when their content was last used."""
        idle = [slab for slab in range(self.slabs) if not self._closed[slab] and not self._used_in_slab[slab]]
        return sorted(idle, key=lambda slab: (self._last_cached[slab] if self._cached_in_slab[slab] else 0, -slab))

    def vacant(self, slab: int) -> bool:
        """It is closed, and none of its blocks is in use."""
        return self._closed[slab] and not self._used_in_slab[slab]

    def close(self, slab: int) -> None:
        """Nothing new is put into the slab. What is cached in it is forgotten, what is used cannot be found again."""
        self._closed[slab] = True
        owner = self._owner[slab]
        if owner is not None:
            share = self._shares[owner]
            gone = set(self._touching(slab, share.block_bytes))
            for block in gone.intersection(share.cached):
                self._evict(share, block)
            for block in gone.intersection(share.key_of):
                self.forget(owner, block)
            share.free = [block for block in share.free if block not in gone]
            if not self._used_in_slab[slab]:
                self._owner[slab] = None

    def reopen(self, slab: int) -> None:
        """The slab is there (again), with nothing in it. Raises ValueError unless it was closed and vacant."""
        if not self.vacant(slab):
            raise ValueError(f"slab {slab} is in use here: it was never given away, or not given back")
        self._closed[slab] = False

    # Taking and giving back ------------------------------------------------------------------------------------------

    def allocate(self, model: str, count: int, beyond_quota: bool = False) -> tuple[int, ...] | None:
        """`count` blocks, all or none."""
        share = self._shares[model]
        if not beyond_quota and len(share.used) + count > share.quota:
            return None
        if len(share.free) < count and not self._can_find(model, share, count):
            return None
        while len(share.free) < count:
            if not self._find_one(model, share):
                return None
        if count == 0:
            return ()
        blocks = share.free[-count:]
        del share.free[-count:]
        for block in blocks:
            self._use(share, block)
        return tuple(blocks)

    def release(self, model: str, blocks: Sequence[int]) -> None:
        """One user less for each block. Raises KeyError for a block that is not in use: freeing twice is a bug."""
        share = self._shares[model]
        # The first blocks of a sequence are the prefix that others share: they shall be the last to go.
        for block in reversed(blocks):
            share.used[block] -= 1
            if share.used[block]:
                continue
            del share.used[block]
            self._count(self._used_in_slab, share, block, -1)
            if any(self._closed[slab] for slab in self._span(block, share.block_bytes)):
                self.forget(model, block)
                for slab in self._span(block, share.block_bytes):
                    if self.vacant(slab):
                        self._owner[slab] = None
            elif block in share.key_of:
                self._releases += 1
                share.cached[block] = self._releases
                self._count(self._cached_in_slab, share, block, 1)
                for slab in self._span(block, share.block_bytes):
                    self._last_cached[slab] = self._releases
            else:
                share.free.append(block)

    # Content ---------------------------------------------------------------------------------------------------------

    def find(self, model: str, keys: Iterable[bytes]) -> tuple[int, ...]:
        """Blocks that hold the content of the first keys, up to the first one that is nowhere; all now in use."""
        share = self._shares[model]
        found: list[int] = []
        for key in keys:
            block = share.block_of.get(key)
            if block is None:
                break
            found.append(block)
            if block in share.used:
                share.used[block] += 1
            else:
                del share.cached[block]
                self._count(self._cached_in_slab, share, block, -1)
                self._use(share, block)
        return tuple(found)

    def publish(self, model: str, block: int, key: bytes) -> None:
        """The content of a used block is final and can be found under `key`, unless another block has it already, or
        the block's slab has been given away: who found it there would keep it from leaving."""
        share = self._shares[model]
        assert block in share.used, f"{model}: block {block} is published, but nobody uses it"
        leaving = any(self._closed[slab] for slab in self._span(block, share.block_bytes))
        if not leaving and key not in share.block_of and block not in share.key_of:
            share.block_of[key] = block
            share.key_of[block] = key

    def holds(self, model: str, key: bytes) -> bool:
        """Whether `find` would find it."""
        return key in self._shares[model].block_of

    def forget(self, model: str, block: int) -> None:
        """The content of a used block can no longer be found."""
        share = self._shares[model]
        if (key := share.key_of.pop(block, None)) is not None:
            del share.block_of[key]

    def next_evictions(self, model: str, count: int) -> list[tuple[int, bytes]]:
        """The cached blocks that would be evicted first, with their keys; at most `count`."""
        share = self._shares[model]
        return [(block, share.key_of[block]) for block in islice(share.cached, count)]

    def pin(self, model: str, key: bytes) -> tuple[int, int]:
        """A cached block is in use, until `unpin` gives it back what this gives: block, and when it was used before."""
        share = self._shares[model]
        stamp = share.cached[share.block_of[key]]
        return self.find(model, [key])[0], stamp

    def unpin(self, model: str, pinned: Sequence[tuple[int, int]]) -> None:
        """Released; those that nobody has used meanwhile are as old as they were."""
        share = self._shares[model]
        self.release(model, [block for block, _ in pinned])
        share.cached.update((block, stamp) for block, stamp in pinned if block in share.cached)
        share.cached = dict(sorted(share.cached.items(), key=itemgetter(1)))

    def scarce(self, part: float) -> bool:
        """Whether less than this part of the open slabs' bytes is free (what is cached is not)."""
        empty = sum(owner is None and not closed for owner, closed in zip(self._owner, self._closed, strict=True))
        free = empty * self.slab_bytes + sum(len(share.free) * share.block_bytes for share in self._shares.values())
        return free < part * self.open_slabs * self.slab_bytes

    # Finding memory --------------------------------------------------------------------------------------------------

    def _use(self, share: _Share, block: int) -> None:
        share.used[block] = 1
        self._count(self._used_in_slab, share, block, 1)

    def _count(self, counts: list[int], share: _Share, block: int, change: int) -> None:
        for slab in self._span(block, share.block_bytes):
            counts[slab] += change

    def _can_find(self, model: str, share: _Share, count: int) -> bool:
        """Whether it is worth evicting anything: an upper bound on the blocks that could be had."""
        slabs = zip(self._used_in_slab, self._owner, self._closed, strict=True)
        idle = sum(not used and owner != model and not closed for used, owner, closed in slabs)
        straddling = idle + 1
        return len(share.free) + len(share.cached) + idle * self.slab_bytes // share.block_bytes + straddling >= count

    def _find_one(self, model: str, share: _Share) -> bool:
        """At least one more free block: from slabs that hold nothing, else in the place of what was cached longest."""
        slabs, age = self._best_slabs(model, share)
        oldest = next(iter(share.cached), None)
        if oldest is not None and (slabs is None or age > share.cached[oldest] > 0):
            self._evict(share, oldest)
            share.free.append(oldest)
            return True
        for slab in slabs or ():
            self._take(model, share, slab)
        return slabs is not None

    def _best_slabs(self, model: str, share: _Share) -> tuple[list[int] | None, int]:
        """The slabs to take for at least one more block, and when the last of their cached blocks was used (0: they
        hold none). Few before many, nobody's before another's, next to own ones before an island."""
        best: tuple[int, int, int, bool, int] | None = None
        chosen: list[int] | None = None
        for slab in range(self.slabs):
            if self._owner[slab] == model or self._used_in_slab[slab] or self._closed[slab]:
                continue
            touching = self._touching(slab, share.block_bytes)
            for block in {touching[0], touching[min(1, len(touching) - 1)]} if touching else ():
                span = self._span(block, share.block_bytes)
                missing = [other for other in span if self._owner[other] != model]
                if not missing or any(self._used_in_slab[other] for other in missing):
                    continue
                if any(self._closed[other] for other in span):
                    continue
                age = max(self._last_cached[other] if self._cached_in_slab[other] else 0 for other in missing)
                foreign = sum(self._owner[other] is not None for other in missing)
                island = not any(
                    0 <= edge < self.slabs and self._owner[edge] == model for edge in (missing[0] - 1, missing[-1] + 1)
                )
                rank = (age, len(missing), foreign, island, block)
                if best is None or rank < best:
                    best, chosen = rank, missing
            if best is not None and best[:4] == (0, 1, 0, False):
                break  # nothing is better, and blocks ascend with slabs
        return chosen, 0 if best is None else best[0]

    def _take(self, model: str, share: _Share, slab: int) -> None:
        previous = self._owner[slab]
        if previous is not None:
            loser = self._shares[previous]
            gone = set(self._touching(slab, loser.block_bytes))
            for block in gone.intersection(loser.cached):
                self._evict(loser, block)
            loser.free = [block for block in loser.free if block not in gone]
        self._owner[slab] = model
        for block in reversed(self._touching(slab, share.block_bytes)):
            span = self._span(block, share.block_bytes)
            if all(self._owner[other] == model and not self._closed[other] for other in span):
                share.free.append(block)

    def _evict(self, share: _Share, block: int) -> None:
        """A cached block is forgotten; whether it becomes free is the caller's to say."""
        del share.cached[block]
        del share.block_of[share.key_of.pop(block)]
        self._count(self._cached_in_slab, share, block, -1)
        self.evictions += 1

    def _span(self, block: int, block_bytes: int) -> range:
        first = block * block_bytes
        return range(first // self.slab_bytes, (first + block_bytes - 1) // self.slab_bytes + 1)

    def _touching(self, slab: int, block_bytes: int) -> range:
        """Blocks of this size that lie in the slab, wholly or in part, and in the pool."""
        first = slab * self.slab_bytes // block_bytes
        last = ((slab + 1) * self.slab_bytes - 1) // block_bytes
        return range(first, min(last, self.size // block_bytes - 1) + 1)

    def check(self) -> None:
        """Asserts that blocks and slabs are conserved. Every test calls it at its end."""
        counts: dict[str, list[int]] = {"used": [0] * self.slabs, "cached": [0] * self.slabs}
        for model, share in self._shares.items():
            groups = [set(share.used), set(share.cached), set(share.free)]
            assert sum(map(len, groups)) == len(set.union(*groups)), f"{model}: a block is in two states"
            assert len(share.free) == len(groups[2]), f"{model}: a block is free twice"
            assert all(share.used.values()), f"{model}: a block is used by nobody"
            owned = {slab for slab, owner in enumerate(self._owner) if owner == model and not self._closed[slab]}
            whole = {
                block
                for slab in owned
                for block in self._touching(slab, share.block_bytes)
                if owned.issuperset(self._span(block, share.block_bytes))
            }
            leaving = {
                block
                for block in share.used
                if any(self._closed[slab] for slab in self._span(block, share.block_bytes))
            }
            assert whole == set.union(*groups) - leaving, f"{model}: blocks lost or invented"
            assert not leaving & set(share.key_of), f"{model}: content of a closed slab can be found"
            assert share.block_of == {key: block for block, key in share.key_of.items()}, f"{model}: keys differ"
            assert groups[1] <= set(share.key_of) <= groups[0] | groups[1], f"{model}: a key without its block"
            for name, blocks in (("used", groups[0]), ("cached", groups[1])):
                for block in blocks:
                    self._count(counts[name], share, block, 1)
        for slab, owner in enumerate(self._owner):
            assert owner is None or not self.vacant(slab), f"slab {slab} was given away and belongs to {owner}"
        assert counts == {"used": self._used_in_slab, "cached": self._cached_in_slab}, "counts of slabs are off"

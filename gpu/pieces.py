"""Lists of pieces to copy, as arrays: no Python object per piece. Pure numpy."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from forebay.gpu.errors import DeviceError

Addresses: TypeAlias = npt.NDArray[np.uint64]
Blocks: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, eq=False)
class Pieces:
    """Piece i is `sizes[i]` bytes from address `sources[i]` to address `destinations[i]`. uint64[n] each."""

    destinations: Addresses
    sources: Addresses
    sizes: Addresses

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def bytes(self) -> int:
        return int(self.sizes[0]) if len(self.sizes) == 1 else int(self.sizes.sum())

    def part(self, which: Any) -> "Pieces":
        """The pieces that a slice, a mask or an array of indices chooses."""
        return Pieces(self.destinations[which], self.sources[which], self.sizes[which])


def pieces(destinations: Any, sources: Any, sizes: Any) -> Pieces:
    """Pieces from arrays or sequences of integers; `sizes` may be one number for all. Raises DeviceError where they
    are no integers from 0, or not as many of each."""
    targets, origins = _addresses("destinations", destinations), _addresses("sources", sources)
    lengths = _addresses("sizes", sizes)
    if lengths.ndim == 0:
        lengths = np.full(origins.shape, lengths)
    if not targets.shape == origins.shape == lengths.shape or targets.ndim != 1:
        raise DeviceError(
            f"destinations {targets.shape}, sources {origins.shape} and sizes {lengths.shape} of a copy must be "
            "lists of the same length"
        )
    return Pieces(targets, origins, lengths)


def block_pieces(
    destination: int, target_blocks: Blocks, source: int, source_blocks: Blocks, block_bytes: int
) -> Pieces:
    """Blocks of one size between two spaces: block `source_blocks[i]` of the one that begins at address `source` to
    block `target_blocks[i]` of the one that begins at `destination`."""
    targets = _addresses("target_blocks", target_blocks) * np.uint64(block_bytes) + np.uint64(destination)
    sources = _addresses("source_blocks", source_blocks) * np.uint64(block_bytes) + np.uint64(source)
    return pieces(targets, sources, block_bytes)


def _addresses(name: str, values: Any) -> Addresses:
    array = np.asarray(values)
    if array.size == 0:
        return np.zeros(array.shape, np.uint64)
    if array.dtype.kind not in "iu" or (array.dtype.kind == "i" and int(array.min()) < 0):
        raise DeviceError(f"{name} of a copy must be integers from 0, not {array.dtype} from {array.min()}")
    return array.astype(np.uint64, copy=False)


def plan(wanted: Pieces) -> Pieces:
    """The same copy, with empty pieces left out, and pieces joined that follow each other in the list and in memory
    where there are many of them. Raises DeviceError if a destination overlaps another piece's destination or source
    (their order would matter, and there is none)."""
    if len(wanted) == 1 and abs(int(wanted.destinations[0]) - int(wanted.sources[0])) >= int(wanted.sizes[0]) > 0:
        return wanted  # a quick way for what is often copied by itself
    if not wanted.sizes.all():
        wanted = wanted.part(wanted.sizes > 0)
    # The full check sorts everything, which takes longer than NVLink takes to copy 16 KiB pieces.
    if not (_spans_are_apart(wanted) and _targets_lie_on_a_grid(wanted)):
        _require_apart(wanted)
    targets, sources, sizes = wanted.destinations, wanted.sources, wanted.sizes
    joins = (targets[:-1] + sizes[:-1] == targets[1:]) & (sources[:-1] + sizes[:-1] == sources[1:])
    if 8 * int(np.count_nonzero(joins)) <= len(wanted):
        return wanted  # joining takes longer than that many more pieces
    begins = np.flatnonzero(np.concatenate(([True], ~joins)))
    return Pieces(targets[begins], sources[begins], np.add.reduceat(sizes, begins))


def _spans_are_apart(wanted: Pieces) -> bool:
    """Whether all destinations lie before all sources, or behind."""
    if not len(wanted):
        return True
    largest = int(wanted.sizes.max())
    first_target, last_target = int(wanted.destinations.min()), int(wanted.destinations.max())
    first_source, last_source = int(wanted.sources.min()), int(wanted.sources.max())
    return last_target + largest <= first_source or last_source + largest <= first_target


def _targets_lie_on_a_grid(wanted: Pieces) -> bool:
    """Whether the pieces have one size, and go to different multiples of it from the first destination. A no may only
    mean that this is not the quickest way to find out."""
    if len(wanted) < 2:
        return True
    size, first = wanted.sizes[0], wanted.destinations.min()
    if (wanted.sizes != size).any():
        return False
    offsets = wanted.destinations - first
    places = offsets // size
    last = int(places.max())
    if last > 64 * len(wanted) + 4096 or (places * size != offsets).any():
        return False
    taken = np.zeros(last + 1, np.bool_)
    taken[places.astype(np.int64)] = True
    return int(np.count_nonzero(taken)) == len(wanted)


def _require_apart(wanted: Pieces) -> None:
    order = np.argsort(wanted.destinations)
    targets, sources, sizes = wanted.destinations[order], wanted.sources[order], wanted.sizes[order]
    ends = targets + sizes
    clash = np.flatnonzero(ends[:-1] > targets[1:])
    if clash.size:
        first = int(clash[0])
        raise DeviceError(
            f"two pieces of a copy write the same memory: {_span(targets, sizes, first)} and "
            f"{_span(targets, sizes, first + 1)}"
        )
    if _spans_are_apart(wanted):
        return
    # Destinations are apart, so they end in the order in which they begin, and the first that ends behind a source's
    # beginning overlaps that source if any does.
    behind = np.searchsorted(ends, sources, side="right")
    met = np.minimum(behind, len(targets) - 1)
    clash = np.flatnonzero((behind < len(targets)) & (targets[met] < sources + sizes))
    if clash.size:
        first = int(clash[0])
        raise DeviceError(
            f"a copy would write what it reads: source {_span(sources, sizes, first)} overlaps destination "
            f"{_span(targets, sizes, int(met[first]))}"
        )


def _span(addresses: Addresses, sizes: Addresses, index: int) -> str:
    begin = int(addresses[index])
    return f"[{begin:#x}, {begin + int(sizes[index]):#x})"


def cut(whole: Pieces, limit: int) -> Pieces:
    """The same pieces, none larger than `limit` bytes."""
    if not len(whole) or int(whole.sizes.max()) <= limit:
        return whole
    counts = (whole.sizes + np.uint64(limit - 1)) // np.uint64(limit)
    index = np.repeat(np.arange(len(whole)), counts.astype(np.int64))
    first = np.cumsum(counts) - counts
    offsets = (np.arange(len(index), dtype=np.uint64) - first[index]) * np.uint64(limit)
    sizes = np.minimum(whole.sizes[index] - offsets, np.uint64(limit))
    return Pieces(whole.destinations[index] + offsets, whole.sources[index] + offsets, sizes)


def shares(whole: Pieces, count: int) -> list[Pieces]:
    """The pieces in at most `count` consecutive parts of about as many bytes each."""
    ends = np.cumsum(whole.sizes)
    total = int(ends[-1]) if len(ends) else 0
    marks = [int(np.searchsorted(ends, total * number // count)) for number in range(1, count)]
    bounds = [0, *marks, len(whole)]
    return [whole.part(slice(low, high)) for low, high in itertools.pairwise(bounds) if high > low]

"""The rows of a lane's decode steps, kept on the host from one step to the next.

While the same sequences decode, a step changes little: every position goes up by one, and one row in sixteen gets a
block more. Three models' steps are prepared by one interpreter, so what does not change is not looked at again, and
only whole arrays are worked on.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay.gpu.cuda_staging import Staged
from forebay.gpu.sequences import Sequence
from forebay.transport.messages.steps import BLOCK_TOKENS

IN_FLIGHT = -1
"""Instead of a token: the one that the sequence drew last, which only the device needs to know."""


@dataclass(frozen=True, eq=False)
class DecodeArrays:
    """A decode step's arrays. `tokens` may be IN_FLIGHT, `rows` as in CudaStep, `settings` the sampler's; the others
    say which blocks the sequences have (see Pages). `indices` has room for as many as there can be, and lies last."""

    rows: Staged
    slots: Staged
    settings: Staged
    tokens: Staged
    positions: Staged
    starts: Staged
    last_tokens: Staged
    indices: Staged


class DecodeRows:
    """For at most `most_rows` sequences of together `most_pages` blocks. `slot` gives a sequence's place among the last
    tokens on the device, where `nobody` is the place of rows that fill up a graph."""

    def __init__(self, most_rows: int, most_pages: int, slot: Callable[[Sequence], int], nobody: int) -> None:
        self._slot = slot
        self._nobody = nobody
        self._tables: list[int] = []
        self._positions = self._pages = np.empty(0, np.int64)
        self._starts = np.zeros(most_rows + 1, np.int32)
        # Where blocks are put in between, all of them move from one to the other.
        self._indices, self._spare = (np.empty(most_pages, np.int32) for _ in range(2))
        self._tokens = np.empty(most_rows, np.int32)
        self._slots = np.empty(most_rows, np.int64)

    def follow(self, sequences: list[Sequence]) -> tuple[int, int]:
        """The next step is of these, each of which takes the last token that it knows: how many rows these are, and how
        many blocks they have together."""
        count = len(sequences)
        tables = [sequence.table_number for sequence in sequences]
        positions = np.array([sequence.known for sequence in sequences], np.int64) - 1
        pages = positions // BLOCK_TOKENS + 1
        if tables != self._tables:
            self._begin(sequences, positions, pages)
        else:
            self._tokens[:count] = IN_FLIGHT  # each drew its last one in a step before
            self._grow(sequences, pages)
        self._tables, self._positions, self._pages = tables, positions, pages
        return count, int(self._starts[count])

    def forget(self) -> None:
        """Of rows that were followed, but whose step never ran: the next step begins anew."""
        self._tables = []

    def _begin(self, sequences: list[Sequence], positions: NDArray[np.int64], pages: NDArray[np.int64]) -> None:
        count = len(sequences)
        np.cumsum(pages, out=self._starts[1 : count + 1])
        blocks = [sequence.table[:used] for sequence, used in zip(sequences, pages.tolist(), strict=True)]
        np.concatenate(blocks, out=self._indices[: self._starts[count]], casting="same_kind")
        self._slots[:count] = [self._slot(sequence) for sequence in sequences]
        # A token that it was opened with, the device has not seen.
        self._tokens[:count] = [
            int(sequence.tokens[at]) if at < sequence.opened else IN_FLIGHT
            for sequence, at in zip(sequences, positions.tolist(), strict=True)
        ]

    def _grow(self, sequences: list[Sequence], pages: NDArray[np.int64]) -> None:
        """Puts the blocks in that have come since the last step."""
        grown = np.flatnonzero(pages != self._pages)
        if not len(grown):
            return
        pieces: list[NDArray[np.integer]] = []
        last = 0
        ends, had, have = self._starts[grown + 1].tolist(), self._pages[grown].tolist(), pages[grown].tolist()
        for row, end, first, beyond in zip(grown.tolist(), ends, had, have, strict=True):
            pieces += (self._indices[last:end], sequences[row].table[first:beyond])
            last = end
        count = len(sequences)
        pieces.append(self._indices[last : self._starts[count]])
        np.cumsum(pages, out=self._starts[1 : count + 1])
        np.concatenate(pieces, out=self._spare[: self._starts[count]], casting="same_kind")
        self._indices, self._spare = self._spare, self._indices

    def write(self, arrays: DecodeArrays, bucket: int) -> NDArray[np.int32]:
        """The rows of the last `follow`, filled up to `bucket` with rows that nobody needs: they read one token of a
        block that is there, and write nowhere. Gives the lengths of all, in tokens."""
        count = len(self._tables)
        used = int(self._starts[count])
        offsets = self._positions % BLOCK_TOKENS
        arrays.tokens.host[:count] = self._tokens[:count]
        arrays.tokens.host[count:] = 0
        arrays.slots.host[:count] = self._slots[:count]
        arrays.slots.host[count:] = self._nobody
        arrays.positions.host[:count] = self._positions
        arrays.positions.host[count:] = 0
        last_blocks = self._indices[self._starts[1 : count + 1] - 1].astype(np.int64)
        arrays.rows.host[:count] = last_blocks * BLOCK_TOKENS + offsets
        arrays.rows.host[count:] = -1
        arrays.last_tokens.host[:count] = offsets + 1
        arrays.last_tokens.host[count:] = 1
        arrays.starts.host[: count + 1] = self._starts[: count + 1]
        arrays.starts.host[count:] = np.arange(used, used + bucket - count + 1)
        arrays.indices.host[:used] = self._indices[:used]
        arrays.indices.host[used : used + bucket - count] = self._indices[0] if used else 0
        lengths = np.ones(bucket, np.int32)
        lengths[:count] = self._positions + 1
        return lengths

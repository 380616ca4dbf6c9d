"""The settings of draws as the kernels of cuda_sampling.py read them. They are written anew for every step, so what
stays the same from token to token is kept, and only arrays are worked on."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from forebay.gpu.sampling import row_keys, seed_keys
from forebay.transport.messages.common import Sampling

FIELDS = 4
"""Rows of the settings array, each of 8 bytes a draw: the key of (seed, output index); temperature and 1 - top_p as
float64; flags."""

BARRED, IGNORE_END = 1, 2
"""Flags: it must not end yet; its end is not to be marked."""

_KNOWN = 4096
"""Requests whose constants are kept, those of the past among them; if there are more, all are looked at again."""


class DrawSettings:
    """Writes the settings of one step after another. For one thread."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._known: list[Sampling] = []
        """Keeps each alive whose id is in `_places`, so that no other gets that id."""
        # As the settings, but with the key of the seed alone, and min_tokens in a row more.
        self._constants = np.zeros((FIELDS + 1, _KNOWN), np.int64)
        self._last: tuple[Sampling, ...] = ()
        self._columns = self._constants[:, :0]
        self._warm = self._barring = False

    def prepare(self, draws: Sequence[tuple[Sampling, int]], out: NDArray[np.int64]) -> bool:
        """Writes the settings of `draws` (sampling, output index) to `out` [FIELDS, at least len(draws)]; further
        columns get greedy draws. True if a draw is warm."""
        out[:] = 0
        if not draws:
            return False
        samplings, indices = zip(*draws, strict=True)
        if samplings != self._last:
            self._look_up(samplings)
        count, columns = len(draws), self._columns
        out[1:, :count] = columns[1:FIELDS]
        if self._barring:
            out[3, :count] |= np.where(np.array(indices) < columns[FIELDS], BARRED, 0)
        if self._warm:
            out[0, :count] = row_keys(columns[0].view(np.uint64), indices).view(np.int64)
        return self._warm

    def _look_up(self, samplings: tuple[Sampling, ...]) -> None:
        places = list(map(self._places.get, map(id, samplings)))
        if None in places:
            self._learn(samplings)
            places = [self._places[id(sampling)] for sampling in samplings]
        self._columns = self._constants.take(np.array(places), 1)
        self._warm, self._barring = bool(self._columns[1].any()), bool(self._columns[FIELDS].any())
        self._last = samplings

    def _learn(self, samplings: tuple[Sampling, ...]) -> None:
        all_of_them = {id(sampling): sampling for sampling in samplings}
        new = [sampling for number, sampling in all_of_them.items() if number not in self._places]
        if len(self._known) + len(new) > self._constants.shape[1]:
            self._places.clear()
            self._known.clear()
            new = list(all_of_them.values())
            self._constants = np.zeros((FIELDS + 1, max(_KNOWN, len(new))), np.int64)
        begin = len(self._known)
        self._known += new
        self._places.update((id(sampling), place) for place, sampling in enumerate(new, begin))
        columns = self._constants[:, begin : len(self._known)]
        reals = columns.view(np.float64)
        columns[0] = seed_keys([sampling.seed for sampling in new]).view(np.int64)
        reals[1] = [sampling.temperature if sampling.temperature > 0 else 0.0 for sampling in new]
        reals[2] = [1.0 - sampling.top_p if sampling.top_p < 1.0 else 0.0 for sampling in new]
        columns[3] = [IGNORE_END if sampling.ignore_eos else 0 for sampling in new]
        columns[FIELDS] = [sampling.min_tokens for sampling in new]

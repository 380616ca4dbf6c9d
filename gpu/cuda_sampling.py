"""Tokens chosen on a CUDA device: the draws of sampling.py, of the same meaning, without the logits leaving the device.

A request that moves between a CPU and a CUDA worker draws the same tokens from the same logits. Waiting times, weights
and arrivals are made in float64 in the same order as there. Only where a nucleus (top_p) ends is found by another way:
by weights summed in float32 and an interval cut ROUNDS times. Over 1,500 rows of random logits that misplaced a
ten-millionth of the probability (1.2e-7 on the mean, 1.3e-4 at most): so rarely does a draw under top_p differ.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from forebay.gpu.cuda_draws import FIELDS, DrawSettings
from forebay.gpu.cuda_linear import dependent_launch
from forebay.transport.messages.common import Sampling

CHUNK = 4096
"""Tokens of one program. A vocabulary of 128,256 keeps 32 programs a row busy."""

ROUNDS = 5
"""Each narrows the end of the nucleus by 16: from about 15 temperatures to a 70,000th of one."""


class DeviceSampler:
    """For logits [n, vocabulary] on `device`, a row for each of at most `max_rows` draws.

    `run` and `run_greedy` launch a few kernels on the current stream: they never synchronise, allocate nothing and can
    be captured in a graph. Two streams must not run the same sampler at once: it has one set of scratch memory."""

    def __init__(
        self, vocabulary: int, end_of_sequence: frozenset[int], device: torch.device, max_rows: int = 256
    ) -> None:
        self.vocabulary = vocabulary
        self.max_rows = max_rows
        self._settings = DrawSettings()
        self._chunks = -(-vocabulary // CHUNK)
        self._padded = 1 << (self._chunks - 1).bit_length()
        self._dependent = dependent_launch(device)
        self._options: dict[str, Any] = {"launch_pdl": True} if self._dependent else {}
        known = sorted(token for token in end_of_sequence if token < vocabulary)
        self._end_count = len(known)
        self._ends = torch.tensor(known or [0], dtype=torch.int32, device=device)

        def scratch(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._greatest = scratch(torch.float32, max_rows, self._chunks)
        self._token = scratch(torch.int32, max_rows, self._chunks)
        self._broken = scratch(torch.int32, max_rows, self._chunks)
        self._soonest = scratch(torch.int64, max_rows)
        self._time = scratch(torch.float64, max_rows, self._chunks)
        self._winner = scratch(torch.int32, max_rows, self._chunks)
        self._below = scratch(torch.float32, ROUNDS, max_rows, self._chunks, 17)
        self._interval = scratch(torch.float32, max_rows, 32)
        self._tokens = scratch(torch.int32, max_rows)
        self._stopped = scratch(torch.uint8, max_rows)

    def prepare(self, draws: Sequence[tuple[Sampling, int]], out: NDArray[np.int64]) -> bool:
        """Writes the settings of `draws` (as Draw has them) to `out` [FIELDS, at least len(draws)], to be copied to the
        device as it is; further columns get greedy draws. True if a draw is warm: `run` is needed, otherwise
        `run_greedy` does."""
        return self._settings.prepare(draws, out)

    def run_greedy(self, logits: torch.Tensor, settings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`run` where no draw is warm: two small launches."""
        self._look(logits, settings)
        return self._finish(logits, settings, warm=False)

    def run(self, logits: torch.Tensor, settings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens (int32 [n]) and stop marks (uint8 [n], see StepDone) for `logits` [n, vocabulary] of any floating
        dtype, whose rows may lie apart, and `settings` (int64 [FIELDS, at least n]) from `prepare`.

        May overwrite logits with -inf where a draw bars the end of sequence. The results are views that the next run
        overwrites. A row with a logit that is not finite gets token 0 and mark 2; the others are not touched by it."""
        from forebay.gpu import triton_sampling

        self._look(logits, settings)
        rows = logits.shape[0]
        grid = (rows, self._chunks)
        span = math.log(self.vocabulary) + 1.0
        layout = (logits.stride(0), settings.stride(0), self.vocabulary, self._chunks, span)
        shape = {"CHUNK": CHUNK, "CHUNKS": self._padded, "PDL": self._dependent, "num_warps": 4, **self._options}
        for number in range(ROUNDS):
            triton_sampling.narrow[grid](
                logits, settings, self._greatest, self._below, self._interval, *layout, ROUND=number, **shape
            )
        triton_sampling.race[grid](
            logits,
            settings,
            self._greatest,
            self._below,
            self._interval,
            self._soonest,
            self._time,
            self._winner,
            *layout,
            ROUNDS=ROUNDS,
            **shape,
        )
        return self._finish(logits, settings, warm=True)

    def _look(self, logits: torch.Tensor, settings: torch.Tensor) -> None:
        rows, vocabulary = logits.shape
        if not 0 < rows <= self.max_rows or vocabulary != self.vocabulary or logits.stride(1) != 1:
            raise ValueError(
                f"the sampler got logits {list(logits.shape)} of strides {list(logits.stride())}; it takes "
                f"[1 to {self.max_rows}, {self.vocabulary}] with contiguous rows"
            )
        if settings.dtype != torch.int64 or settings.shape[0] != FIELDS or settings.shape[1] < rows:
            raise ValueError(
                f"the sampler got settings {settings.dtype} {list(settings.shape)} for {rows} rows; it takes int64 "
                f"[{FIELDS}, at least {rows}] as `prepare` fills them"
            )
        from forebay.gpu import triton_sampling

        triton_sampling.look[rows, self._chunks](
            logits,
            settings,
            self._ends,
            self._greatest,
            self._token,
            self._broken,
            self._soonest,
            logits.stride(0),
            settings.stride(0),
            self.vocabulary,
            self._chunks,
            ENDS=self._end_count,
            CHUNK=CHUNK,
            PDL=self._dependent,
            num_warps=4,
            **self._options,
        )

    def _finish(self, logits: torch.Tensor, settings: torch.Tensor, *, warm: bool) -> tuple[torch.Tensor, torch.Tensor]:
        from forebay.gpu import triton_sampling

        rows = logits.shape[0]
        triton_sampling.finish[rows,](
            settings,
            self._ends,
            self._greatest,
            self._token,
            self._broken,
            self._time,
            self._winner,
            self._tokens,
            self._stopped,
            settings.stride(0),
            self._chunks,
            ENDS=self._end_count,
            CHUNKS=self._padded,
            WARM=warm,
            PDL=self._dependent,
            num_warps=1,
            **self._options,
        )
        return self._tokens[:rows], self._stopped[:rows]

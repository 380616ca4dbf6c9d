"""What the readers of traces share: a row, the part of a trace to take and how to scale it, rows as a workload."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from forebay.bench.draws import Draws
from forebay.bench.errors import BenchError
from forebay.bench.generate import describe
from forebay.bench.limits import MOST_TOKENS
from forebay.bench.token_ids import TokenIds
from forebay.bench.workload_file import Workload, WorkloadRequest


class Invocation(NamedTuple):
    """One row: `seconds` after the first row, lengths in tokens. `blocks` names what the prompt is made of, piece by
    piece, in traces that say so."""

    seconds: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Slice:
    """The rows from `start` on, for `duration` seconds of the trace (None: to its end), arriving `scale_rate` times as
    fast, with lengths times `scale_tokens` (rounded, at least 1, at most the maxima)."""

    start: float = 0.0
    duration: float | None = None
    scale_rate: float = 1.0
    scale_tokens: float = 1.0
    max_prompt: int | None = None
    max_output: int | None = None

    @property
    def end(self) -> float:
        return math.inf if self.duration is None else self.start + self.duration

    @property
    def until(self) -> str:
        """For a sentence."""
        return "on" if self.duration is None else f"up to {self.end:g} s"


def convert(
    rows: Iterable[Invocation],
    part: Slice,
    weights: Sequence[tuple[str, float]],
    prompt_of: Callable[[Invocation, int], list[int]],
    *,
    seed: int,
    origin: Path,
    distribution: str,
) -> Workload:
    """`part` of the rows as a workload. Each goes to a model drawn by weight; `prompt_of` makes its token ids, given
    the row and how many there may be. No row after the part is read. Raises BenchError if none is in it."""
    choice_draws = Draws(seed, "choice")
    running_sums = list(itertools.accumulate(weight for _, weight in weights))
    arrivals: list[float] = []
    requests: list[WorkloadRequest] = []
    last: float | None = None
    for row in rows:
        last = row.seconds
        if row.seconds >= part.end:
            break
        if row.seconds < part.start:
            continue
        output_tokens = scaled(row.output_tokens, part.scale_tokens, part.max_output)
        name = weights[choice_draws.choose(running_sums)][0]
        arrivals.append((row.seconds - part.start) / part.scale_rate)
        prompt = prompt_of(row, scaled(row.prompt_tokens, part.scale_tokens, part.max_prompt))
        requests.append(WorkloadRequest(name, len(requests), (TokenIds(prompt), len(prompt), output_tokens)))
    if last is None:
        raise BenchError(f"trace {origin}: holds no row; at least one is needed")
    if not requests:
        raise BenchError(
            f"trace {origin}: no row from {part.start:g} s {part.until}; the rows read reach {last:g} s: "
            f"change the start or the duration"
        )
    length = (min(part.end, last) - part.start) / part.scale_rate
    counts = [(name, sum(request.model_name == name for request in requests)) for name, _ in weights]
    rates = [(name, count / length if length > 0 else 0.0) for name, count in counts]
    info = describe(rates, requests, duration=length, distribution=distribution, from_dataset=False)
    return Workload(info, arrivals, requests)


def scaled(tokens: int, scale: float, maximum: int | None) -> int:
    """A length times `scale`, at least 1 and at most `maximum` or MOST_TOKENS."""
    return max(1, round(min(tokens * scale, MOST_TOKENS if maximum is None else maximum)))

"""Azure's LLM inference traces (TIMESTAMP, ContextTokens, GeneratedTokens) as workloads. The file is streamed."""

import csv
import itertools
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from forebay.bench.draws import Draws
from forebay.bench.errors import BenchError
from forebay.bench.generate import describe
from forebay.bench.lengths import Vocabulary
from forebay.bench.workload_file import Workload, WorkloadRequest

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
TICKS_PER_SECOND = 10_000_000


class Invocation(NamedTuple):
    """One row: `seconds` after the first row, lengths in tokens."""

    seconds: float
    prompt_tokens: int
    output_tokens: int


def parse_model_weights(text: str) -> list[tuple[str, float]]:
    """`name[:weight],...`, weight 1 where none is given. Raises BenchError."""
    weights: list[tuple[str, float]] = []
    for part in text.split(","):
        name, colon, weight_text = part.strip().partition(":")
        try:
            weight = float(weight_text) if colon else 1.0
        except ValueError:
            weight = math.nan
        if not name or not (math.isfinite(weight) and weight > 0):
            raise BenchError(f"models {part!r}: allowed is name[:weight],... with weights above 0")
        weights.append((name, weight))
    if len({name for name, _ in weights}) < len(weights):
        raise BenchError(f"models {text!r}: a name appears twice; names must differ")
    return weights


def read_azure(path: Path) -> Iterator[Invocation]:
    """Rows as they come. Raises BenchError that names a missing column, or line, column and value of a bad cell."""
    try:
        with path.open(newline="") as lines:
            yield from _rows(path, lines)
    except OSError as error:
        raise BenchError(f"trace {path}: cannot be read: {error.strerror}") from error


def _rows(path: Path, lines: Iterator[str]) -> Iterator[Invocation]:
    reader = csv.reader(lines)
    header = next(reader, [])
    for column in COLUMNS:
        if column not in header:
            raise BenchError(f"trace {path}: column {column} is missing; its columns are {', '.join(header) or 'none'}")
    places = [header.index(column) for column in COLUMNS]
    first: int | None = None
    earlier = 0.0
    for row in reader:
        where = f"trace {path}, line {reader.line_num}"
        if len(row) < len(header):
            raise BenchError(f"{where}: has {len(row)} cells for {len(header)} columns")
        stamp, prompt, output = (row[place] for place in places)
        ticks = _ticks(stamp, where)
        first = ticks if first is None else first
        seconds = (ticks - first) / TICKS_PER_SECOND
        if seconds < earlier:
            raise BenchError(f"{where}: TIMESTAMP is {stamp!r}, before the line ahead of it; rows must be sorted")
        earlier = seconds
        yield Invocation(seconds, _tokens(prompt, COLUMNS[1], where), _tokens(output, COLUMNS[2], where))


def _ticks(text: str, where: str) -> int:
    """A time in units of 100 ns: one digit more than datetime keeps, and than a float of this size could."""
    whole, _, fraction = text.partition(".")
    try:
        start = datetime.fromisoformat(whole).replace(tzinfo=UTC)
        return int(start.timestamp()) * TICKS_PER_SECOND + int(fraction.ljust(7, "0")[:7])
    except ValueError:
        raise BenchError(f"{where}: TIMESTAMP is {text!r}; YYYY-MM-DD HH:MM:SS.fffffff is allowed") from None


def _tokens(text: str, column: str, where: str) -> int:
    if not (text.isdecimal() and text.isascii()):
        raise BenchError(f"{where}: {column} is {text!r}; a whole number of tokens is allowed")
    return int(text)


def convert_azure(
    path: Path,
    weights: Sequence[tuple[str, float]],
    vocabulary: Vocabulary,
    *,
    seed: int,
    start: float = 0.0,
    duration: float | None = None,
    scale_rate: float = 1.0,
    scale_tokens: float = 1.0,
    max_prompt: int | None = None,
    max_output: int | None = None,
) -> Workload:
    """The rows from `start` on, for `duration` seconds of the trace, as requests that arrive `scale_rate` times as
    fast, with lengths times `scale_tokens` (rounded, at least 1, at most the maxima). Each goes to a model drawn by
    weight; its prompt is random token ids. Raises BenchError."""
    end = math.inf if duration is None else start + duration
    choice_draws, content_draws = Draws(seed, "choice"), Draws(seed, "content")
    running_sums = list(itertools.accumulate(weight for _, weight in weights))
    arrivals: list[float] = []
    requests: list[WorkloadRequest] = []
    last = 0.0
    for row in read_azure(path):
        last = row.seconds
        if row.seconds >= end:
            break
        if row.seconds < start:
            continue
        prompt_tokens = _scaled(row.prompt_tokens, scale_tokens, max_prompt)
        output_tokens = _scaled(row.output_tokens, scale_tokens, max_output)
        name = weights[choice_draws.choose(running_sums)][0]
        arrivals.append((row.seconds - start) / scale_rate)
        prompt = vocabulary.draw(content_draws, prompt_tokens)
        requests.append(WorkloadRequest(name, len(requests), (prompt, prompt_tokens, output_tokens)))
    if not requests:
        raise BenchError(
            f"trace {path}: no row from {start:g} s up to {end:g} s; the rows read reach {last:g} s: "
            f"change the start or the duration"
        )
    length = (min(end, last) - start) / scale_rate
    counts = [(name, sum(request.model_name == name for request in requests)) for name, _ in weights]
    rates = [(name, count / length if length > 0 else 0.0) for name, count in counts]
    info = describe(rates, requests, duration=length, distribution="azure", from_dataset=False)
    return Workload(info, arrivals, requests)


def _scaled(tokens: int, scale: float, maximum: int | None) -> int:
    scaled = max(1, round(tokens * scale))
    return scaled if maximum is None else min(scaled, maximum)

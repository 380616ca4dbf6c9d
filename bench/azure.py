"""Azure's LLM inference traces (TIMESTAMP, ContextTokens, GeneratedTokens) as workloads. The file is streamed."""

import csv
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from forebay.bench.draws import Draws
from forebay.bench.errors import BenchError
from forebay.bench.lengths import Vocabulary
from forebay.bench.limits import MOST_TOKENS
from forebay.bench.trace import Invocation, Slice, convert
from forebay.bench.workload_file import Workload

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
TICKS_PER_SECOND = 10_000_000
LARGEST_WEIGHT = 1e9


def parse_model_weights(text: str) -> list[tuple[str, float]]:
    """`name[:weight],...`, weight 1 where none is given. Raises BenchError."""
    weights: list[tuple[str, float]] = []
    for part in text.split(","):
        name, colon, weight_text = part.strip().partition(":")
        try:
            weight = float(weight_text) if colon else 1.0
        except ValueError:
            weight = math.nan
        if not name or not (0 < weight <= LARGEST_WEIGHT):
            raise BenchError(
                f"models {part!r}: allowed is name[:weight],... with weights above 0, at most {LARGEST_WEIGHT:g}"
            )
        weights.append((name, weight))
    if len({name for name, _ in weights}) < len(weights):
        raise BenchError(f"models {text!r}: a name appears twice; names must differ")
    return weights


def read_azure(path: Path) -> Iterator[Invocation]:
    """Rows as they come. Raises BenchError that names a missing column, or line, column and value of a bad cell."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            yield from _rows(path, lines)
    except OSError as error:
        raise BenchError(f"trace {path}: cannot be read: {error.strerror}") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise BenchError(f"trace {path}: not a CSV file: {error}") from error


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
        if not row:
            continue  # an empty line
        if len(row) != len(header):
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
    if not (text.isdecimal() and text.isascii() and len(text) <= 18 and int(text) <= MOST_TOKENS):
        shown = text if len(text) <= 40 else f"{text[:37]}..."
        raise BenchError(f"{where}: {column} is {shown!r}; a whole number of tokens up to {MOST_TOKENS:,} is allowed")
    return int(text)


def convert_azure(
    path: Path, weights: Sequence[tuple[str, float]], vocabulary: Vocabulary, part: Slice, *, seed: int
) -> Workload:
    """`part` of the trace as requests. Each goes to a model drawn by weight; its prompt is random token ids. Raises
    BenchError."""
    draws = Draws(seed, "content")

    def prompt_of(row: Invocation, tokens: int) -> list[int]:
        return vocabulary.draw(draws, tokens)

    return convert(read_azure(path), part, weights, prompt_of, seed=seed, origin=path, distribution="azure")

"""Readers of the ServeGen files: rates by window, clients by window, clients' lengths. All are streamed, and every
error names file, line, column and value."""

import csv
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from forebay.bench.draws import Draws
from forebay.bench.errors import BenchError
from forebay.bench.limits import MOST_RATE, MOST_TOKENS

WINDOW_S = 600.0

LEAST_SHAPE = 0.01
"""Of a law of gaps: below it gaps leave the range of a float."""


@dataclass(frozen=True)
class Selection:
    """`model` of the trace, or one `client` of it, plays our model `name`."""

    model: str
    client: str | None
    name: str

    @property
    def source(self) -> str:
        return self.model if self.client is None else f"{self.model}/{self.client}"

    def takes(self, model: str, client: str) -> bool:
        return model == self.model and self.client in (None, client)


def parse_selections(text: str) -> list[Selection]:
    """`SOURCE=NAME,...`, SOURCE being MODEL or MODEL/CLIENT. Raises BenchError."""
    selections: list[Selection] = []
    for part in text.split(","):
        source, equals, name = (piece.strip() for piece in part.partition("="))
        model, slash, client = source.partition("/")
        if not (model and equals and name and bool(slash) == bool(client)):
            raise BenchError(f"models {part!r}: allowed is MODEL=NAME or MODEL/CLIENT=NAME, such as m-large=llm-0")
        selections.append(Selection(model, client or None, name))
    if len({selection.name for selection in selections}) < len(selections):
        raise BenchError(f"models {text!r}: a name of ours appears twice; names must differ")
    return selections


@dataclass(frozen=True)
class TokenSummary:
    """Of lengths in tokens."""

    mean: float
    p50: float
    p99: float


@dataclass(frozen=True)
class Client:
    """`requests` of the whole week; the summaries are None where the file leaves them out."""

    model: str
    client: str
    requests: float
    prompt: TokenSummary | None
    output: TokenSummary | None


@dataclass(frozen=True)
class Window:
    """A client in a window of 600 s from `start_s` on: its mean rate and the law of its gaps, `scale` in seconds."""

    model: str
    client: str
    start_s: float
    rate_rps: float
    pattern: str
    shape: float
    scale: float

    def draw_gap(self, draws: Draws) -> float:
        """Seconds."""
        if self.pattern == "Gamma":
            return draws.gamma(self.shape) * self.scale
        return math.pow(draws.exponential(1.0), 1 / self.shape) * self.scale


class Row:
    """One line of a table, its cells by column."""

    def __init__(self, where: str, cells: dict[str, str]) -> None:
        self.where = where
        self._cells = cells

    def text(self, column: str) -> str:
        return self._cells[column]

    def number(self, column: str, *, above: float = -math.inf, least: float = 0.0, most: float = 1e9) -> float:
        """Raises BenchError unless it is finite, from `least` to `most`, and more than `above`."""
        text = self._cells[column]
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and least <= value <= most and value > above):
            allowed = f"a number above {above:g}" if above > -math.inf else f"a number of {least:g} or more"
            allowed += f", at most {most:g},"
            raise BenchError(f"{self.where}: {column} is {text!r}; {allowed} is allowed")
        return value


def read_table(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """A CSV file with a header, line by line. Raises BenchError that names a missing column or a broken line."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            reader = csv.reader(lines)
            header = next(reader, [])
            for column in columns:
                if column not in header:
                    raise BenchError(
                        f"{path}: column {column} is missing; its columns are {', '.join(header) or 'none'}"
                    )
            for cells in reader:
                if not cells:
                    continue  # an empty line
                where = f"{path}, line {reader.line_num}"
                if len(cells) != len(header):
                    raise BenchError(f"{where}: has {len(cells)} cells for {len(header)} columns")
                yield Row(where, dict(zip(header, cells, strict=True)))
    except OSError as error:
        raise BenchError(f"{path}: cannot be read: {error.strerror}") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise BenchError(f"{path}: not a CSV file: {error}") from error


def read_rates(path: Path, models: Collection[str], start: float, end: float) -> dict[str, dict[int, float]]:
    """For each model, requests per second by number of the window, of the windows that touch [start, end) seconds.
    Raises BenchError, also where a model has none."""
    tables: dict[str, dict[int, float]] = {model: {} for model in models}
    seen: dict[str, list[float]] = {}
    for row in read_table(path, ("model", "window_start_s", "rate_rps")):
        model, window_start = row.text("model"), row.number("window_start_s")
        seen.setdefault(model, []).append(window_start)
        if model in tables and window_start < end and window_start + WINDOW_S > start:
            tables[model][int(window_start // WINDOW_S)] = row.number("rate_rps", most=MOST_RATE)
    for model, table in tables.items():
        if not table:
            raise _nothing(path, model, seen.get(model), seen, start, end)
    return tables


def read_windows(path: Path, selections: Sequence[Selection], start: float, end: float) -> Iterator[Window]:
    """The selected clients' windows that touch [start, end) seconds, in the file's order. Raises BenchError, at the
    end also where a selection has none."""
    columns = ("model", "client", "window_start_s", "rate_rps", "pattern", "shape", "scale")
    models: set[str] = set()
    seen: dict[Selection, list[float]] = {selection: [] for selection in selections}
    found: set[Selection] = set()
    for row in read_table(path, columns):
        model, client, window_start = row.text("model"), row.text("client"), row.number("window_start_s")
        takers = [selection for selection in selections if selection.takes(model, client)]
        models.add(model)
        for selection in takers:
            seen[selection].append(window_start)
        if not takers or not (window_start < end and window_start + WINDOW_S > start):
            continue
        found.update(takers)
        if row.text("pattern") not in ("Gamma", "Weibull"):
            raise BenchError(f"{row.where}: pattern is {row.text('pattern')!r}; Gamma and Weibull are allowed")
        yield Window(
            model,
            client,
            window_start,
            row.number("rate_rps", most=MOST_RATE),
            row.text("pattern"),
            row.number("shape", least=LEAST_SHAPE),
            row.number("scale", above=0),
        )
    for selection in selections:
        if selection not in found:
            raise _nothing(path, selection.source, seen[selection], models, start, end)


def _nothing(
    path: Path, source: str, windows: Sequence[float] | None, models: Collection[str], start: float, end: float
) -> BenchError:
    if not windows:
        return BenchError(f"{path}: knows no {source!r}; its models are {', '.join(sorted(models)) or 'none'}")
    return BenchError(
        f"{path}: nothing of {source!r} from {start:g} s up to {end:g} s; it has windows from {min(windows):g} s up to "
        f"{max(windows) + WINDOW_S:g} s: change the start or the duration"
    )


def read_clients(path: Path) -> list[Client]:
    """All clients. Empty cells of lengths are allowed, and mean that they are not known. Raises BenchError."""
    parts = [f"{kind}_{name}" for kind in ("input", "output") for name in ("mean", "p50", "p99")]
    return [
        Client(
            row.text("model"),
            row.text("client"),
            row.number("requests"),
            _summary(row, parts[:3]),
            _summary(row, parts[3:]),
        )
        for row in read_table(path, ("model", "client", "requests", *parts))
    ]


def _summary(row: Row, columns: Sequence[str]) -> TokenSummary | None:
    if any(not row.text(column).strip() for column in columns):
        return None
    return TokenSummary(*(row.number(column, most=MOST_TOKENS) for column in columns))

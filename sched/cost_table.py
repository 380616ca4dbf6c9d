"""MuxServe's cost file as a table: how long a prefill and a decode step take on a share of a device's SMs, as measured;
between the measured points it interpolates. Reading bytes and looking up, no files.

Form: model -> number of GPUs -> SM % -> batch size -> sequence length -> {"prefill": ms, "decoding": ms}. A prefill is
of batch x sequence length tokens; a decode step of `batch` tokens, over a KV cache of batch x sequence length.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

NOT_MEASURED = -1
"""Stands in the file where there is no figure, mostly because it did not fit into memory."""

LARGEST_MS = 1e12

FORM = 'model -> number of GPUs -> SM % -> batch size -> sequence length -> {"prefill": ms, "decoding": ms}'
LEVELS = ("number of GPUs", "SM %", "batch size", "sequence length")
PHASES = ("prefill", "decoding")


class CostError(ValueError):
    """Names the file, the place in it, the value, and what is allowed."""


class CostRow(msgspec.Struct, frozen=True, array_like=True):
    """One setting: `share` is per cent of the SMs; times are in milliseconds, None where they were not measured."""

    model: str
    gpus: int
    share: int
    batch: int
    length: int
    prefill_ms: float | None
    decode_ms: float | None


def parse_costs(data: bytes, source: str) -> tuple[CostRow, ...]:
    """Checks all of a file (`source` names it in errors). Raises CostError."""
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CostError(f"cost file {source}: not whole JSON ({error}): write or copy it again") from error
    return tuple(row for model, by_gpus in _members(source, [], raw).items() for row in _rows(source, [model], by_gpus))


def _rows(source: str, place: list[str], raw: Any) -> Iterator[CostRow]:
    """Walks down from `place`, which begins with the model, to the figures."""
    depth = len(place) - 1
    if depth == len(LEVELS):
        gpus, share, batch, length = map(int, place[1:])
        yield CostRow(place[0], gpus, share, batch, length, *_times(source, place, raw))
        return
    for key, value in _members(source, place, raw).items():
        highest = 100 if LEVELS[depth] == "SM %" else 1 << 31
        if not (key.isascii() and key.isdecimal() and len(key) <= 18 and 1 <= int(key) <= highest):
            rule = "1 to 100" if LEVELS[depth] == "SM %" else "1 or more"
            raise CostError(f"cost file {source}: {_named(place)}: the {LEVELS[depth]} is {key!r}; {rule} is allowed")
        yield from _rows(source, [*place, key], value)


def _members(source: str, place: Sequence[str], raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict) or not raw:
        raise CostError(f"cost file {source}: {_named(place)}: an object with at least one member is needed; {FORM}")
    return raw


def _times(source: str, place: Sequence[str], raw: Any) -> tuple[float | None, float | None]:
    found: list[float | None] = []
    for phase in PHASES:
        value = raw.get(phase) if isinstance(raw, dict) else None
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not (0 < value <= LARGEST_MS or value == NOT_MEASURED)
        ):
            raise CostError(
                f"cost file {source}: {_named([*place, phase])}: is {value!r}; milliseconds above 0, at most "
                f"{LARGEST_MS:g}, are allowed, and {NOT_MEASURED} for not measured"
            )
        found.append(None if value == NOT_MEASURED else float(value))
    return found[0], found[1]


def _named(place: Sequence[str]) -> str:
    return " -> ".join(place) or "top level"


Curve = list[tuple[float, float]]
"""Points with ascending x."""


class CostTable:
    """Interpolates between the rows for one GPU. Beyond the largest measured batch, length or prompt it goes on along
    the last two points; below the smallest it stays at the first."""

    def __init__(self, rows: Iterable[CostRow]) -> None:
        self._prefill: dict[str, dict[int, Curve]] = {}
        self._decode: dict[str, dict[int, dict[int, Curve]]] = {}
        tokens: dict[tuple[str, int, int], float] = {}
        for row in sorted((row for row in rows if row.gpus == 1), key=lambda row: (row.batch, row.length)):
            if row.prefill_ms is not None:  # several settings of as many tokens: the quickest is the one to plan with
                at = (row.model, row.share, row.batch * row.length)
                tokens[at] = min(row.prefill_ms / 1e3, tokens.get(at, row.prefill_ms / 1e3))
            if row.decode_ms is not None:
                by_batch = self._decode.setdefault(row.model, {}).setdefault(row.share, {})
                by_batch.setdefault(row.batch, []).append((row.length, row.decode_ms / 1e3))
        for (model, share, count), seconds in sorted(tokens.items()):
            self._prefill.setdefault(model, {}).setdefault(share, []).append((count, seconds))

    @property
    def models(self) -> list[str]:
        return sorted({*self._prefill, *self._decode})

    def prefill_s(self, model: str, tokens: int, share: int = 100) -> float | None:
        """Seconds of a prefill of so many tokens on a share of the SMs in per cent; None where nothing is known."""
        return _by_share(self._prefill.get(model, {}), share, lambda curve: interpolate(curve, tokens))

    def decode_s(self, model: str, batch: int, length: float, share: int = 100) -> float | None:
        """Seconds of a decode step of `batch` sequences with `length` tokens each."""

        def at(by_batch: Mapping[int, Curve]) -> float:
            return interpolate([(size, interpolate(by_batch[size], length)) for size in sorted(by_batch)], batch)

        return _by_share(self._decode.get(model, {}), share, at)


def _by_share(known: Mapping[int, Any], share: int, value: Any) -> float | None:
    """Between measured shares time is taken to fall along a line; below the smallest, with the SMs."""
    if not known:
        return None
    smallest = min(known)
    if share < smallest:
        return float(value(known[smallest])) * smallest / share
    return interpolate([(size, value(known[size])) for size in sorted(known)], share)


def interpolate(curve: Curve, x: float) -> float:
    """The value of a curve with at least one point."""
    if len(curve) == 1 or x <= curve[0][0]:
        return curve[0][1]
    right = min(max(1, bisect_left(curve, (x, 0.0))), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[right - 1], curve[right]
    return max(y0 + (y1 - y0) * (x - x0) / (x1 - x0), 0.0)

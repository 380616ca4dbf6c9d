"""MuxServe's cost file: how long a prefill and a decode step take, as measured. Nothing here estimates what was not."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from forebay.bench.errors import BenchError

NOT_MEASURED = -1
"""Stands in the file where there is no figure, mostly because it did not fit into memory."""

LARGEST_MS = 1e12

FORM = 'model -> number of GPUs -> SM % -> batch size -> sequence length -> {"prefill": ms, "decoding": ms}'
LEVELS = ("number of GPUs", "SM %", "batch size", "sequence length")

Phase: TypeAlias = Literal["prefill", "decoding"]
PHASES: tuple[Phase, ...] = ("prefill", "decoding")


class Setting(NamedTuple):
    """What was measured. A prefill is of batch x sequence length tokens; a decode step of `batch` tokens, over a KV
    cache of batch x sequence length."""

    gpus: int
    sm_percent: int
    batch: int
    sequence_length: int


class CostFile:
    """The figures of one file, by model and setting."""

    def __init__(self, path: Path, costs: dict[str, dict[Setting, dict[Phase, float | None]]]) -> None:
        self._path = path
        self._costs = costs

    @property
    def models(self) -> list[str]:
        return sorted(self._costs)

    def settings(self, model: str) -> list[Setting]:
        """All that the file lists for a model, ascending, measured or not. Raises BenchError for an unknown model."""
        return sorted(self._of(model))

    def milliseconds(self, model: str, setting: Setting, phase: Phase) -> float | None:
        """The figure for exactly this setting; None if the file says that it was not measured. Raises BenchError that
        names the first part of the setting that the file does not list, and what it lists instead."""
        costs = self._of(model)
        if setting not in costs:
            raise BenchError(f"cost file {self._path}: {model!r}{_missing(list(costs), setting)}")
        return costs[setting][phase]

    def _of(self, model: str) -> dict[Setting, dict[Phase, float | None]]:
        if model not in self._costs:
            raise BenchError(f"cost file {self._path}: no model {model!r}; it lists {', '.join(self.models)}")
        return self._costs[model]


def read_cost_file(path: Path) -> CostFile:
    """Reads and checks a file. Raises BenchError that names the place, the value and what is allowed."""
    try:
        raw = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise BenchError(f"cost file {path}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise BenchError(f"cost file {path}: not whole JSON ({error}): write or copy it again") from error
    costs: dict[str, dict[Setting, dict[Phase, float | None]]] = {}
    for model, by_gpus in _members(path, [], raw).items():
        costs[model] = {}
        _collect(path, [model], by_gpus, costs[model])
    return CostFile(path, costs)


def _collect(path: Path, place: list[str], raw: Any, into: dict[Setting, dict[Phase, float | None]]) -> None:
    """Walks down from `place`, which begins with the model, to the figures."""
    depth = len(place) - 1
    if depth == len(LEVELS):
        into[Setting(*map(int, place[1:]))] = _cost(path, place, raw)
        return
    for key, value in _members(path, place, raw).items():
        highest = 100 if LEVELS[depth] == "SM %" else 1 << 31
        if not (key.isascii() and key.isdecimal() and len(key) <= 18 and 1 <= int(key) <= highest):
            rule = "1 to 100" if LEVELS[depth] == "SM %" else "1 or more"
            raise BenchError(f"cost file {path}: {_named(place)}: the {LEVELS[depth]} is {key!r}; {rule} is allowed")
        _collect(path, [*place, key], value, into)


def _members(path: Path, place: Sequence[str], raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict) or not raw:
        raise BenchError(f"cost file {path}: {_named(place)}: an object with at least one member is needed; {FORM}")
    return raw


def _cost(path: Path, place: Sequence[str], raw: Any) -> dict[Phase, float | None]:
    cost: dict[Phase, float | None] = {}
    for phase in PHASES:
        value = raw.get(phase) if isinstance(raw, dict) else None
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not (0 < value <= LARGEST_MS or value == NOT_MEASURED)
        ):
            raise BenchError(
                f"cost file {path}: {_named([*place, phase])}: is {value!r}; milliseconds above 0, at most "
                f"{LARGEST_MS:g}, are allowed, and "
                f"{NOT_MEASURED} for not measured"
            )
        cost[phase] = None if value == NOT_MEASURED else float(value)
    return cost


def _missing(listed: Sequence[Setting], setting: Setting) -> str:
    """` at 1 GPUs ... has no batch size 3; it lists 1, 2, 4`."""
    known: list[str] = []
    for depth, level in enumerate(LEVELS):
        values = sorted({other[depth] for other in listed if other[:depth] == setting[:depth]})
        if setting[depth] not in values:
            break
        known.append(f"{level} {setting[depth]}")
    where = f" at {', '.join(known)}" if known else ""
    return f"{where} has no {level} {setting[depth]}; it lists {', '.join(map(str, values))}"


def _named(place: Sequence[str]) -> str:
    return " -> ".join(place) or "top level"

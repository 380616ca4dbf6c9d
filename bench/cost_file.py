"""MuxServe's cost file: how long a prefill and a decode step take, as measured. Nothing here estimates what was not."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from forebay.bench.errors import BenchError
from forebay.sched.cost_table import LEVELS, NOT_MEASURED, CostError, parse_costs

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
        rows = parse_costs(path.read_bytes(), str(path))
    except OSError as error:
        raise BenchError(f"cost file {path}: cannot be read: {error.strerror}") from error
    except CostError as error:
        raise BenchError(str(error)) from error
    costs: dict[str, dict[Setting, dict[Phase, float | None]]] = {}
    for row in rows:
        times: dict[Phase, float | None] = {"prefill": row.prefill_ms, "decoding": row.decode_ms}
        costs.setdefault(row.model, {})[Setting(row.gpus, row.share, row.batch, row.length)] = times
    return CostFile(path, costs)


def write_cost_file(path: Path, costs: Mapping[str, Mapping[Setting, Mapping[Phase, float | None]]]) -> None:
    """Writes what `read_cost_file` reads, in milliseconds, whole or not at all. Raises OSError."""
    tree: dict[str, Any] = {}
    for model, settings in costs.items():
        for setting in sorted(settings):
            level = tree.setdefault(model, {})
            for key in setting:
                level = level.setdefault(str(key), {})
            for phase in PHASES:
                value = settings[setting][phase]
                level[phase] = NOT_MEASURED if value is None else round(value, 4)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(tree)) + b"\n")
    os.replace(partial, path)


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

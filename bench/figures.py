"""The file of figures that every benchmark writes for `--json FILE`: one shape for all of them."""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from forebay.bench.report import commit_of, describe_machine

FOLDER = Path(__file__).resolve().parent


class Figure(msgspec.Struct, frozen=True):
    """A measured value, its unit (such as `s` or `1/s`) and what it is compared with: a value of the same unit,
    measured in the same run. `value` is None where nothing could be measured, `baseline` where nothing is compared."""

    value: float | None
    unit: str
    baseline: float | None = None


class FiguresFile(msgspec.Struct, frozen=True):
    """`command` is the command line, quoted for a shell; `commit` is None outside of a checkout."""

    benchmark: str
    command: str
    commit: str | None
    machine: dict[str, str | int | None]
    figures: dict[str, Figure]


def write_figures(
    path: Path,
    benchmark: str,
    command: Sequence[str],
    figures: Mapping[str, Figure],
    devices: Mapping[str, str] | None = None,
) -> None:
    """Writes `path` whole or not at all; its folder is made. `command` holds the words of the command line, `devices`
    what each measured device is. Raises OSError where it cannot be written."""
    machine = {**describe_machine(), **(devices or {})}
    content = FiguresFile(benchmark, shlex.join(command), commit_of(FOLDER), machine, dict(figures))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
    os.replace(partial, path)

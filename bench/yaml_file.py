"""YAML files as typed values: what is wrong is told by file, key, value and what is allowed. Knows no file's keys."""

from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from forebay.bench.errors import BenchError

T = TypeVar("T")


def read_yaml(path: Path, what: str) -> Any:
    """The content of a file that errors call `what`. Raises BenchError."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"{what} {path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BenchError(f"{what} {path}: not YAML: {error}") from error


def typed(raw: Any, type_: type[T], path: Path, what: str) -> T:
    """`raw` as `type_`. Raises BenchError with the value that does not fit."""
    try:
        return msgspec.convert(raw, type_)
    except msgspec.ValidationError as error:
        rule, _, where = str(error).rstrip("`").partition(" - at `$")
        key = where.lstrip(".") or "top level"
        raise BenchError(f"{what} {path}: {key}: {_shown(raw, where)}{rule[0].lower()}{rule[1:]}") from error


def _shown(raw: Any, where: str) -> str:
    """The value at a path such as `.models[0].rate`, if it is one that fits into a sentence."""
    value = raw
    for step in where.replace("[", ".[").split(".")[1:]:
        value = value[int(step[1:-1])] if step.startswith("[") else value[step]
    return "" if isinstance(value, dict | list) else f"is {value!r}; "

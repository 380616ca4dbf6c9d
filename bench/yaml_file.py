"""YAML files as typed values: what is wrong is told by file, key, value and what is allowed. Knows no file's keys."""

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from forebay.bench.errors import BenchError
from forebay.runtime import strict_yaml

T = TypeVar("T")


def read_yaml(path: Path, what: str) -> Any:
    """The content of a file that errors call `what`. Raises BenchError."""
    try:
        return strict_yaml.read_yaml(path)
    except OSError as error:
        raise BenchError(f"{what} {path}: cannot be read: {error.strerror}") from error
    except strict_yaml.UnusableYaml as error:
        raise BenchError(f"{what} {path}: {error}") from error


def typed(raw: Any, type_: type[T], path: Path, what: str) -> T:
    """`raw` as `type_`. Raises BenchError with the value that does not fit."""
    try:
        return msgspec.convert(raw, type_)
    except msgspec.ValidationError as error:
        rule, _, where = str(error).partition(" - at `")
        if where.startswith("key"):
            raise BenchError(f"{what} {path}: a key is no text; put it in quotes ({error})") from error
        where = where.removeprefix("$").rstrip("`")
        key = where.lstrip(".") or "top level"
        raise BenchError(f"{what} {path}: {key}: {_shown(raw, where)}{rule[0].lower()}{rule[1:]}") from error


def _shown(raw: Any, where: str) -> str:
    """The value at a path such as `.models[0].rate`, if it is one that fits into a sentence."""
    value = raw
    if where.endswith("[...]"):
        return ""
    for step in where.replace("[", ".[").split(".")[1:]:
        value = value[int(step[1:-1])] if step.startswith("[") else value[step]
    if isinstance(value, dict | list):
        return ""
    shown = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else f"{str(value)[:12]}..."
    hint = " (text: YAML writes such a number as 1.0e+3)" if isinstance(value, str) and _is_number(value) else ""
    return f"is {shown}{hint}; "


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True

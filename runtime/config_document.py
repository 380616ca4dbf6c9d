"""docs/configuration.md, made from the schema (`make docs`)."""

import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from forebay.runtime.config import (
    Configuration,
    DeviceSection,
    HttpSection,
    LendingSection,
    ModelSection,
    TargetSection,
    TimeoutSection,
)

HEAD = """# Configuration

`python -m runtime.scheduler CONFIG` reads one YAML file and checks all of it before anything starts; what is wrong is
named by key, value and what is allowed. `examples/cpu.yaml` is a complete one. This page is made from the schema
(`make docs`).
"""

SECTIONS = (
    ("Top level", Configuration),
    ("devices[]", DeviceSection),
    ("models[]", ModelSection),
    ("models[].targets", TargetSection),
    ("http", HttpSection),
    ("timeouts", TimeoutSection),
    ("lending", LendingSection),
)


def document() -> str:
    return HEAD + "".join(_section(title, section) for title, section in SECTIONS)


def _section(title: str, section: Any) -> str:
    hints = get_type_hints(section, include_extras=True)
    rows = "".join(
        f"| `{field.name}` | {_type(hints[field.name])} | {_default(field)} | {_description(hints[field.name])} |\n"
        for field in msgspec.structs.fields(section)
    )
    return f"\n## {title}\n{section.__doc__.strip()}\n\n| key | type | default | meaning |\n|---|---|---|---|\n{rows}"


def _description(hint: Any) -> str:
    for extra in getattr(hint, "__metadata__", ()):
        if isinstance(extra, msgspec.Meta) and extra.description:
            return extra.description.replace("|", "\\|")
    return ""


def _type(hint: Any) -> str:
    metadata = getattr(hint, "__metadata__", ())
    if metadata:
        bounds = [
            f"{sign} {value:,}" if isinstance(value, int) else f"{sign} {value:g}"
            for meta in metadata
            for sign, value in ((">", meta.gt), ("≥", meta.ge), ("≤", meta.le))
            if value is not None
        ]
        return ", ".join([_type(hint.__origin__), *bounds])
    origin = get_origin(hint)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in get_args(hint))
    if origin in (Union, types.UnionType):
        return " or ".join(_type(argument) for argument in get_args(hint))
    if origin is dict:
        return f"{_type(get_args(hint)[1])} by name"
    if origin is tuple:
        inner = get_args(hint)[0]
        return "list" if isinstance(inner, type) and issubclass(inner, msgspec.Struct) else f"list of {_type(inner)}"
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return "section"
    return {str: "text", int: "integer", float: "number", bool: "true or false"}.get(hint, str(hint))


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is msgspec.NODEFAULT:
        return "required" if field.default_factory is msgspec.NODEFAULT else "empty"
    if isinstance(field.default, msgspec.Struct):
        return "see below"
    if field.default in ((), ""):
        return "empty"
    return f"`{msgspec.json.encode(field.default).decode()}`".replace('"', "")

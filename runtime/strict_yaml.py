"""YAML as a person means it: no key twice, no value that YAML itself cannot make sense of. Knows no file's keys.

PyYAML's safe loader keeps the last of two equal keys, and lets whatever error Python raises for a value escape.
"""

from pathlib import Path
from typing import Any

import yaml

LARGEST_BYTES = 1 << 20
"""A file that a person wrote is smaller."""


class UnusableYaml(ValueError):
    """Says what is wrong with the text, and in which line."""


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                name = (key.tag, key.value)
                if name in seen:
                    raise UnusableYaml(
                        f"line {_line(key)}: key {key.value!r} is there already, in line {seen[name]}; keep one"
                    )
                seen[name] = _line(key)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except UnusableYaml:
            raise
        except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError) as error:
            value = repr(node.value)[:80] if isinstance(node, yaml.ScalarNode) else "this"
            kind = node.tag.rpartition(":")[2]
            raise UnusableYaml(f"line {_line(node)}: {value} is no {kind}; put it in quotes if it is text") from error


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def read_yaml(path: Path) -> Any:
    """The file's one document; None if it is empty. Raises OSError, UnusableYaml."""
    with path.open("rb") as file:
        content = file.read(LARGEST_BYTES + 1)
    if len(content) > LARGEST_BYTES:
        raise UnusableYaml(f"it is larger than {LARGEST_BYTES} bytes, the most that is read")
    try:
        return yaml.load(content.decode(), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UnusableYaml(f"not YAML: {error}") from error
    except RecursionError:
        raise UnusableYaml("not usable: its values are nested too deeply, or hold themselves") from None

"""The configuration: bad values name their key, themselves and what is allowed; the document is the schema."""

from pathlib import Path
from typing import Any

import pytest

from forebay.runtime.config import Configuration, ConfigurationError, load, parse, parse_bytes
from forebay.runtime.config_document import document

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def raw(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return {
        "devices": [{"device": "cpu:0"}, {"device": "cpu:1"}],
        "models": [{"name": "a", "path": "model", "placement": ["cpu:0"]}],
    }


def test_paths_are_taken_from_the_files_folder_and_defaults_are_filled(raw: dict[str, Any], tmp_path: Path) -> None:
    configuration = parse(raw, "x.yaml", tmp_path)
    assert configuration.models[0].path == str(tmp_path / "model")
    settings = configuration.device_settings(cores=8)
    assert settings["cpu:0"].memory == 1 << 30
    assert settings["cpu:0"].threads == 4


def change(raw: dict[str, Any], path: str, value: Any) -> None:
    *steps, last = path.split(".")
    target: Any = raw
    for step in steps:
        target = target[int(step)] if isinstance(target, list) else target.setdefault(step, {})
    target[last] = value


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("devices.0.device", "gpu:0", ["devices[0].device", "'gpu:0'", "cpu|cuda"]),
        ("devices.0.memory", "1 GB", ["devices[0].memory", "'1 GB'", "KiB, MiB, GiB"]),
        ("devices.0.memory", "1MiB", ["devices[0].memory", "'1MiB'", "less than one slab"]),
        ("devices.0.memory", -5, ["devices[0].memory", "-5", "more than 0"]),
        ("devices.1.device", "cpu:0", ["devices[].device", "'cpu:0' appears twice"]),
        ("devices.0.colour", "red", ["unknown field `colour`", "devices[0]"]),
        ("models.0.placement", ["cpu:9"], ["models[0].placement", "'cpu:9'", "cpu:0, cpu:1"]),
        ("models.0.placement", [], ["models[0].placement", "length >= 1"]),
        ("models.0.placement", ["cpu:0", "cpu:0"], ["models[0].placement", "twice"]),
        ("models.0.path", "nowhere", ["models[0].path", "nowhere", "config.json"]),
        ("models.0.dtype", "int3", ["models[0].dtype", "'int3'"]),
        ("models.0.popularity", 0, ["models[0].popularity", "> 0", "value is 0"]),
        ("models.0.max_sequences", "many", ["models[0].max_sequences", "int", "'many'"]),
        ("models.0.step_tokens", 8, ["models[0].step_tokens", "8 is less than max_sequences (32)"]),
        ("http.host", "0.0.0.0", ["http.host", "'0.0.0.0'", "only loopback"]),
        ("http.port", 70000, ["http.port", "70000"]),
        ("endpoint", "tcp://0.0.0.0:5", ["endpoint", "refused", "loopback"]),
        ("queue_bound", 0, ["queue_bound", ">= 1"]),
        ("timeouts.silence", 1.5, ["timeouts.silence", "1.5 s", "two heartbeats"]),
        ("timeouts.drain", 0, ["timeouts.drain", "> 0"]),
        ("nonsense", 1, ["unknown field `nonsense`"]),
    ],
)
def test_a_bad_value_names_its_key_itself_and_what_is_allowed(
    raw: dict[str, Any], tmp_path: Path, path: str, value: Any, words: list[str]
) -> None:
    change(raw, path, value)
    with pytest.raises(ConfigurationError) as error:
        parse(raw, "x.yaml", tmp_path)
    message = str(error.value)
    assert "x.yaml" in message
    for word in words:
        assert word in message, message


def test_all_problems_are_told_at_once(raw: dict[str, Any], tmp_path: Path) -> None:
    change(raw, "http.host", "0.0.0.0")
    change(raw, "models.0.placement", ["cpu:9"])
    with pytest.raises(ConfigurationError) as error:
        parse(raw, "x.yaml", tmp_path)
    assert len(str(error.value).splitlines()) == 2


@pytest.mark.parametrize(("content", "words"), [("a: [", "not YAML"), ("- 1", "Expected `object`"), (None, "read")])
def test_a_file_that_is_no_configuration_says_so(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "x.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match=words):
        load(path)


def test_an_empty_file_is_the_coordinator_alone(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("")
    assert load(tmp_path / "x.yaml") == Configuration()


@pytest.mark.parametrize(("text", "size"), [("1KiB", 1024), ("1.5 GiB", 3 << 29), (7, 7), ("64", 64)])
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


def test_the_document_is_the_schema() -> None:
    """docs/configuration.md is made by `make docs`."""
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == document()

"""The configuration: bad values name their key, themselves and what is allowed; the document is the schema."""

import math
from pathlib import Path
from typing import Any

import pytest

from forebay.runtime.config import Configuration, ConfigurationError, load, parse, parse_bytes
from forebay.runtime.config_document import document
from forebay.transport.messages import Targets

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def raw(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "model").mkdir()
    (tmp_path / "circle").symlink_to("circle")
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
        ("devices.0.device", "cpu:0\n", ["devices[0].device", "control characters"]),
        ("devices.0.device", "cpu:00", ["devices[0].device", "'cpu:00'"]),
        ("devices.0.device", "cpu:10000", ["devices[0].device", "'cpu:10000'"]),
        ("devices.0.device", "cpu:\N{ARABIC-INDIC DIGIT TWO}", ["devices[0].device", "cpu|cuda"]),
        ("devices.0.device", " cpu:0", ["devices[0].device", "' cpu:0'"]),
        *(
            ("devices.0.memory", size, ["devices[0].memory", repr(size), "is no size"])
            for size in (
                "infGiB",
                "nanGiB",
                "1e400GiB",
                "1e3MiB",
                "",
                "MiB",
                "1_0MiB",
                "1 M iB",
                "\N{SUPERSCRIPT TWO}MiB",
            )
        ),
        ("devices.0.memory", "65TiB", ["devices[0].memory", "'65TiB'", "at most 64 TiB"]),
        ("devices.0.memory", 1 << 62, ["devices[0].memory", str(1 << 62), "at most 64 TiB"]),
        ("devices.0.memory", "64TiB", ["devices[0].memory", "more than this machine has"]),
        ("devices.0.slab", 4097, ["devices[0].slab", "4097", "no multiple of 4096"]),
        ("devices.0.slab", 4096, ["devices[0].slab", "262144 slabs", "larger slabs"]),
        ("devices.0.threads", 1025, ["devices[0].threads", "1025", "<= 1024"]),
        ("devices.0.memory", "1MiB", ["devices[0].memory", "'1MiB'", "less than one slab"]),
        ("devices.0.memory", -5, ["devices[0].memory", "-5", "more than 0"]),
        ("devices.1.device", "cpu:0", ["devices[].device", "'cpu:0' appears twice"]),
        ("devices.0.colour", "red", ["unknown field `colour`", "devices[0]"]),
        ("models.0.placement", ["cpu:9"], ["models[0].placement", "'cpu:9'", "cpu:0, cpu:1"]),
        ("models.0.placement", [], ["models[0].placement", "length >= 1"]),
        ("models.0.placement", ["cpu:0", "cpu:0"], ["models[0].placement", "twice"]),
        ("models.0.path", "nowhere", ["models[0].path", "nowhere", "config.json"]),
        ("models.0.path", "~nosuchuser/x", ["models[0].path", "'~nosuchuser/x'", "no such user"]),
        ("models.0.path", "circle", ["models[0].path", "circle"]),
        ("models.0.path", "x" * 300, ["models[0].path", "File name too long"]),
        ("models.0.path", "a\0b", ["models[0].path", r"'a\x00b'", "control characters"]),
        ("models.0.name", "\ud800", ["models[0].name", r"'\ud800'", "half a character"]),
        ("models.0.\udfff", 1, ["models[0]: the key", r"'\udfff'"]),
        ("models.0.dtype", "int3", ["models[0].dtype", "'int3'"]),
        ("models.0.popularity", 0, ["models[0].popularity", "> 0", "value is 0"]),
        *(
            (f"{section}.{key}", value, [key, repr(value), "no finite number"])
            for section, key in (("models.0", "popularity"), ("timeouts", "drain"), ("timeouts", "heartbeat"))
            for value in (math.inf, -math.inf, math.nan)
        ),
        ("models.0.popularity", 1e10, ["models[0].popularity", "<= 1000000000", "10000000000"]),
        ("models.0.max_context", 1 << 25, ["models[0].max_context", "<= 16777216", str(1 << 25)]),
        ("models.0.max_sequences", 1 << 17, ["models[0].max_sequences", "<= 65536"]),
        ("models.0.step_tokens", 1 << 21, ["models[0].step_tokens", "<= 1048576"]),
        ("models.0.step_tokens", True, ["models[0].step_tokens", "True"]),
        ("models.0.max_sequences", "many", ["models[0].max_sequences", "int", "'many'"]),
        ("models.0.step_tokens", 8, ["models[0].step_tokens", "8 is less than max_sequences (32)"]),
        ("http.host", "0.0.0.0", ["http.host", "'0.0.0.0'", "only loopback"]),
        ("http.host", "[::1]", ["http.host", "'[::1]'", "::1"]),
        ("http.host", "::1%lo", ["http.host", "'::1%lo'"]),
        ("http.body_limit", "huge", ["http.body_limit", "'huge'", "KiB, MiB, GiB"]),
        ("http.port", 70000, ["http.port", "70000"]),
        ("endpoint", "tcp://0.0.0.0:5", ["endpoint", "refused", "loopback"]),
        ("endpoint", "tcp://127.0.0.1:65536", ["endpoint", "'65536' is no port", "65535"]),
        ("endpoint", "tcp://127.0.0.1:-1", ["endpoint", "'-1' is no port"]),
        ("endpoint", "ipc:///no/such/folder/x.sock", ["endpoint", "/no/such/folder: No such file", "make it"]),
        ("endpoint", "ipc:///dev/null/x.sock", ["endpoint", "/dev/null is no folder"]),
        ("endpoint", "ipc:///etc/hostname", ["endpoint", "/etc/hostname is refused: there is a file"]),
        ("queue_bound", 1 << 25, ["queue_bound", "<= 16777216"]),
        ("timeouts.stop", 1e9, ["timeouts.stop", "<= 86400"]),
        ("queue_bound", 0, ["queue_bound", ">= 1"]),
        ("timeouts.silence", 1.5, ["timeouts.silence", "1.5 s", "two heartbeats"]),
        ("timeouts.drain", 0, ["timeouts.drain", "> 0"]),
        ("devices.0.spill", "65TiB", ["devices[0].spill", "at most 64 TiB"]),
        ("devices.0.spill", "64TiB", ["devices[0].spill", "more than this machine has"]),
        ("devices.0.fairness", "lottery", ["devices[0].fairness", "'lottery'"]),
        ("devices.0.weights", {"x": 0}, ["devices[0].weights", "0"]),
        ("devices.0.spill", "1KiB", ["spill", "'1KiB'", "less than one slab"]),
        ("devices.0.weights_memory", "2 PiB", ["devices[0].weights_memory", "'2 PiB' is no size"]),
        ("devices.0.weights_memory", "64TiB", ["devices[0].weights_memory", "more than this machine has"]),
        ("devices.0.weights_host", "1GiB", ["devices[0].weights_host", "without weights_memory", "leave this out"]),
        (
            "devices.0.weights_borrow",
            True,
            ["devices[0].weights_borrow", "a CPU device reads weights from their files"],
        ),
        ("devices.0.partition", "both", ["devices[0].partition", "'both'"]),
        ("devices.0.partition", "green", ["devices[0].partition", "'green' is for cuda devices", "cpu:0 has no SMs"]),
        ("devices.0.mps", "here", ["devices[0].mps", "for cuda devices"]),
        ("devices.0.mps_percentage", 101, ["devices[0].mps_percentage", "<= 100", "101"]),
        ("devices.0.mps_percentage", 0, ["devices[0].mps_percentage", ">= 1"]),
        ("devices.0.mps_percentage", 50, ["devices[0].mps_percentage", "50 needs `mps`"]),
        ("models.0.targets.tpot", -1, ["models[0].targets.tpot", ">= 0"]),
        ("costs", "missing.json", ["costs", "missing.json", "No such file"]),
        ("costs", "model/config.json", ["costs", "top level", "at least one member"]),
        ("lending.ttl", 0, ["lending.ttl", "> 0"]),
        ("lending.uids", [7], ["lending.uids", "[7]", "set endpoint to ipc://"]),
        ("lending.uids", [-1], ["lending.uids", ">= 0"]),
        ("lending.ledger", "no/such/ledger", ["lending.ledger", "no/such/ledger", "no folder that is there"]),
        ("lending.tokens", {"red": "short"}, ["lending.tokens.red", "8 or more printable ASCII characters"]),
        ("lending.tokens", {"red": "has a space"}, ["lending.tokens.red", "without spaces"]),
        ("lending.tokens", {"forebay": "long-enough"}, ["lending.tokens.forebay", "the server's own"]),
        ("lending.tokens", {"": "long-enough"}, ["lending.tokens.", "name is empty"]),
        ("lending.tokens", {"a": "the-same-one", "b": "the-same-one"}, ["lending.tokens.a", "the same token"]),
        ("http.token", "short", ["http.token", "8 or more"]),
        ("http.trust_user", True, ["http.trust_user", "http.token", "there is none"]),
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


def test_a_token_opens_http_beyond_loopback_and_is_never_repeated(raw: dict[str, Any], tmp_path: Path) -> None:
    change(raw, "http.host", "0.0.0.0")
    for section, tokens in (("http", {"token": "operators-own"}), ("lending", {"tokens": {"red": "red-token"}})):
        with_token = {**raw, section: {**raw.get(section, {}), **tokens}}
        assert parse(with_token, "x.yaml", tmp_path).http.host == "0.0.0.0"
    change(raw, "http.token", "se cret")
    with pytest.raises(ConfigurationError) as error:
        parse(raw, "x.yaml", tmp_path)
    assert "se cret" not in str(error.value)


def test_how_a_gpu_is_shared_is_in_its_settings(raw: dict[str, Any], tmp_path: Path) -> None:
    raw["devices"].append({"device": "cuda:0", "partition": "green", "mps": "mps", "mps_percentage": 40})
    raw["models"][0] |= {"placement": ["cuda:0"], "targets": {"tpot": 0.01}}
    raw["trace"] = "traces"
    configuration = parse(raw, "x.yaml", tmp_path)
    settings = configuration.device_settings(cores=1)
    assert (settings["cuda:0"].partition, settings["cpu:0"].partition) == ("green", "auto")
    assert settings["cuda:0"].targets == {"a": Targets(0.0, 0.01)}
    assert settings["cpu:0"].targets == {}
    assert configuration.devices[2].mps == str(tmp_path / "mps")
    assert configuration.trace == str(tmp_path / "traces")
    raw["policy"] = "fcfs"
    raw["devices"][2]["partition"] = "auto"
    assert parse(raw, "x.yaml", tmp_path).device_settings(cores=1)["cuda:0"].partition == "none"
    raw["devices"][2]["partition"] = "green"
    with pytest.raises(ConfigurationError, match="'green' shares the device, but policy 'fcfs' gives it to one model"):
        parse(raw, "x.yaml", tmp_path)


def test_what_a_device_lends_and_spills_is_in_its_settings(raw: dict[str, Any], tmp_path: Path) -> None:
    raw["devices"][0] |= {"lend": True, "spill": "64MiB", "fairness": "cfs"}
    raw["lending"] = {"ledger": "mine.ledger"}
    configuration = parse(raw, "x.yaml", tmp_path)
    settings = configuration.device_settings(cores=1)
    told = {name: (one.lend, one.spill_bytes, one.fairness) for name, one in settings.items()}
    assert told["cpu:0"] == (True, 64 << 20, "cfs")
    assert told["cpu:1"] == (False, 0, "fcfs")
    assert configuration.lending.ledger == str(tmp_path / "mine.ledger")


def test_what_weights_may_take_is_in_its_settings(raw: dict[str, Any], tmp_path: Path) -> None:
    raw["devices"] += [
        {"device": "cuda:0", "weights_memory": "1.5GiB", "weights_host": "2GiB"},
        {"device": "cuda:1", "weights_memory": "1GiB", "weights_borrow": True},
    ]
    settings = parse(raw, "x.yaml", tmp_path).device_settings(cores=1)
    told = {name: (one.weights_memory, one.weights_host, one.weights_borrow) for name, one in settings.items()}
    assert told["cpu:0"] == (0, 0, False)
    assert told["cuda:0"] == (3 << 29, 2 << 30, False)
    assert told["cuda:1"] == (1 << 30, 0, True)
    raw["devices"][-1]["weights_host"] = "1GiB"
    with pytest.raises(ConfigurationError, match="leave one of them out"):
        parse(raw, "x.yaml", tmp_path)


def test_all_problems_are_told_at_once(raw: dict[str, Any], tmp_path: Path) -> None:
    change(raw, "http.host", "0.0.0.0")
    change(raw, "models.0.placement", ["cpu:9"])
    with pytest.raises(ConfigurationError) as error:
        parse(raw, "x.yaml", tmp_path)
    assert len(str(error.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a: [", "not YAML"),
        ("- 1", "Expected `object`"),
        (None, "read"),
        ("http:\n  port: 1\n  host: localhost\n  port: 2\n", "line 4: key 'port' is there already, in line 2"),
        ("{queue_bound: 1, queue_bound: 1}", "line 1: key 'queue_bound' is there already, in line 1"),
        ("endpoint: 2024-99-99", "line 1: '2024-99-99' is no timestamp"),
        ("a: !!int x", "line 1: 'x' is no int"),
        ("a: !!bool perhaps", "line 1: 'perhaps' is no bool"),
        ("a: !!python/name:os.system x", "not YAML"),
        (f"a: {'9' * 5000}", "line 1: '999"),
        (f"queue_bound: 0x{'f' * 6000}", "queue_bound: 0xfff.* has 24000 bits"),
        ("[" * 1200, "nested too deeply"),
        ("#" * (1 << 20) + "\n", "larger than 1048576 bytes"),
        ("models: &a [*a]", "models"),
        ('a: "\\0"', "a: '.x00' holds control characters"),
    ],
)
def test_a_file_that_is_no_configuration_says_so(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "x.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match=words):
        load(path)


def test_a_folder_a_device_or_another_encoding_is_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes("http: {}".encode("utf-16"))
    for path, words in (
        (tmp_path, "Is a directory"),
        (Path("/dev/zero"), "larger than"),
        (tmp_path / "x.yaml", "not YAML.*utf-8"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            load(path)


def test_merged_sections_may_be_overridden(raw: dict[str, Any], tmp_path: Path) -> None:
    """A merge key brings a second value for a key on purpose."""
    (tmp_path / "x.yaml").write_text(
        "models:\n"
        "  - &first {name: a, path: model, placement: ['cpu:0']}\n"
        "  - &second {<<: *first, name: b}\n"
        "  - {<<: *second, name: c}\n"
        "devices: [{device: 'cpu:0'}]\n"
    )
    assert [model.name for model in load(tmp_path / "x.yaml").models] == ["a", "b", "c"]


def test_an_empty_file_is_the_coordinator_alone(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("")
    assert load(tmp_path / "x.yaml") == Configuration()


@pytest.mark.parametrize(("text", "size"), [("1KiB", 1024), ("1.5 GiB", 3 << 29), (7, 7), ("64", 64)])
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


def test_the_document_is_the_schema() -> None:
    """docs/configuration.md is made by `make docs`."""
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == document()

"""The configuration file: one schema, validated whole before anything starts. docs/configuration.md is made from it."""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from forebay.sched.policy import ALIASES
from forebay.transport.addresses import RefusedAddress, check_endpoint, check_http_host, runtime_folder
from forebay.transport.messages import DeviceSettings, ModelSpec

Seconds = Annotated[float, Meta(gt=0)]
Bytes = int | str

UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class ConfigurationError(ValueError):
    """Names the file, the key, the value and what is allowed."""


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all sections: an unknown key is an error."""


class DeviceSection(_Section, frozen=True):
    """One device, and with it one worker process."""

    device: Annotated[str, Meta(pattern=r"^(cpu|cuda):\d+$", description="`cpu:N` or `cuda:N`")]
    memory: Annotated[Bytes, Meta(description="capacity of the KV pool: bytes, or a number with KiB, MiB, GiB")] = (
        "1GiB"
    )
    slab: Annotated[Bytes, Meta(description="size of a slab, the piece in which pool memory changes hands")] = "32MiB"
    threads: Annotated[
        int, Meta(ge=0, description="CPU threads of a step; 0: the cores divided by the configured CPU devices")
    ] = 0
    spawn: Annotated[
        bool, Meta(description="start a worker for it; `false`: you start one by hand, and it is told what to load")
    ] = True


class ModelSection(_Section, frozen=True):
    """One model, under the name that requests use."""

    name: Annotated[str, Meta(min_length=1, description="the `model` of requests")]
    path: Annotated[
        str, Meta(min_length=1, description="folder in Hugging Face's layout, relative to the configuration file")
    ]
    placement: Annotated[
        tuple[str, ...],
        Meta(min_length=1, description="devices that hold a replica each, for example `[cpu:0, cpu:1]`"),
    ]
    popularity: Annotated[
        float, Meta(gt=0, description="share of the requests that it is expected to get, relative to the others")
    ] = 1.0
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], Meta(description="type of weights, KV cache and arithmetic")
    ] = "float32"
    max_context: Annotated[
        int, Meta(ge=0, description="tokens of prompt and answer together; 0: as many as the model was trained for")
    ] = 0
    max_sequences: Annotated[int, Meta(ge=1, description="requests that run at once on one device")] = 32
    step_tokens: Annotated[
        int, Meta(ge=1, description="tokens that one step computes; longer prompts are cut into such chunks")
    ] = 256


class HttpSection(_Section, frozen=True):
    """Where the front door listens."""

    host: Annotated[str, Meta(description="loopback only: 127.0.0.1, ::1 or localhost")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="0: any free port")] = 8080


class TimeoutSection(_Section, frozen=True):
    """Bounds in seconds."""

    heartbeat: Annotated[Seconds, Meta(description="how often every process says that it lives")] = 1.0
    silence: Annotated[Seconds, Meta(description="a process silent for so long is lost: its requests move")] = 10.0
    drain: Annotated[Seconds, Meta(description="after SIGTERM, how long running requests may take to end")] = 30.0
    stop: Annotated[Seconds, Meta(description="how long a process may take to end before it is killed")] = 5.0


class Configuration(_Section, frozen=True):
    """The whole file. Without a file: the coordinator alone, no devices and no models."""

    devices: Annotated[tuple[DeviceSection, ...], Meta(description="one worker process each")] = ()
    models: Annotated[tuple[ModelSection, ...], Meta(description="what is served")] = ()
    http: Annotated[HttpSection, Meta(description="the front door")] = HttpSection()
    timeouts: Annotated[TimeoutSection, Meta(description="bounds in seconds")] = TimeoutSection()
    queue_bound: Annotated[
        int, Meta(ge=1, description="requests of one model that may wait in the scheduler; more are answered 503")
    ] = 256
    policy: Annotated[
        Literal["adbs", "roundrobin", "temporal", "fcfs", "fix", "fix-adbs"],
        Meta(
            description="how models share a device: in turns with prefills and decodes side by side and memory quotas "
            "that follow the load (`adbs`) or stay (`fix-adbs`); in turns (`roundrobin`), with fixed quotas (`fix`); "
            "the oldest request's model alone (`temporal`, also called `fcfs`)"
        ),
    ] = "adbs"
    prefix_cache: Annotated[
        bool, Meta(description="keep the KV blocks of what was read and find them again by their text")
    ] = True
    endpoint: Annotated[
        str, Meta(description="where workers join: `ipc:///PATH` or `tcp://127.0.0.1:PORT`; empty: see the log line")
    ] = ""

    def device_settings(self, cores: int) -> dict[str, DeviceSettings]:
        """By device name; `cores` of this machine are divided among CPU devices that name no thread count."""
        cpus = sum(section.device.startswith("cpu:") for section in self.devices)
        return {
            section.device: DeviceSettings(
                parse_bytes(section.memory),
                parse_bytes(section.slab),
                section.threads or max(1, cores // max(1, cpus)),
                ALIASES.get(self.policy, self.policy),
                self.prefix_cache,
            )
            for section in self.devices
        }

    def control_endpoint(self) -> str:
        return self.endpoint or f"ipc://{runtime_folder()}/scheduler.sock"


def model_spec(section: ModelSection) -> ModelSpec:
    return ModelSpec(
        section.name,
        section.path,
        section.dtype,
        section.max_context,
        section.max_sequences,
        section.step_tokens,
        section.popularity,
    )


def parse_bytes(value: Bytes) -> int:
    """Raises ValueError that says what is allowed."""
    if isinstance(value, int):
        size = value
    else:
        number = value.rstrip("BKMGTi ")
        unit = value[len(number) :].strip()
        try:
            size = int(float(number) * UNITS[unit])
        except (ValueError, KeyError):
            raise ValueError(
                f"{value!r} is no size: write bytes, or a number with one of {', '.join(UNITS)[2:]}"
            ) from None
    if size <= 0:
        raise ValueError(f"{value!r} is no size: it must be more than 0 bytes")
    return size


def load(path: Path) -> Configuration:
    """Reads and checks a file. Paths of models become absolute. Raises ConfigurationError."""
    import yaml

    try:
        raw: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: not YAML: {error}") from error
    return parse({} if raw is None else raw, str(path), path.resolve().parent)


def parse(raw: Any, source: str, folder: Path) -> Configuration:
    """Checks a configuration as it was read; model paths are taken from `folder`. Raises ConfigurationError."""
    try:
        configuration = msgspec.convert(raw, Configuration)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{source}: {error}{_value_at(raw, str(error))}; see docs/configuration.md") from error
    models = tuple(
        msgspec.structs.replace(model, path=str((folder / Path(model.path).expanduser()).resolve()))
        for model in configuration.models
    )
    configuration = msgspec.structs.replace(configuration, models=models)
    problems = _problems(configuration)
    if problems:
        raise ConfigurationError("\n".join(f"{source}: {problem}" for problem in problems))
    return configuration


def _value_at(raw: Any, message: str) -> str:
    """The offending value, found by the path at the end of msgspec's message (`... - at `$.models[0].dtype``)."""
    _, _, path = message.rpartition(" - at `$")
    value = raw
    for part in path.rstrip("`").replace("[", ".[").split(".")[1:]:
        try:
            value = value[int(part[1:-1])] if part.startswith("[") else value[part]
        except (KeyError, IndexError, TypeError, ValueError):
            return ""
    return f" (the value is {value!r})" if path and not isinstance(value, dict | list) else ""


def _problems(configuration: Configuration) -> list[str]:
    """Everything that no single field can know, all at once."""
    found: list[str] = []
    devices = [section.device for section in configuration.devices]
    names = [section.name for section in configuration.models]
    for kind, values in (("devices[].device", devices), ("models[].name", names)):
        found += [f"{kind}: {value!r} appears twice" for value in sorted({v for v in values if values.count(v) > 1})]
    for index, device in enumerate(configuration.devices):
        sizes: dict[str, int] = {}
        for key in ("memory", "slab"):
            try:
                sizes[key] = parse_bytes(getattr(device, key))
            except ValueError as error:
                found.append(f"devices[{index}].{key}: {error}")
        if len(sizes) == 2 and sizes["memory"] < sizes["slab"]:
            found.append(
                f"devices[{index}].memory: {device.memory!r} is less than one slab ({device.slab!r}); "
                "raise memory or lower slab"
            )
    for index, model in enumerate(configuration.models):
        key = f"models[{index}]"
        found += [
            f"{key}.placement: {gpu!r} is not among the devices ({', '.join(devices) or 'none are configured'})"
            for gpu in model.placement
            if gpu not in devices
        ]
        if len(set(model.placement)) < len(model.placement):
            found.append(f"{key}.placement: {list(model.placement)!r} names a device twice; one replica a device")
        if model.step_tokens < model.max_sequences:
            found.append(
                f"{key}.step_tokens: {model.step_tokens} is less than max_sequences ({model.max_sequences}): "
                "a step could not hold one token of each"
            )
        if not Path(model.path, "config.json").is_file():
            found.append(
                f"{key}.path: {model.path!r} has no config.json; give a folder in Hugging Face's layout "
                "(`make model` converts the small model that the examples use)"
            )
    for key, check, value in (
        ("http.host", check_http_host, configuration.http.host),
        ("endpoint", check_endpoint, configuration.endpoint or "ipc:///unused"),
    ):
        try:
            check(value)
        except RefusedAddress as error:
            found.append(f"{key}: {error}")
    if configuration.timeouts.silence <= 2 * configuration.timeouts.heartbeat:
        found.append(
            f"timeouts.silence: {configuration.timeouts.silence:g} s must be more than two heartbeats "
            f"({configuration.timeouts.heartbeat:g} s each), or living processes count as lost"
        )
    return found

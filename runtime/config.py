"""The configuration file, validated whole before anything starts: what its schema (config_schema.py) cannot say of a
single field is checked here, against the other fields and against this machine.
"""

import math
import mmap
import os
import resource
import unicodedata
from pathlib import Path
from typing import Any

import msgspec

from forebay.runtime.config_schema import (
    Configuration,
    ConfigurationError,
    DeviceSection,
    HttpSection,
    LendingSection,
    ModelSection,
    TargetSection,
    TimeoutSection,
    model_spec,
    parse_bytes,
)
from forebay.sched.cost_table import CostError, parse_costs
from forebay.sched.policy import ALIASES
from forebay.transport.addresses import RefusedAddress, check_endpoint, check_http_host, check_socket_path

__all__ = [
    "Configuration",
    "ConfigurationError",
    "DeviceSection",
    "HttpSection",
    "LendingSection",
    "ModelSection",
    "TargetSection",
    "TimeoutSection",
    "load",
    "model_spec",
    "parse",
    "parse_bytes",
]

LARGEST_INTEGER_BITS = 63

OTHER_DESCRIPTORS = 256
"""Open files of a worker that are no slabs."""

SHORTEST_TOKEN = 8
"""Characters of a bearer token."""

RESERVED_TENANT = "forebay"
"""What the server's own workers are."""

MOST_SLABS = 32768
"""Mappings of a worker's pool; the kernel's usual bound for a process is twice that (vm.max_map_count)."""


def load(path: Path) -> Configuration:
    """Reads and checks a file. Paths of models become absolute. Raises ConfigurationError."""
    from forebay.runtime.strict_yaml import UnusableYaml, read_yaml  # YAML is not among the base dependencies

    try:
        raw = read_yaml(path)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error
    except UnusableYaml as error:
        raise ConfigurationError(f"{path}: {error}") from error
    return parse({} if raw is None else raw, str(path), path.resolve().parent)


def parse(raw: Any, source: str, folder: Path) -> Configuration:
    """Checks a configuration as it was read; model paths are taken from `folder`. Raises ConfigurationError."""
    found = _unusable(raw, "", set())
    if found:
        raise ConfigurationError("\n".join(f"{source}: {problem}" for problem in found))
    try:
        configuration = msgspec.convert(raw, Configuration)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{source}: {error}{_value_at(raw, str(error))}; see docs/configuration.md") from error
    models = tuple(
        msgspec.structs.replace(model, path=_model_folder(model.path, folder)) for model in configuration.models
    )
    lending = configuration.lending
    if lending.ledger:
        lending = msgspec.structs.replace(lending, ledger=str(folder / Path(lending.ledger).expanduser()))
    devices = tuple(
        msgspec.structs.replace(device, mps=_beside(device.mps, folder)) for device in configuration.devices
    )
    configuration = msgspec.structs.replace(
        configuration,
        models=models,
        lending=lending,
        devices=devices,
        costs=_beside(configuration.costs, folder),
        trace=_beside(configuration.trace, folder),
    )
    found = _problems(configuration)
    if found:
        raise ConfigurationError("\n".join(f"{source}: {problem}" for problem in found))
    return configuration


def _beside(path: str, folder: Path) -> str:
    """An absolute path for one that is relative to the configuration file; empty stays empty."""
    return os.path.expanduser(folder / path) if path else ""


def _unusable(raw: Any, key: str, seen: set[int]) -> list[str]:
    """Values that no field may have, wherever they are: what is no number, and text that could not be passed on to
    another process or written to a log."""
    if isinstance(raw, float) and not math.isfinite(raw):
        return [f"{key or 'top level'}: {raw!r} is no finite number"]
    if isinstance(raw, int) and raw.bit_length() > LARGEST_INTEGER_BITS:
        return [f"{key or 'top level'}: {hex(raw)[:20]}… has {raw.bit_length()} bits; no value here has more than 63"]
    if isinstance(raw, str) and any(unicodedata.category(character) in ("Cc", "Cs") for character in raw):
        return [f"{key or 'top level'}: {raw!r} holds control characters or half a character; allowed is plain text"]
    if not isinstance(raw, dict | list) or id(raw) in seen:
        return []
    seen.add(id(raw))
    found: list[str] = []
    if isinstance(raw, dict):
        for name, value in raw.items():
            found += _unusable(name, f"{key}: the key", seen)
            found += _unusable(value, f"{key}.{name}".lstrip(".") if isinstance(name, str) else key, seen)
    else:
        for index, value in enumerate(raw):
            found += _unusable(value, f"{key}[{index}]", seen)
    return found


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


def _model_folder(path: str, folder: Path) -> str:
    """The absolute path of a model; where it cannot be found out, the path itself, of which `_of_model` then tells."""
    try:
        return str((folder / Path(path).expanduser()).resolve())
    except (RuntimeError, OSError):  # an unknown user's home, or links in a circle
        return path


def _problems(configuration: Configuration) -> list[str]:
    """All of them at once, each with its key, the value and what is allowed."""
    devices = [section.device for section in configuration.devices]
    names = [section.name for section in configuration.models]
    found = [
        f"{kind}: {value!r} appears twice"
        for kind, values in (("devices[].device", devices), ("models[].name", names))
        for value in sorted({value for value in values if values.count(value) > 1})
    ]
    for index, device in enumerate(configuration.devices):
        found += [f"devices[{index}].{problem}" for problem in _of_device(device)]
    for index, model in enumerate(configuration.models):
        found += [f"models[{index}].{problem}" for problem in _of_model(model, devices)]
    found += _of_lending(configuration)
    found += _of_lanes(configuration)
    try:
        check_http_host(configuration.http.host, bool(configuration.http.token or configuration.lending.tokens))
    except RefusedAddress as error:
        found.append(f"http.host: {error}")
    try:
        parse_bytes(configuration.http.body_limit)
    except ValueError as error:
        found.append(f"http.body_limit: {error}")
    if configuration.endpoint:
        try:
            check_endpoint(configuration.endpoint)
            if configuration.endpoint.startswith("ipc://"):
                check_socket_path(Path(configuration.endpoint.removeprefix("ipc://")))
        except RefusedAddress as error:
            found.append(f"endpoint: {error}")
    if configuration.timeouts.silence <= 2 * configuration.timeouts.heartbeat:
        found.append(
            f"timeouts.silence: {configuration.timeouts.silence:g} s must be more than two heartbeats "
            f"({configuration.timeouts.heartbeat:g} s each), or living processes count as lost"
        )
    return found


def _of_lanes(configuration: Configuration) -> list[str]:
    """Partitions and what they go by."""
    temporal = ALIASES.get(configuration.policy, configuration.policy) == "temporal"
    found = [
        f"devices[{index}].partition: {device.partition!r} shares the device, but policy {configuration.policy!r} "
        "gives it to one model at a time: use auto or none, or another policy"
        for index, device in enumerate(configuration.devices)
        if temporal and device.partition in ("streams", "green")
    ]
    if configuration.costs:
        try:
            parse_costs(Path(configuration.costs).read_bytes(), configuration.costs)
        except OSError as error:
            found.append(f"costs: {configuration.costs!r} cannot be read: {error.strerror}")
        except CostError as error:
            found.append(f"costs: {error}")
    return found


def _of_lending(configuration: Configuration) -> list[str]:
    section = configuration.lending
    tokens = {f"lending.tokens.{tenant}": token for tenant, token in section.tokens.items()}
    found = [
        f"{key}: the tenant's name is empty, or kept for the server's own ({RESERVED_TENANT})"
        for key in tokens
        if key.partition("tokens.")[2] in ("", RESERVED_TENANT)
    ]
    if configuration.http.token:
        tokens["http.token"] = configuration.http.token
    elif configuration.http.trust_user:
        found.append(
            "http.trust_user: true is about requests with http.token, and there is none; set one, or leave it out"
        )
    values = list(tokens.values())
    for key, token in tokens.items():
        # The value itself is a secret, and is not repeated.
        if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
            found.append(
                f"{key}: a token has {SHORTEST_TOKEN} or more printable ASCII characters without spaces "
                "(`openssl rand -hex 32` makes a good one)"
            )
        if values.count(token) > 1:
            found.append(f"{key}: another key has the same token; each has its own")
    if section.uids and not configuration.endpoint.startswith("ipc://"):
        found.append(
            f"lending.uids: {list(section.uids)} could not reach this scheduler: set endpoint to ipc:// and a path in "
            "a folder that they can enter"
        )
    if section.ledger and not Path(section.ledger).parent.is_dir():
        found.append(f"lending.ledger: {section.ledger!r} is in no folder that is there; make it, or name another path")
    return found


def _of_device(section: DeviceSection) -> list[str]:
    sizes: dict[str, int] = {"spill": 0}
    found = []
    optional = ("spill", "weights_memory", "weights_host", "reserve")
    for key in ("memory", "slab", *(key for key in optional if getattr(section, key))):
        try:
            sizes[key] = parse_bytes(getattr(section, key))
        except ValueError as error:
            found.append(f"{key}: {error}")
    if found:
        return found
    memory, slab = sizes["memory"], sizes["slab"]
    if slab % mmap.PAGESIZE:
        found.append(f"slab: {section.slab!r} is no multiple of {mmap.PAGESIZE} bytes, this machine's page")
    if memory < slab:
        found.append(f"memory: {section.memory!r} is less than one slab ({section.slab!r}); raise memory or lower slab")
    machine = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    if section.device.startswith("cpu:") and memory > machine:
        found.append(f"memory: {section.memory!r} is more than this machine has ({machine >> 20} MiB)")
    if section.device.startswith("cpu:"):
        found += [
            f"{key}: {value!r} is for cuda devices; {section.device} has no SMs to share"
            for key, value in (("mps", section.mps), ("partition", section.partition))
            if value not in ("", "auto", "none")
        ]
    if section.mps_percentage != 100 and not section.mps:
        found.append(f"mps_percentage: {section.mps_percentage} needs `mps`, the folder of an MPS daemon")
    if 0 < sizes["spill"] < slab:
        found.append(f"spill: {section.spill!r} is less than one slab ({section.slab!r}); raise spill or lower slab")
    if section.device.startswith("cpu:") and sizes.get("weights_memory", 0) > machine:
        found.append(f"weights_memory: {section.weights_memory!r} is more than this machine has ({machine >> 20} MiB)")
    if sizes.get("weights_host", 0) > machine:
        found.append(f"weights_host: {section.weights_host!r} is more than this machine has ({machine >> 20} MiB)")
    for key in ("weights_host", "weights_borrow"):
        if getattr(section, key) and not section.weights_memory:
            found.append(f"{key}: without weights_memory no weights leave the device; set that, or leave this out")
        if getattr(section, key) and section.device.startswith("cpu:"):
            found.append(f"{key}: a CPU device reads weights from their files again; leave this out")
    if section.weights_host and section.weights_borrow:
        found.append("weights_host: with weights_borrow the host only has what nobody lends; leave one of them out")
    if sizes["spill"] > machine:
        found.append(f"spill: {section.spill!r} is more than this machine has ({machine >> 20} MiB)")
    _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        descriptors = MOST_SLABS + OTHER_DESCRIPTORS
    most = min(MOST_SLABS, descriptors - OTHER_DESCRIPTORS)
    if memory // slab > most:
        found.append(
            f"slab: {section.slab!r} cuts {section.memory!r} into {memory // slab} slabs; at most {most} are allowed, "
            "for each is an open file of the worker (ulimit -Hn) and a mapping: take larger slabs"
        )
    return found


def _of_model(section: ModelSection, devices: list[str]) -> list[str]:
    found = [
        f"placement: {gpu!r} is not among the devices ({', '.join(devices) or 'none are configured'})"
        for gpu in section.placement
        if gpu not in devices
    ]
    if len(set(section.placement)) < len(section.placement):
        found.append(f"placement: {list(section.placement)!r} names a device twice; one replica a device")
    if section.step_tokens < section.max_sequences:
        found.append(
            f"step_tokens: {section.step_tokens} is less than max_sequences ({section.max_sequences}): "
            "a step could not hold one token of each"
        )
    if not section.path.startswith("/"):
        found.append(f"path: {section.path!r} leads nowhere: there is no such user, or its links form a circle")
        return found
    try:
        readable = Path(section.path, "config.json").is_file()
    except OSError as error:
        found.append(f"path: {section.path!r} cannot be read: {error.strerror}")
    else:
        if not readable:
            found.append(
                f"path: {section.path!r} has no config.json; give a folder in Hugging Face's layout "
                "(`make model` converts the small model that the examples use)"
            )
    return found

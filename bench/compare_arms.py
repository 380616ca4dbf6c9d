"""The arms of a comparison: which servers each starts, with which words. Starts nothing itself."""

import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from forebay.bench.compare_setup import ComparedModel, Setup
from forebay.bench.errors import BenchError
from forebay.bench.server_process import scheduler_command

QUEUE_BOUND = 100_000
"""As the others refuse nothing either."""

VLLM_COMMAND = (
    "{python} -m vllm.entrypoints.openai.api_server --host 127.0.0.1 --port {port} --model {folder} "
    "--served-model-name {name} --dtype {dtype} --load-format {load_format} --max-model-len {max_context} "
    "--max-num-seqs {max_sequences} --gpu-memory-utilization {utilization}"
)
"""One stock engine. What stands in braces is filled in, `utilization` with the engine's part of the memory."""


@dataclass(frozen=True)
class Ours:
    """One Forebay: its policy, how prefills and decodes share the SMs, and whether every model has its own device."""

    policy: str
    partition: str
    spread: bool = False


@dataclass(frozen=True)
class Theirs:
    """One vLLM a model; with `mps` all of them under an MPS daemon of their own."""

    mps: bool


ARMS: Mapping[str, Ours | Theirs] = {
    "vllm": Theirs(mps=False),
    "vllm-mps": Theirs(mps=True),
    "temporal": Ours("temporal", "none"),
    "spatial": Ours("adbs", "auto", spread=True),
    "adbs": Ours("adbs", "green"),
    "streams": Ours("adbs", "streams"),
    "auto": Ours("adbs", "auto"),
}
"""By name, in the order of tables."""

EXPLAINED: Mapping[str, str] = {
    "vllm": "stock vLLM, one engine a model, static memory split, time-sliced by the driver",
    "vllm-mps": "the same under MPS, no percentage caps",
    "temporal": "Forebay, the oldest request's model alone, no overlap",
    "spatial": "Forebay, each model alone on a device",
    "adbs": "Forebay, MuxServe's policy, fixed splits of the SMs",
    "streams": "Forebay, prefills and decodes always overlap",
    "auto": "Forebay, chooses at run time",
}


@dataclass(frozen=True)
class Launch:
    """One server to start. `url` is where one that is not ours will answer; ours tells. `stop_s`: how long it may take
    to end when asked."""

    command: Sequence[str]
    models: Sequence[str]
    log: Path
    url: str | None
    environment: Mapping[str, str]
    stop_s: float


@dataclass(frozen=True)
class VllmOptions:
    """`python` has vLLM; `command` is VLLM_COMMAND or another one; with `kv_bytes` each engine is told how large its KV
    cache is, does not measure the memory, and so all may start at once."""

    python: Path
    command: str = VLLM_COMMAND
    more: str = ""
    kv_bytes: int = 0

    def words(self, setup: Setup, model: ComparedModel, port: int) -> list[str]:
        """Raises BenchError for a template that cannot be filled in."""
        template = f"{self.command} {self.more}" + (
            f" --kv-cache-memory-bytes {self.kv_bytes}" if self.kv_bytes else ""
        )
        known: dict[str, object] = {
            "python": self.python,
            "port": port,
            "folder": model.folder,
            "name": model.name,
            "dtype": setup.dtype,
            "load_format": setup.load_format,
            "max_context": setup.max_context,
            "max_sequences": setup.max_sequences,
            "utilization": f"{setup.utilization / len(setup.models):.4g}",
        }
        try:
            return [word.format(**known) for word in shlex.split(template)]
        except (KeyError, IndexError, ValueError) as error:
            raise BenchError(
                f"--vllm-command {self.command!r}: cannot be filled in ({error}); in braces may stand "
                f"{', '.join(known)}"
            ) from error


def our_launch(arm: str, kind: Ours, setup: Setup, folder: Path) -> Launch:
    """Writes the arm's configuration beside its log. Raises BenchError as `configuration` does."""
    path = folder / f"{arm}.yaml"
    path.write_text(yaml.safe_dump(configuration(arm, kind, setup), sort_keys=False))
    return Launch(
        scheduler_command(path), [model.name for model in setup.models], folder / f"{arm}.log", None, {}, stop_s=45
    )


def configuration(arm: str, kind: Ours, setup: Setup) -> dict[str, Any]:
    """As it stands in the YAML file. Raises BenchError."""
    if kind.spread and len(setup.devices) < len(setup.models):
        raise BenchError(
            f"skipped: {arm} needs a device for each of the {len(setup.models)} models, --devices names "
            f"{len(setup.devices)}"
        )
    places = setup.devices if kind.spread else [setup.devices[0]] * len(setup.models)
    used = list(dict.fromkeys(places[: len(setup.models)]))
    gpu = setup.devices[0].startswith("cuda")
    found: dict[str, Any] = {
        "policy": kind.policy,
        "queue_bound": QUEUE_BOUND,
        "http": {"body_limit": "64MiB"},
        "devices": [
            {
                "device": device,
                "memory": setup.kv_bytes,
                "slab": "256MiB" if gpu else "32MiB",
                **({"partition": kind.partition} if gpu else {}),
            }
            for device in used
        ],
        "models": [
            {
                "name": model.name,
                "path": model.folder,
                "placement": [place],
                "popularity": model.popularity,
                "dtype": setup.dtype,
                "max_context": setup.max_context,
                "max_sequences": setup.max_sequences,
                "step_tokens": setup.step_tokens,
                **({} if setup.load_format == "auto" else {"load_format": setup.load_format}),
            }
            for model, place in zip(setup.models, places, strict=False)
        ],
    }
    for key, value in setup.ours:
        section, dot, name = key.partition(".")
        sections = found[f"{section}s"] if dot and section in ("device", "model") else [found]
        for one in sections:
            one[name if sections[0] is not found else key] = yaml.safe_load(value)
    return found


def vllm_launches(
    arm: str, setup: Setup, options: VllmOptions, folder: Path, environment: Mapping[str, str]
) -> list[Launch]:
    """Raises BenchError."""
    if "{python}" in options.command and not os.access(options.python, os.X_OK):
        raise BenchError(f"--vllm {options.python}: no program; the Python of an environment with vLLM is needed")
    gpu = setup.devices[0].partition(":")
    visible = {"CUDA_VISIBLE_DEVICES": gpu[2]} if gpu[0] == "cuda" else {}
    launches = []
    for model in setup.models:
        port = free_port()
        launches.append(
            Launch(
                options.words(setup, model, port),
                [model.name],
                folder / f"{arm}-{model.name}.log",
                f"http://127.0.0.1:{port}",
                {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **visible, **environment},
                stop_s=30,
            )
        )
    return launches


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def default_python() -> Path:
    return Path(sys.executable)

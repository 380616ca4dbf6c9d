"""The schema of the configuration file: sections, their fields with bounds and meaning, and what a size is.
docs/configuration.md is made from it.
"""

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from forebay.sched.policy import ALIASES
from forebay.transport.addresses import runtime_folder
from forebay.transport.messages import DeviceSettings, ModelSpec, Targets

Seconds = Annotated[float, Meta(gt=0, le=86400)]
Bytes = int | str

UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
GPU_RESERVE = 512 << 20
"""What `reserve` is on a GPU unless it is given: room for a context, or a large step, of another process."""

LARGEST_SIZE = 64 << 40
"""Bytes; no device has more."""


class ConfigurationError(ValueError):
    """Names the file, the key, the value and what is allowed."""


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all sections: an unknown key is an error."""


class DeviceSection(_Section, frozen=True):
    """One device, and with it one worker process."""

    device: Annotated[str, Meta(pattern=r"\A(cpu|cuda):(0|[1-9][0-9]{0,3})\Z", description="`cpu:N` or `cuda:N`")]
    memory: Annotated[Bytes, Meta(description="capacity of the KV pool: bytes, or a number with KiB, MiB, GiB")] = (
        "1GiB"
    )
    slab: Annotated[
        Bytes, Meta(description="size of a slab, the piece in which pool memory changes hands: whole pages")
    ] = "32MiB"
    threads: Annotated[
        int,
        Meta(ge=0, le=1024, description="CPU threads of a step; 0: the cores divided by the configured CPU devices"),
    ] = 0
    spawn: Annotated[
        bool, Meta(description="start a worker for it; `false`: you start one by hand, and it is told what to load")
    ] = True
    lend: Annotated[
        bool, Meta(description="lend pool memory that is idle to the other devices, and take it back under load")
    ] = False
    spill: Annotated[
        Bytes,
        Meta(description="host memory for the KV blocks of requests that give way; 0: none, they are computed again"),
    ] = 0
    fairness: Annotated[
        Literal["fcfs", "cfs", "vtc"],
        Meta(
            description="which requests of a model run when they do not all fit: the first to come (`fcfs`), in turns, "
            "the least served first (`cfs`), or so that tenants get equal shares (`vtc`)"
        ),
    ] = "fcfs"
    weights: Annotated[
        dict[str, Annotated[float, Meta(gt=0)]],
        Meta(
            description="shares under `vtc` by tenant: whose token (`lending.tokens`) a request carries; where no "
            "token is needed, or with the operator's and `http.trust_user`, the `user` that it names, else its API "
            "key; 1 for those that are not listed"
        ),
    ] = {}
    weights_memory: Annotated[
        Bytes,
        Meta(
            description="device memory for models' weights where not all of them fit: idle models' weights make room "
            "for those that requests ask for, and come back on demand; 0: all stay"
        ),
    ] = 0
    weights_host: Annotated[
        Bytes,
        Meta(description="host memory for the weights that are away from a CUDA device; 0: as much as they need"),
    ] = 0
    weights_borrow: Annotated[
        bool,
        Meta(
            description="keep the weights that are away from a CUDA device in memory that other devices lend (`lend`), "
            "and in the host's where there is none"
        ),
    ] = False
    reserve: Annotated[
        Bytes,
        Meta(
            description="memory of the device that is to stay free: where other processes take it, the KV pool gives "
            "idle slabs back to the device, and takes them again when there is room; 0: 512MiB on a GPU, none on a CPU "
            "device"
        ),
    ] = 0
    partition: Annotated[
        Literal["auto", "streams", "green", "none"],
        Meta(
            description="how prefills and decodes share a GPU: side by side (`streams`), with prefills bound to 55 % "
            "of the SMs meanwhile (`green`), one after the other (`none`, and what a CPU device always does), or "
            "whichever the `targets` of the models allow (`auto`)"
        ),
    ] = "auto"
    mps: Annotated[
        str,
        Meta(
            description="folder of an MPS daemon (`forebay mps start DIR`) through which the worker shares its GPU "
            "with other processes, relative to the configuration file; empty: none"
        ),
    ] = ""
    mps_percentage: Annotated[
        int, Meta(ge=1, le=100, description="the largest part of the GPU's SMs that the worker may use, under `mps`")
    ] = 100


class TargetSection(_Section, frozen=True):
    """How fast requests of a model are to be answered; what `auto` (`devices[].partition`) keeps to."""

    ttft: Annotated[
        float,
        Meta(ge=0, le=86400, description="seconds to the first token; 0: five times what the prompt takes alone"),
    ] = 0.0
    tpot: Annotated[
        float,
        Meta(ge=0, le=86400, description="seconds between two tokens; 0: five times what a decode step takes alone"),
    ] = 0.0


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
        float,
        Meta(gt=0, le=1e9, description="share of the requests that it is expected to get, relative to the others"),
    ] = 1.0
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], Meta(description="type of weights, KV cache and arithmetic")
    ] = "float32"
    max_context: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 24,
            description="tokens of prompt and answer together; 0: as many as the model was trained for",
        ),
    ] = 0
    max_sequences: Annotated[int, Meta(ge=1, le=1 << 16, description="requests that run at once on one device")] = 32
    step_tokens: Annotated[
        int,
        Meta(ge=1, le=1 << 20, description="tokens that one step computes; longer prompts are cut into such chunks"),
    ] = 256
    targets: Annotated[TargetSection, Meta(description="how fast its requests are to be answered")] = TargetSection()
    load_format: Annotated[
        Literal["auto", "dummy"],
        Meta(
            description="`auto` reads the weights; `dummy` makes up small random ones of the shapes that config.json "
            "names, the same each time, for benchmarks"
        ),
    ] = "auto"


class HttpSection(_Section, frozen=True):
    """Where the front door listens."""

    host: Annotated[
        str, Meta(description="127.0.0.1, ::1 or localhost; any other address only where requests need a token")
    ] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="0: any free port")] = 8080
    body_limit: Annotated[Bytes, Meta(description="largest body of a request; a larger one is answered 413")] = "4MiB"
    token: Annotated[
        str,
        Meta(
            description="the operator's bearer token: with it, or with `lending.tokens`, every request but /healthz "
            "needs one; empty: none"
        ),
    ] = ""
    trust_user: Annotated[
        bool,
        Meta(
            description="requests with `token` run on the account of the `user` that they name (for a gateway that "
            "sets it itself); false: all of them on one account, so that nobody gains by inventing users"
        ),
    ] = False


class TimeoutSection(_Section, frozen=True):
    """Bounds in seconds."""

    heartbeat: Annotated[Seconds, Meta(description="how often every process says that it lives")] = 1.0
    silence: Annotated[Seconds, Meta(description="a process silent for so long is lost: its requests move")] = 10.0
    drain: Annotated[Seconds, Meta(description="after SIGTERM, how long running requests may take to end")] = 30.0
    stop: Annotated[Seconds, Meta(description="how long a process may take to end before it is killed")] = 5.0


class LendingSection(_Section, frozen=True):
    """How GPUs lend each other memory."""

    ttl: Annotated[
        Seconds,
        Meta(description="a party silent for so long loses its leases; leases wait so long for theirs after a restart"),
    ] = 10.0
    ledger: Annotated[
        str,
        Meta(description="file of the ledger, relative to the configuration file; empty: beside the socket"),
    ] = ""
    uids: Annotated[
        tuple[Annotated[int, Meta(ge=0, lt=1 << 32)], ...],
        Meta(
            description="other users whose processes may lend and borrow (containers that share a mount); needs "
            "`endpoint` in a folder that they can enter"
        ),
    ] = ()
    tokens: Annotated[
        dict[str, str],
        Meta(description="bearer tokens by tenant; with any, parties need one, and a tenant's leases are its own"),
    ] = msgspec.field(default_factory=dict)


class Configuration(_Section, frozen=True):
    """The whole file. Without a file: the coordinator alone, no devices and no models."""

    devices: Annotated[tuple[DeviceSection, ...], Meta(description="one worker process each")] = ()
    models: Annotated[tuple[ModelSection, ...], Meta(description="what is served")] = ()
    http: Annotated[HttpSection, Meta(description="the front door")] = HttpSection()
    timeouts: Annotated[TimeoutSection, Meta(description="bounds in seconds")] = TimeoutSection()
    lending: Annotated[LendingSection, Meta(description="memory on loan between GPUs")] = LendingSection()
    queue_bound: Annotated[
        int,
        Meta(
            ge=1, le=1 << 24, description="requests of one model that may wait in the scheduler; more are answered 503"
        ),
    ] = 256
    policy: Annotated[
        Literal["adbs", "roundrobin", "temporal", "fcfs", "fix", "fix-adbs"],
        Meta(
            description="how models share a device: the model whose answer is due first, with memory quotas that "
            "follow the load (`adbs`) or stay (`fix-adbs`); in turns (`roundrobin`), with fixed quotas (`fix`); "
            "the oldest request's model alone (`temporal`, also called `fcfs`)"
        ),
    ] = "adbs"
    prefix_cache: Annotated[
        bool, Meta(description="keep the KV blocks of what was read and find them again by their text")
    ] = True
    endpoint: Annotated[
        str, Meta(description="where workers join: `ipc:///PATH` or `tcp://127.0.0.1:PORT`; empty: see the log line")
    ] = ""

    costs: Annotated[
        str,
        Meta(
            description="cost file (`python -m bench.profile`) that `auto` reads, relative to the configuration file; "
            "empty: it learns from the steps"
        ),
    ] = ""
    trace: Annotated[
        str,
        Meta(
            description="folder in which each worker writes its steps and copies for Perfetto or chrome://tracing, "
            "relative to the configuration file; empty: none"
        ),
    ] = ""

    def device_settings(self, cores: int) -> dict[str, DeviceSettings]:
        """By device name; `cores` of this machine are divided among CPU devices that name no thread count."""
        # Under temporal a device is one model's at a time, so there is nothing to share out.
        whole = ALIASES.get(self.policy, self.policy) == "temporal"
        cpus = sum(section.device.startswith("cpu:") for section in self.devices)
        return {
            section.device: DeviceSettings(
                parse_bytes(section.memory),
                parse_bytes(section.slab),
                section.threads or max(1, cores // max(1, cpus)),
                ALIASES.get(self.policy, self.policy),
                self.prefix_cache,
                section.lend,
                parse_bytes(section.spill) if section.spill else 0,
                section.fairness,
                section.weights,
                "none" if whole and section.partition == "auto" else section.partition,
                {
                    model.name: Targets(model.targets.ttft, model.targets.tpot)
                    for model in self.models
                    if section.device in model.placement and model.targets != TargetSection()
                },
                self.costs,
                weights_memory=parse_bytes(section.weights_memory) if section.weights_memory else 0,
                weights_host=parse_bytes(section.weights_host) if section.weights_host else 0,
                weights_borrow=section.weights_borrow,
                reserve=parse_bytes(section.reserve)
                if section.reserve
                else GPU_RESERVE * section.device.startswith("cuda:"),
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
        section.load_format,
    )


def parse_bytes(value: Bytes) -> int:
    """Raises ValueError that says what is allowed."""
    if isinstance(value, int):
        size = value
    else:
        match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) *([A-Za-z]*)", value)
        if match is None or match[2] not in UNITS:
            raise ValueError(f"{value!r} is no size: write bytes, or a number with one of {', '.join(UNITS)[2:]}")
        size = int(float(match[1]) * UNITS[match[2]])
    if not 0 < size <= LARGEST_SIZE:
        raise ValueError(f"{value!r} is no size: it must be more than 0 bytes, and at most {LARGEST_SIZE >> 40} TiB")
    return size

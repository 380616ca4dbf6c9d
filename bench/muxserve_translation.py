"""From MuxServe's configuration to Forebay's, as plain values. Starts nothing and reads no file."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from forebay.bench.errors import BenchError
from forebay.bench.muxserve_config import MuxServeConfig, MuxServeModel
from forebay.bench.workload_file import Workload

DeviceKind: TypeAlias = Literal["cpu", "cuda"]

POLICIES = ("adbs", "roundrobin", "fcfs", "temporal", "fix", "fix-adbs")
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
STEP_TOKENS: Mapping[DeviceKind, int] = {"cpu": 256, "cuda": 2048}
"""Tokens of one step; on GPUs MuxServe's own default."""
SLAB_BYTES: Mapping[DeviceKind, int] = {"cpu": 32 << 20, "cuda": 256 << 20}
MOST_SLABS = 512
"""A slab is a file descriptor of its worker: larger memories take larger slabs instead of more."""
QUEUE_BOUND = 256


@dataclass(frozen=True)
class Target:
    """What to serve on. `memory_bytes` is what a GPU has, of which the configuration gives the KV pool a share."""

    kind: DeviceKind
    memory_bytes: int


def find_target(kind: DeviceKind | None, num_gpus: int) -> Target:
    """CUDA devices where there are any and nothing else is asked for, else CPU devices, which divide this machine's
    memory among them. Raises BenchError if CUDA devices are too few."""
    if kind != "cpu":
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count >= num_gpus:
            smallest = min(torch.cuda.get_device_properties(gpu).total_memory for gpu in range(num_gpus))
            return Target("cuda", smallest)
        if count > 0 or kind == "cuda":
            raise BenchError(
                f"--device: num_gpus is {num_gpus}, and {count} CUDA devices are visible; make more visible "
                f"(CUDA_VISIBLE_DEVICES), lower num_gpus, or take --device cpu"
            )
    return Target("cpu", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // num_gpus)


def translate(
    config: MuxServeConfig, models: Sequence[MuxServeModel], workload: Workload, target: Target, policy: str
) -> dict[str, Any]:
    """Forebay's configuration for `models`: their GPUs become devices of the target's kind with the same numbers, and
    the workload says how popular each is. All that the workload holds may queue, as MuxServe refuses nothing."""
    memory = int(target.memory_bytes * config.gpu_memory_utilization)
    slab = SLAB_BYTES[target.kind]
    while memory > MOST_SLABS * slab:
        slab *= 2
    gpus = sorted({gpu for model in models for replica in model.placement for gpu in replica})
    requests = Counter(request.model_name for request in workload.requests)
    return {
        "policy": "temporal" if policy == "fcfs" else policy,
        "queue_bound": max(QUEUE_BOUND, len(workload.requests)),
        "devices": [
            {"device": f"{target.kind}:{gpu}", "memory": max(memory // slab, 1) * slab, "slab": slab} for gpu in gpus
        ],
        "models": [
            {
                "name": model.name,
                "path": str(model.folder),
                "placement": [f"{target.kind}:{gpu}" for replica in model.placement for gpu in replica],
                "popularity": float(max(requests[model.name], 1)),
                "dtype": DTYPES[model.model_dtype],
                "max_sequences": (sequences := model.max_num_seqs or config.max_num_seqs),
                "step_tokens": max(STEP_TOKENS[target.kind], sequences),
            }
            for model in models
        ],
    }


def notes(config: MuxServeConfig, models: Sequence[MuxServeModel], target: Target) -> list[str]:
    """What the configuration says and Forebay does not do, a sentence each."""
    found = []
    if any(model.mps_percentage is not None for model in models):
        why = (
            "SM shares have no meaning on a CPU device"
            if target.kind == "cpu"
            else "fixed SM shares are not applied: models share a GPU's SMs step by step"
        )
        found.append(f"mps_percentage: {why}")
    if target.kind == "cpu" and any(model.model_dtype == "fp16" for model in models):
        found.append("model_dtype: fp16 is computed as such, which a CPU does slowly; fp32 and bf16 are faster there")
    if config.overload_threshold is not None:
        found.append("overload_threshold: not used, it counts tiles of fixed SM shares")
    made_from = [
        key
        for key in ("dataset", "arrival_rates", "start", "duration", "num_requests")
        if config.workloads is not None and getattr(config.workloads, key) is not None
    ]
    if made_from:
        found.append(
            f"workloads: {', '.join(made_from)}: not used, as in MuxServe: the workload file says it all "
            f"(python -m bench.workload makes one)"
        )
    return found


def split(workload: Workload, model: str, origin: str) -> Workload:
    """Only the requests for `model`, at their times. Raises BenchError if there are none."""
    kept = [
        (arrival, request)
        for arrival, request in zip(workload.arrivals, workload.requests, strict=True)
        if request.model_name == model
    ]
    if not kept:
        raise BenchError(
            f"--split-by-model: {origin} has no request for {model!r}; it has some for {', '.join(workload.models)}"
        )
    return Workload(workload.info, [arrival for arrival, _ in kept], [request for _, request in kept])


def check_models(workload: Workload, models: Sequence[MuxServeModel], origin: str) -> None:
    """Raises BenchError if the workload asks for a model that is not served."""
    names = [model.name for model in models]
    for name in workload.models:
        if name not in names:
            raise BenchError(
                f"{origin}: asks for {name!r}, which the configuration does not serve; it serves {', '.join(names)} "
                f"(--split-by-model NAME replays one model's requests)"
            )

"""MuxServe's model_config.yaml: read as it is, and what of it Forebay cannot honour. Nothing here starts anything."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from forebay.bench.errors import BenchError
from forebay.bench.yaml_file import read_yaml, typed

WHAT = "MuxServe configuration"

Positive = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Gpu = Annotated[int, msgspec.Meta(ge=0)]
SmPercent = Annotated[int, msgspec.Meta(ge=10, le=100, multiple_of=10)]


class MuxServeModel(msgspec.Struct, frozen=True):
    """One model. `placement` has a list of GPU ids for each replica; `mps_percentage` are the SM shares of prefill
    and decode; `model` is a folder, taken from the current directory as MuxServe does."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    model: Annotated[str, msgspec.Meta(min_length=1)]
    placement: Annotated[tuple[Annotated[tuple[Gpu, ...], msgspec.Meta(min_length=1)], ...], msgspec.Meta(min_length=1)]
    tensor_parallel_size: Positive = 1
    pipeline_parallel_size: Positive = 1
    mps_percentage: Annotated[tuple[SmPercent, ...], msgspec.Meta(min_length=1, max_length=2)] | None = None
    max_num_seqs: Positive | None = None
    model_dtype: Literal["fp16", "bf16", "fp32"] = "fp16"

    @property
    def folder(self) -> Path:
        return Path(self.model).expanduser().absolute()


class MuxServeWorkloads(msgspec.Struct, frozen=True):
    """Where the requests come from. MuxServe itself uses `workload_file` only. Rates are requests per second, times
    seconds."""

    workload_file: str | None = None
    dataset: str | None = None
    arrival_rates: tuple[Annotated[float, msgspec.Meta(ge=0)], ...] | None = None
    start: Annotated[float, msgspec.Meta(ge=0)] | None = None
    duration: Annotated[float, msgspec.Meta(gt=0)] | None = None
    num_requests: Positive | None = None


class MuxServeConfig(msgspec.Struct, frozen=True):
    """One unit of GPUs. `gpu_memory_utilization` is the share of a GPU's memory that the KV pool gets,
    `overload_threshold` how many of ten SM tiles may be given away twice."""

    num_gpus: Positive
    models: Annotated[tuple[MuxServeModel, ...], msgspec.Meta(min_length=1)]
    gpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0, le=1)]
    max_num_seqs: Positive = 256
    overload_threshold: Annotated[int, msgspec.Meta(ge=0)] | None = None
    workloads: MuxServeWorkloads | None = None


def read_muxserve_config(path: Path) -> tuple[MuxServeConfig, list[str]]:
    """The file, and notes on keys in it that mean nothing here. Raises BenchError that names file, key, value and what
    is allowed. Whether it can be served is another question: see `select`."""
    raw = read_yaml(path, WHAT)
    config = typed(raw, MuxServeConfig, path, WHAT)
    names = [model.name for model in config.models]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BenchError(f"{WHAT} {path}: models: the name {twice[0]!r} appears twice; names must differ")
    return config, [f"{path}: {key} is no key of MuxServe's; ignored" for key in _unknown_keys(raw)]


def select(path: Path, config: MuxServeConfig, split_by_model: str | None) -> tuple[list[MuxServeModel], list[str]]:
    """The models to serve, and notes: all, or the one that `split_by_model` names. The only model of a file is taken
    whatever its name there, and gets the name that the workload knows it by.

    Raises BenchError that lists everything in them which cannot be honoured."""
    models, notes = list(config.models), []
    if split_by_model is not None:
        models = [model for model in config.models if model.name == split_by_model]
        if not models and len(config.models) == 1:
            [only] = config.models
            models = [msgspec.structs.replace(only, name=split_by_model)]
            notes.append(f"--split-by-model: {path} calls its only model {only.name!r}; served as {split_by_model!r}")
        if not models:
            raise BenchError(
                f"--split-by-model: {split_by_model!r} is not among the models of {path}: "
                f"{', '.join(model.name for model in config.models)}"
            )
    places = {model.name: place for place, model in enumerate(config.models)}
    problems = [
        f"{WHAT} {path}: models[{places.get(model.name, 0)}] ({model.name}): {problem}"
        for model in models
        for problem in _refusals(model, config.num_gpus)
    ]
    if problems:
        raise BenchError("\n".join(problems))
    return models, notes


def _refusals(model: MuxServeModel, num_gpus: int) -> Iterator[str]:
    for key in ("pipeline_parallel_size", "tensor_parallel_size"):
        size = getattr(model, key)
        if size > 1:
            yield (
                f"{key}: is {size}; only 1 can be served: Forebay keeps a model whole on each GPU. Write 1, and in "
                f"placement a list of one GPU for each replica, such as [[0], [1]]"
            )
    size = model.pipeline_parallel_size * model.tensor_parallel_size
    for index, gpus in enumerate(model.placement):
        if len(gpus) != size:
            yield (
                f"placement[{index}]: is {list(gpus)}; tensor_parallel_size x pipeline_parallel_size GPUs are needed, "
                f"{size}: one list for each replica"
            )
        beyond = [gpu for gpu in gpus if gpu >= num_gpus]
        if beyond:
            yield f"placement[{index}]: names GPU {beyond[0]}; num_gpus is {num_gpus}: 0 to {num_gpus - 1} are allowed"
    used = [gpu for gpus in model.placement for gpu in gpus]
    for gpu in sorted({gpu for gpu in used if used.count(gpu) > 1}):
        yield f"placement: names GPU {gpu} twice; a GPU holds a model once"
    if not (model.folder / "config.json").is_file():
        yield (
            f"model: is {model.model!r}; {model.folder} has no config.json: a folder in Hugging Face's layout is "
            f"needed, names on a hub are not downloaded"
        )


def _unknown_keys(raw: Any) -> Iterator[str]:
    """Keys of the file that MuxServe does not read either, as in `models[0].rate`."""
    sections: Sequence[tuple[str, Any, type[msgspec.Struct]]] = [
        ("", raw, MuxServeConfig),
        *((f"models[{index}].", model, MuxServeModel) for index, model in enumerate(raw["models"])),
        ("workloads.", raw.get("workloads") or {}, MuxServeWorkloads),
    ]
    for prefix, section, type_ in sections:
        for key in section:
            if key not in type_.__struct_fields__:
                yield f"{prefix}{key}"

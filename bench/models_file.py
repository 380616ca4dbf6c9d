"""models.yaml: which models a workload is for, how often each is asked, on what cluster."""

from pathlib import Path
from typing import Annotated

import msgspec

from forebay.bench.errors import BenchError
from forebay.bench.yaml_file import read_yaml, typed

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class Cluster(msgspec.Struct, frozen=True):
    nnodes: Annotated[int, msgspec.Meta(ge=1)]
    ngpus_per_node: Annotated[int, msgspec.Meta(ge=1)]


class ModelLoad(msgspec.Struct, frozen=True):
    """`rate` in requests per second; the averages, in tokens, shift the length distributions of this model."""

    name: str
    rate: NotNegative
    model: str = ""
    avg_prompt_len: Positive | None = None
    avg_output_len: Positive | None = None


class ModelsFile(msgspec.Struct, frozen=True):
    models: Annotated[list[ModelLoad], msgspec.Meta(min_length=1)]
    cluster: Cluster | None = None


def read_models_file(path: Path) -> ModelsFile:
    """Reads and checks a file. Raises BenchError that names file, key and what is allowed."""
    models_file = typed(read_yaml(path, "models file"), ModelsFile, path, "models file")
    names = [model.name for model in models_file.models]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BenchError(f"models file {path}: models: the name {twice[0]!r} appears twice; names must differ")
    if not any(model.rate > 0 for model in models_file.models):
        raise BenchError(f"models file {path}: models: every rate is 0; at least one must be above 0")
    return models_file

"""models.yaml: which models a workload is for, how often each is asked, on what cluster."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from forebay.bench.errors import BenchError
from forebay.bench.limits import MOST_RATE, MOST_TOKENS
from forebay.bench.yaml_file import read_yaml, typed

Tokens = Annotated[float, msgspec.Meta(gt=0, le=MOST_TOKENS)]
RequestRate = Annotated[float, msgspec.Meta(ge=0, le=MOST_RATE)]


class Cluster(msgspec.Struct, frozen=True):
    nnodes: Annotated[int, msgspec.Meta(ge=1)]
    ngpus_per_node: Annotated[int, msgspec.Meta(ge=1)]


class ModelLoad(msgspec.Struct, frozen=True):
    """`rate` in requests per second; the averages, in tokens, shift the length distributions of this model."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    rate: RequestRate
    model: str = ""
    avg_prompt_len: Tokens | None = None
    avg_output_len: Tokens | None = None


KNOWN: dict[str, frozenset[str]] = {
    "": frozenset(("models", "cluster", "avg_prompt_len", "avg_output_len")),
    "cluster": frozenset(Cluster.__struct_fields__),
    "models[]": frozenset(ModelLoad.__struct_fields__),
}
"""Keys by section, ours and MuxServe's: its placement search writes the averages of all models at the top."""


class ModelsFile(msgspec.Struct, frozen=True):
    models: Annotated[list[ModelLoad], msgspec.Meta(min_length=1)]
    cluster: Cluster | None = None


def read_models_file(path: Path, tell: Callable[[str], None] = lambda line: None) -> ModelsFile:
    """Reads and checks a file; `tell` gets a line for each key that is not known and so passed over. Raises BenchError
    that names file, key and what is allowed."""
    raw = read_yaml(path, "models file")
    for line in _unknown(raw):
        tell(f"models file {path}: {line}")
    models_file = typed(raw, ModelsFile, path, "models file")
    names = [model.name for model in models_file.models]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BenchError(f"models file {path}: models: the name {twice[0]!r} appears twice; names must differ")
    if not any(model.rate > 0 for model in models_file.models):
        raise BenchError(f"models file {path}: models: every rate is 0; at least one must be above 0")
    return models_file


def _unknown(raw: Any) -> Iterator[str]:
    if not isinstance(raw, dict):
        return
    models = raw.get("models")
    sections = [("", raw, ""), ("cluster", raw.get("cluster"), "cluster.")]
    if isinstance(models, list):
        sections += [("models[]", model, f"models[{index}].") for index, model in enumerate(models)]
    for section, content, prefix in sections:
        for key in content if isinstance(content, dict) else ():
            if key not in KNOWN[section]:
                known = ", ".join(sorted(KNOWN[section]))
                yield f"{prefix}{key}: is not known and passed over; known here: {known}"

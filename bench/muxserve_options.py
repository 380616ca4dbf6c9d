"""The options of MuxServe's workload_utils.py for `bench.workload`, which has its own words for the same things."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from forebay.bench.errors import BenchError
from forebay.bench.models_file import ModelLoad, read_models_file

SAME = {"model_yaml": "models_yaml", "dataset_source": "dataset", "output_file": "output"}
"""MuxServe's option, and ours that it stands for."""

BUSIEST_REQUESTS = 200
LONGEST_S = 1000.0
LONGEST_PROMPT = LONGEST_OUTPUT = 1024
"""What MuxServe's script takes where nothing is said: requests of the busiest model, seconds, tokens."""


def add_muxserve_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "MuxServe's words (its workload_utils.py)",
        f"With --model-yaml and neither --duration nor --num-requests, arrivals last until the busiest model has "
        f"about {BUSIEST_REQUESTS} requests, at most {LONGEST_S:g} s; with --dataset-source, prompts and outputs have "
        f"at most {LONGEST_PROMPT} tokens each unless --max-prompt and --max-output say otherwise.",
    )
    group.add_argument("--model-yaml", type=Path, metavar="FILE", help="MODELS_YAML")
    group.add_argument("--dataset-source", type=Path, metavar="FILE", help="--dataset")
    group.add_argument("--output-file", type=Path, metavar="FILE", help="--output")
    group.add_argument(
        "--workload_info_from_yaml",
        "--workload-info-from-yaml",
        choices=["True", "true", "1"],
        help="always so here: models and rates come from --model-yaml",
    )


def settle(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Turns MuxServe's options into ours. Ends the process with a usage error where both are given for one thing.
    Raises BenchError for a bad models file."""
    for theirs, ours in SAME.items():
        value = getattr(arguments, theirs)
        if value is None:
            continue
        if getattr(arguments, ours) != parser.get_default(ours):
            name = "MODELS_YAML" if ours == "models_yaml" else _option(ours)
            parser.error(f"{_option(theirs)} and {name} are the same; give one of them")
        setattr(arguments, ours, value)
    if arguments.workload_info_from_yaml is not None and arguments.models_yaml is None:
        parser.error("--workload_info_from_yaml needs --model-yaml FILE")
    if arguments.dataset_source is not None:
        arguments.max_prompt = arguments.max_prompt or LONGEST_PROMPT
        arguments.max_output = arguments.max_output or LONGEST_OUTPUT
    if arguments.model_yaml is not None and arguments.duration is None and arguments.num_requests is None:
        busiest = max(model.rate for model in read_models_file(arguments.model_yaml).models)
        arguments.duration = min(LONGEST_S, BUSIEST_REQUESTS / busiest)


def tokenizer_folders(models: Sequence[ModelLoad], given: Path | None) -> dict[str, Path]:
    """The folder with the tokenizer of each model, by name: `given` for all, else each model's own.

    Raises BenchError for a model that is no local folder."""
    folders = {}
    for model in models:
        folder = given if given is not None else Path(model.model).expanduser()
        if given is None and not (folder / "tokenizer.json").is_file():
            raise BenchError(
                f"model {model.name!r}: {model.model!r} is no local folder with a tokenizer.json, and nothing is taken "
                f"from a hub; give --tokenizer FOLDER, or the folder of the model in the models file"
            )
        folders[model.name] = folder
    return folders


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"

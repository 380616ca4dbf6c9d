"""`python -m bench.workload`: writes a workload file, generated or converted from a trace. Only the command line."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from forebay.bench import options
from forebay.bench.arrivals import POISSON
from forebay.bench.command_line import check_outputs
from forebay.bench.conversations import Conversations, read_turns
from forebay.bench.errors import BenchError
from forebay.bench.generate import ConversationSource, generate
from forebay.bench.lengths import (
    DEFAULT_VOCABULARY,
    Lengths,
    LengthSource,
    RandomPrompts,
    Vocabulary,
    load_tokenizer,
)
from forebay.bench.models_file import ModelLoad
from forebay.bench.muxserve_options import add_muxserve_options, settle, tokenizer_folders
from forebay.bench.sharegpt import ShareGPTPrompts, read_sharegpt
from forebay.bench.workload_file import Workload, write_workload
from forebay.bench.workload_sources import (
    TRACES,
    add_arrival_options,
    add_trace_options,
    check_sources,
    convert_trace,
    model_loads,
    pace_of,
    rate_courses,
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.workload",
        description="Writes a workload (MuxServe's JSON form) for python -m bench.replay: generated arrivals for the "
        "models of MODELS_YAML, or a trace spread over models. Generated arrivals need --duration or --num-requests.",
    )
    parser.add_argument("models_yaml", type=Path, nargs="?", metavar="MODELS_YAML", help="models and their rates")
    parser.add_argument("--output", type=Path, default=Path("workload.json"), help="file to write (%(default)s)")
    parser.add_argument("--seed", type=options.non_negative_int, default=0, help="same seed, same file (%(default)s)")
    parser.add_argument(
        "--duration",
        type=options.positive_float,
        metavar="S",
        help="seconds of arrivals; this or --num-requests is needed, except for a trace, of which it takes the first S "
        "of its own seconds",
    )
    parser.add_argument("--num-requests", type=options.positive_int, metavar="N", help="as many, instead of --duration")
    parser.add_argument("--max-prompt", type=options.positive_int, metavar="TOKENS", help="longest prompt")
    parser.add_argument("--max-output", type=options.positive_int, metavar="TOKENS", help="longest output")

    text = parser.add_argument_group("prompts: text, or random token ids")
    text.add_argument("--dataset", type=Path, metavar="FILE", help="conversations in ShareGPT's form")
    text.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="model folder whose tokenizer to use")
    length = options.parsed(Lengths.parse)
    text.add_argument(
        "--prompt-lengths",
        type=length,
        default=Lengths("lognormal", 100, 1),
        metavar="DISTRIBUTION",
        help="fixed:N, lognormal:MEAN:SIGMA or uniform:LOW:HIGH in tokens (lognormal:100:1); a model's "
        "avg_prompt_len replaces the mean",
    )
    text.add_argument(
        "--output-lengths",
        type=length,
        default=Lengths("lognormal", 261, 1),
        metavar="DISTRIBUTION",
        help="the same for outputs (lognormal:261:1); a model's avg_output_len replaces the mean",
    )
    text.add_argument(
        "--vocabulary",
        type=options.parsed(Vocabulary.parse),
        metavar="LOW:HIGH",
        help=f"random token ids from LOW up to HIGH - 1 (the tokenizer's ordinary ones, without a tokenizer "
        f"{DEFAULT_VOCABULARY.start}:{DEFAULT_VOCABULARY.stop})",
    )

    add_arrival_options(parser)
    add_trace_options(parser)
    add_muxserve_options(parser)
    return parser


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends the process with a usage error where options do not go together. Raises BenchError for a bad models file."""
    settle(parser, arguments)
    check_sources(parser, arguments)
    if any(getattr(arguments, name) is not None for name in TRACES):
        return
    if (arguments.duration is None) == (arguments.num_requests is None):
        parser.error("exactly one of --duration and --num-requests is needed")


def build(arguments: argparse.Namespace) -> Workload:
    """The workload that the options ask for. Raises BenchError."""
    tokenizer = None if arguments.tokenizer is None else load_tokenizer(arguments.tokenizer)
    vocabulary = arguments.vocabulary
    if vocabulary is None:
        vocabulary = Vocabulary(DEFAULT_VOCABULARY) if tokenizer is None else Vocabulary.of_tokenizer(tokenizer)
    limits = {"max_prompt": arguments.max_prompt, "max_output": arguments.max_output}
    workload = convert_trace(arguments, vocabulary)
    if workload is not None:
        return workload
    models = model_loads(arguments)

    def generate_from(
        source_of: Callable[[ModelLoad], LengthSource | ConversationSource], from_dataset: bool
    ) -> Workload:
        return generate(
            models,
            source_of,
            seed=arguments.seed,
            duration=arguments.duration,
            num_requests=arguments.num_requests,
            from_dataset=from_dataset,
            gaps=arguments.gaps or POISSON,
            rates=rate_courses(models, arguments),
        )

    if arguments.dataset is not None:
        folders = tokenizer_folders(models, arguments.tokenizer)
        tokenizers = {folder: load_tokenizer(folder) for folder in folders.values()}
        if arguments.turns:
            conversations = {
                folder: Conversations(read_turns(arguments.dataset, tokenizer, **limits), pace_of(arguments))
                for folder, tokenizer in tokenizers.items()
            }
            return generate_from(lambda model: conversations[folders[model.name]].fresh(), True)
        pairs = {
            folder: read_sharegpt(arguments.dataset, tokenizer, **limits) for folder, tokenizer in tokenizers.items()
        }
        return generate_from(lambda model: ShareGPTPrompts(pairs[folders[model.name]]), True)
    return generate_from(
        lambda model: RandomPrompts(
            vocabulary,
            arguments.prompt_lengths.with_mean(model.avg_prompt_len),
            arguments.output_lengths.with_mean(model.avg_output_len),
            **limits,
        ),
        False,
    )


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        check(parser, arguments)
        check_outputs(arguments.output)
        workload = build(arguments)
        write_workload(arguments.output, workload)
    except (BenchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    info = workload.info
    print(
        f"{arguments.output}: {len(workload.requests)} requests for {len(workload.models)} models over "
        f"{info.duration:.1f} s, mean {info.prompt_len:.1f} prompt and {info.output_len:.1f} output tokens"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

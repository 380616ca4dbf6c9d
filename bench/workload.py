"""`python -m bench.workload`: writes a workload file, generated or converted from a trace. Only the command line."""

import argparse
import sys
from pathlib import Path

from forebay.bench import options
from forebay.bench.azure import convert_azure, parse_model_weights
from forebay.bench.errors import BenchError
from forebay.bench.generate import generate
from forebay.bench.lengths import DEFAULT_VOCABULARY, Lengths, RandomPrompts, Vocabulary, load_tokenizer
from forebay.bench.models_file import read_models_file
from forebay.bench.sharegpt import ShareGPTPrompts, read_sharegpt
from forebay.bench.workload_file import Workload, write_workload


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.workload",
        description="Writes a workload (MuxServe's JSON form) for python -m bench.replay: Poisson arrivals for the "
        "models of MODELS_YAML, or an Azure trace spread over models.",
    )
    parser.add_argument("models_yaml", type=Path, nargs="?", metavar="MODELS_YAML", help="models and their rates")
    parser.add_argument("--output", type=Path, default=Path("workload.json"), help="file to write (%(default)s)")
    parser.add_argument("--seed", type=options.non_negative_int, default=0, help="same seed, same file (%(default)s)")
    parser.add_argument(
        "--duration",
        type=options.positive_float,
        metavar="S",
        help="seconds of arrivals; with --azure of the trace",
    )
    parser.add_argument("--num-requests", type=options.positive_int, metavar="N", help="instead of --duration")
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

    azure = parser.add_argument_group("Azure's LLM inference trace")
    azure.add_argument("--azure", type=Path, metavar="FILE", help="CSV: TIMESTAMP, ContextTokens, GeneratedTokens")
    azure.add_argument("--models", type=options.parsed(parse_model_weights), metavar="NAME[:WEIGHT],...")
    azure.add_argument("--start", type=options.non_negative_float, default=0.0, metavar="S", help="skip S seconds")
    azure.add_argument("--scale-rate", type=options.positive_float, default=1.0, metavar="X", help="X times as fast")
    azure.add_argument("--scale-tokens", type=options.positive_float, default=1.0, metavar="X", help="X times as long")
    return parser


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends the process with a usage error where options do not go together."""
    if arguments.azure is not None:
        if arguments.models is None:
            parser.error("--azure needs --models name[:weight],...")
        for name in ("models_yaml", "num_requests", "dataset"):
            if getattr(arguments, name) is not None:
                option = "MODELS_YAML" if name == "models_yaml" else f"--{name.replace('_', '-')}"
                parser.error(f"{option} does not go with --azure")
        return
    if arguments.models_yaml is None:
        parser.error("MODELS_YAML or --azure FILE is needed")
    if arguments.models is not None:
        parser.error("--models goes with --azure only")
    if (arguments.duration is None) == (arguments.num_requests is None):
        parser.error("exactly one of --duration and --num-requests is needed")
    if arguments.dataset is not None and arguments.tokenizer is None:
        parser.error("--dataset needs --tokenizer FOLDER")


def build(arguments: argparse.Namespace) -> Workload:
    """The workload that the options ask for. Raises BenchError."""
    tokenizer = None if arguments.tokenizer is None else load_tokenizer(arguments.tokenizer)
    vocabulary = arguments.vocabulary
    if vocabulary is None:
        vocabulary = Vocabulary(DEFAULT_VOCABULARY) if tokenizer is None else Vocabulary.of_tokenizer(tokenizer)
    limits = {"max_prompt": arguments.max_prompt, "max_output": arguments.max_output}
    if arguments.azure is not None:
        return convert_azure(
            arguments.azure,
            arguments.models,
            vocabulary,
            seed=arguments.seed,
            start=arguments.start,
            duration=arguments.duration,
            scale_rate=arguments.scale_rate,
            scale_tokens=arguments.scale_tokens,
            **limits,
        )
    models = read_models_file(arguments.models_yaml).models
    when = {"seed": arguments.seed, "duration": arguments.duration, "num_requests": arguments.num_requests}
    if arguments.dataset is not None and tokenizer is not None:
        pairs = read_sharegpt(arguments.dataset, tokenizer, **limits)
        return generate(models, lambda _: ShareGPTPrompts(pairs), from_dataset=True, **when)
    return generate(
        models,
        lambda model: RandomPrompts(
            vocabulary,
            arguments.prompt_lengths.with_mean(model.avg_prompt_len),
            arguments.output_lengths.with_mean(model.avg_output_len),
            **limits,
        ),
        **when,
    )


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    check(parser, arguments)
    try:
        workload = build(arguments)
        write_workload(arguments.output, workload)
    except (BenchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    info = workload.info
    print(
        f"{arguments.output}: {len(workload.requests)} requests for {len(workload.models)} models over "
        f"{info.duration:.1f} s, mean {info.prompt_len:.1f} prompt and {info.output_len:.1f} output tokens"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Options of `bench.workload` that say where arrivals come from, a law of gaps or a trace: what they are, what goes
with what, and the workload of a trace."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from forebay.bench import options
from forebay.bench.arrivals import POISSON, Gaps, Rate, drifting_rates, power_law_rates
from forebay.bench.azure import convert_azure, parse_model_weights
from forebay.bench.conversations import Pace, parse_think_time
from forebay.bench.errors import BenchError
from forebay.bench.lengths import Vocabulary
from forebay.bench.models_file import ModelLoad, read_models_file
from forebay.bench.mooncake import convert_mooncake
from forebay.bench.servegen import LengthsByClient, convert_rates, convert_windows
from forebay.bench.servegen_files import Selection, parse_selections
from forebay.bench.trace import Slice
from forebay.bench.workload_file import Workload

TRACES = ("azure", "mooncake", "servegen_rates", "servegen_windows")

GENERATED_ONLY = ("models_yaml", "num_requests", "dataset", "power_law", "total_rate", "drift")


def add_arrival_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("arrivals that are generated")
    group.add_argument(
        "--gaps",
        type=options.parsed(Gaps.parse),
        metavar="LAW",
        help="of the gaps between one model's requests: poisson, gamma:CV or weibull:CV (poisson)",
    )
    group.add_argument(
        "--power-law",
        type=options.non_negative_float,
        metavar="ALPHA",
        help="rates in proportion to i^-ALPHA for the models in their order (0: all alike)",
    )
    group.add_argument(
        "--total-rate",
        type=options.rate,
        metavar="R",
        help="requests per second of all models together (the sum of MODELS_YAML's rates)",
    )
    group.add_argument(
        "--drift",
        type=options.number(0.001, 1e9),
        metavar="PERIOD_S",
        help="popularity moves: every PERIOD_S seconds each model takes the rate of the next one, the last the first's",
    )
    group.add_argument(
        "--turns",
        action="store_true",
        help="whole conversations of --dataset: a later turn's prompt holds all turns before it, with the data set's "
        "own answers, and arrives after the answer's expected time and a think time",
    )
    group.add_argument(
        "--think-time",
        type=options.parsed(parse_think_time),
        metavar="MEAN[:SIGMA]",
        help=f"seconds between an answer and the next turn, lognormal ({Pace.think_s:g}:{Pace.think_sigma:g})",
    )
    group.add_argument(
        "--answer-token-time",
        type=options.non_negative_float,
        metavar="S",
        help=f"expected seconds for each token of an answer ({Pace.answer_token_s:g})",
    )


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("traces")
    group.add_argument("--azure", type=Path, metavar="FILE", help="CSV: TIMESTAMP, ContextTokens, GeneratedTokens")
    group.add_argument(
        "--mooncake",
        type=Path,
        metavar="FILE",
        help="JSON lines: timestamp, input_length, output_length, hash_ids; prompts share what they share in the trace",
    )
    group.add_argument(
        "--servegen-rates", type=Path, metavar="FILE", help="CSV of models' rates by window of 600 s; gaps by --gaps"
    )
    group.add_argument(
        "--servegen-windows", type=Path, metavar="FILE", help="CSV of each client's rate and law of gaps by window"
    )
    group.add_argument(
        "--servegen-clients",
        type=Path,
        metavar="FILE",
        help="CSV of the clients' lengths, drawn as lognormals (else --prompt-lengths and --output-lengths)",
    )
    group.add_argument(
        "--models",
        metavar="NAME[:WEIGHT],...",
        help="of ours: requests are spread by weight; with ServeGen SOURCE=NAME,..., SOURCE being MODEL or "
        "MODEL/CLIENT; without MODELS_YAML and a trace the weights share --total-rate",
    )
    group.add_argument(
        "--start",
        type=options.non_negative_float,
        default=0.0,
        metavar="S",
        help="skip S seconds of the trace; ServeGen's count from its day 0 (%(default)s)",
    )
    group.add_argument(
        "--scale-rate",
        type=options.factor,
        default=1.0,
        metavar="X",
        help="X times as fast; with ServeGen X times as many requests in the same time",
    )
    group.add_argument("--scale-tokens", type=options.factor, default=1.0, metavar="X", help="X times as long")


def check_sources(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends the process with a usage error where options do not go together. Parses `models`."""
    traces = [name for name in TRACES if getattr(arguments, name) is not None]
    if len(traces) > 1:
        parser.error(f"{_option(traces[0])} does not go with {_option(traces[1])}")
    trace = traces[0] if traces else None
    servegen = trace in ("servegen_rates", "servegen_windows")
    if arguments.servegen_clients is not None and not servegen:
        parser.error("--servegen-clients goes with --servegen-rates or --servegen-windows only")
    if not arguments.turns and (arguments.think_time is not None or arguments.answer_token_time is not None):
        parser.error("--think-time and --answer-token-time go with --turns only")
    if arguments.turns and (arguments.dataset is None or trace is not None):
        parser.error("--turns needs --dataset FILE, and does not go with a trace")
    if trace is not None:
        if arguments.models is None:
            parser.error(f"{_option(trace)} needs --models {'SOURCE=NAME' if servegen else 'name[:weight]'},...")
        for name in GENERATED_ONLY:
            if getattr(arguments, name) is not None:
                parser.error(f"{_option(name)} does not go with {_option(trace)}")
        if arguments.gaps is not None and trace != "servegen_rates":
            parser.error(f"--gaps does not go with {_option(trace)}, which has gaps of its own")
    elif arguments.models is not None:
        if arguments.models_yaml is not None:
            parser.error("--models goes with a trace or --total-rate, not with MODELS_YAML")
        if arguments.total_rate is None:
            parser.error("--models without a trace needs --total-rate R")
        if arguments.power_law is not None and ":" in arguments.models:
            parser.error("--power-law does not go with weights in --models")
    elif arguments.models_yaml is None:
        parser.error(
            f"MODELS_YAML, --models with --total-rate, or a trace ({', '.join(map(_option, TRACES))}) is needed"
        )
    if arguments.models is not None:
        parse: Callable[[str], object] = parse_selections if servegen else parse_model_weights
        try:
            arguments.models = parse(arguments.models)
        except BenchError as error:
            parser.error(f"argument --models: {error}")


def _option(name: str) -> str:
    return "MODELS_YAML" if name == "models_yaml" else f"--{name.replace('_', '-')}"


def convert_trace(arguments: argparse.Namespace, vocabulary: Vocabulary) -> Workload | None:
    """The workload of the trace that the options name, None where they name none. Raises BenchError."""
    part = Slice(
        arguments.start,
        arguments.duration,
        arguments.scale_rate,
        arguments.scale_tokens,
        arguments.max_prompt,
        arguments.max_output,
    )
    seed = arguments.seed
    if arguments.azure is not None:
        return convert_azure(arguments.azure, arguments.models, vocabulary, part, seed=seed)
    if arguments.mooncake is not None:
        return convert_mooncake(arguments.mooncake, arguments.models, vocabulary, part, seed=seed)
    if arguments.servegen_rates is None and arguments.servegen_windows is None:
        return None
    selections: list[Selection] = arguments.models
    lengths = LengthsByClient.read(arguments.prompt_lengths, arguments.output_lengths, arguments.servegen_clients)
    if arguments.servegen_windows is not None:
        return convert_windows(arguments.servegen_windows, selections, part, lengths, vocabulary, seed=seed)
    gaps = arguments.gaps or POISSON
    return convert_rates(arguments.servegen_rates, selections, part, gaps, lengths, vocabulary, seed=seed)


def model_loads(arguments: argparse.Namespace) -> list[ModelLoad]:
    """The models of a generated workload, with their rates. Raises BenchError."""
    if arguments.models is None:
        models = read_models_file(arguments.models_yaml, _warn).models
    else:
        models = [ModelLoad(name, weight) for name, weight in arguments.models]
    rates = [model.rate for model in models]
    total = sum(rates) if arguments.total_rate is None else arguments.total_rate
    if arguments.power_law is not None:
        rates = power_law_rates(len(models), arguments.power_law, total)
    else:
        rates = [rate * total / sum(rates) for rate in rates]
    return [
        ModelLoad(model.name, rate, model.model, model.avg_prompt_len, model.avg_output_len)
        for model, rate in zip(models, rates, strict=True)
    ]


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)


def rate_courses(models: Sequence[ModelLoad], arguments: argparse.Namespace) -> list[Rate]:
    rates = [model.rate for model in models]
    return [Rate((rate,)) for rate in rates] if arguments.drift is None else drifting_rates(rates, arguments.drift)


def pace_of(arguments: argparse.Namespace) -> Pace:
    think_s, sigma = arguments.think_time or (Pace.think_s, Pace.think_sigma)
    token_s = Pace.answer_token_s if arguments.answer_token_time is None else arguments.answer_token_time
    return Pace(think_s, sigma, token_s)

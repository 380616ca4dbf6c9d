"""The options of `bench.compare`, and the setup that they ask for."""

import argparse
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from forebay.bench import options
from forebay.bench.compare_arms import ARMS, EXPLAINED, VLLM_COMMAND, default_python
from forebay.bench.compare_setup import (
    ComparedModel,
    Setup,
    model_names,
    popularity,
    servegen_words,
    workload_words,
)
from forebay.bench.dummy_tokenizer import ensure_tokenizer
from forebay.bench.errors import BenchError
from forebay.gpu.device_name import parse_device
from forebay.gpu.errors import DeviceError
from forebay.runtime.config_schema import parse_bytes

RESERVE_BYTES = 2 << 30
"""Of a GPU's memory for each of our models: graphs, activations, workspaces."""

CONTEXT_BYTES = 4 << 30
"""And once: the CUDA context and what libraries keep."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare",
        usage="python -m bench.compare [options] MODEL [MODEL...] [-- WORKLOAD OPTIONS]",
        description="Replays the same workloads against several servers, the arms, one after the other on the same "
        "device: a table, plots, goodput by SLO scale. Each point is kept in --output when it is done; the same "
        "command goes on where it was broken off. What follows -- are options of python -m bench.workload.",
        epilog="Arms: " + "; ".join(f"{arm}: {what}" for arm, what in EXPLAINED.items()) + ".",
    )
    add = parser.add_argument
    add("folders", type=Path, nargs="+", metavar="MODEL", help="model folders, in turns for the models served")
    add("--models", type=options.whole(1, 1000), metavar="N", help="how many to serve, called llm-0, ... (3)")
    add("--weights", type=weights, metavar="W,...", help="their shares of the requests (of three models 12,5,3)")
    add("--alpha", type=options.non_negative_float, metavar="A", help="shares in proportion to i^-A (otherwise, 2.1)")
    add("--drift", type=options.positive_float, metavar="PERIOD_S", help="models take turns in being popular")
    add(
        "--servegen",
        type=Path,
        nargs=2,
        metavar=("WINDOWS", "CLIENTS"),
        help="ServeGen's files of client windows and of clients instead: its N busiest clients, a model each",
    )
    add(
        "--arms",
        type=arm_names,
        default=["vllm-mps", "temporal", "adbs", "auto"],
        metavar="ARM,...",
        help=f"of {', '.join(ARMS)} (vllm-mps,temporal,adbs,auto)",
    )
    add("--rates", type=rate_list, default=[20, 30, 40, 60], metavar="R,...", help="requests/s in all (20,30,40,60)")
    add("--seconds", type=options.number(0.5, 1e5), default=20.0, metavar="S", help="arrivals of a point (%(default)g)")
    add("--scales", type=options.scales, default=[2, 3, 5, 8], metavar="S,...", help="of the SLO (2,3,5,8)")
    add("--target", type=options.share, default=0.99, metavar="SHARE", help="of requests, for goodput (%(default)g)")
    add("--budget", type=options.positive_float, default=1e9, metavar="S", help="begin nothing that would take longer")
    add("--drain", type=options.positive_float, default=60.0, metavar="S", help="then a point is cut (%(default)g)")
    add("--fresh", action="store_true", help="measure the points of these arms and rates again")
    add("--table", action="store_true", help="only print what is kept")
    add("--baseline", type=Path, metavar="FILE", help="what requests take alone (else of the first arm of the list)")
    add("--output", type=Path, default=Path("compare"), metavar="DIR", help="points, logs and plots (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the figures")
    load = parser.add_argument_group("what is served")
    add = load.add_argument
    add(
        "--devices", type=device_list, default=["cpu:0"], metavar="D,...", help="arm spatial uses all, others the first"
    )
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    add(
        "--load-format", default="auto", choices=("auto", "dummy"), help="dummy: random weights, a config.json suffices"
    )
    add("--max-context", type=options.whole(16, 1 << 24), default=4096, metavar="N", help="tokens (%(default)s)")
    add("--max-sequences", type=options.whole(1, 1 << 16), default=256, metavar="N", help="a model (%(default)s)")
    add("--step-tokens", type=options.whole(1, 1 << 20), metavar="N", help="of ours (256, on a GPU 2048)")
    add(
        "--utilization",
        type=options.share,
        default=0.87,
        metavar="SHARE",
        help="of a GPU's memory for everything; vLLM's engines share it equally (%(default)g)",
    )
    add("--memory", metavar="SIZE", help="of our KV pool a device (what --utilization leaves; on a CPU 1GiB)")
    add(
        "--set",
        type=key_value,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of our configuration, in all our arms: KEY, or device.KEY and model.KEY for all devices and models",
    )
    load = parser.add_argument_group("requests")
    add = load.add_argument
    add("--prompt-lengths", default="lognormal:160:0.8", metavar="LAW", help="as in bench.workload (%(default)s)")
    add("--output-lengths", default="lognormal:290:0.8", metavar="LAW", help="the same (%(default)s)")
    add("--seed", type=options.non_negative_int, default=0, metavar="N", help="of the workloads (%(default)s)")
    add("--timeout", type=options.positive_float, default=600.0, metavar="S", help="for each request (%(default)g)")
    load = parser.add_argument_group("vLLM")
    add = load.add_argument
    add("--vllm", type=Path, default=default_python(), metavar="PYTHON", help="interpreter that has vLLM (this one)")
    add("--vllm-options", default="", metavar="WORDS", help="appended to its command")
    add("--vllm-command", default=VLLM_COMMAND, metavar="TEMPLATE", help="another server in its place")
    add(
        "--vllm-kv",
        metavar="SIZE",
        help="KV cache of an engine; it does not measure the memory then, and all engines start at once",
    )
    return parser


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Ours, and those for the workload after `--`."""
    place = list(words).index("--") if "--" in words else len(words)
    return list(words[:place]), list(words[place + 1 :])


def arm_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in ARMS:
            raise argparse.ArgumentTypeError(f"{name!r} is no arm; the arms are {', '.join(ARMS)}")
    return list(dict.fromkeys(names))


def rate_list(text: str) -> list[float]:
    return sorted({options.rate(part) for part in text.split(",")})


def weights(text: str) -> list[float]:
    return [options.positive_float(part) for part in text.split(",")]


def key_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; KEY=VALUE is, such as device.spill=8GiB")
    return key, value


def device_list(text: str) -> list[str]:
    try:
        names = [str(parse_device(part.strip())) for part in text.split(",")]
    except DeviceError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if len({name.partition(":")[0] for name in names}) > 1:
        raise argparse.ArgumentTypeError(f"{text!r} mixes kinds of devices; all cpu:N or all cuda:N are allowed")
    return list(dict.fromkeys(names))


def setup_of(given: argparse.Namespace, more: Sequence[str]) -> Setup:
    """Raises BenchError. With dummy weights each model gets a folder of its own under the output, so that no two share
    weights."""
    count = given.models or max(3, len(given.folders))
    names = model_names(count)
    shares = popularity(count, given.weights, given.alpha)
    folders = [given.folders[place % len(given.folders)] for place in range(count)]
    for folder in folders:
        if not (folder / "config.json").is_file():
            raise BenchError(f"model {folder}: holds no config.json; give a model folder in Hugging Face's layout")
    if given.load_format == "dummy":
        folders = [
            _own_folder(folder, given.output / "models" / name) for folder, name in zip(folders, names, strict=True)
        ]
    gpu = given.devices[0].startswith("cuda")
    longest = given.max_context // 2 - 8
    lengths = given.prompt_lengths, given.output_lengths, longest, given.seed
    workload: tuple[str, ...]
    trace: tuple[str, ...] = ()
    if given.servegen is None:
        workload = workload_words(names, shares, *lengths, given.drift, more)
    else:
        windows, clients = given.servegen
        workload, trace = servegen_words(names, windows, clients, *lengths, more), (str(windows), str(clients))
    return Setup(
        tuple(
            ComparedModel(name, str(folder.resolve()), share)
            for name, folder, share in zip(names, folders, shares, strict=True)
        ),
        tuple(given.devices),
        given.dtype,
        given.load_format,
        given.max_context,
        given.max_sequences,
        given.step_tokens or (2048 if gpu else 256),
        _kv_bytes(given, folders, gpu),
        given.utilization,
        given.seconds,
        workload,
        trace,
        tuple(given.set),
    )


def _own_folder(source: Path, folder: Path) -> Path:
    """A copy of all but the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.glob("*.json"):
        if "index" not in path.name:
            shutil.copyfile(path, folder / path.name)
    ensure_tokenizer(folder)
    return folder


def _kv_bytes(given: argparse.Namespace, folders: Sequence[Path], gpu: bool) -> int:
    """Whole slabs of 256 MiB on a GPU."""
    if given.memory is not None or not gpu:
        try:
            return parse_bytes(given.memory or "1GiB")
        except ValueError as error:
            raise BenchError(f"--memory: {error}") from error
    from forebay.bench.arithmetic import read_arithmetic

    weight_bytes = dict.fromkeys(folders, 0)
    for folder in weight_bytes:
        size = read_arithmetic(folder, given.dtype)
        config = json.loads((folder / "config.json").read_text())
        table = config.get("vocab_size", 0) * config.get("hidden_size", 0) * size.element_bytes
        weight_bytes[folder] = size.weight_bytes + (0 if config.get("tie_word_embeddings") else table)
    needed = sum(weight_bytes.values()) + len(folders) * RESERVE_BYTES + CONTEXT_BYTES
    left = int(_gpu_bytes(given.devices[0]) * given.utilization) - needed
    slab = 256 << 20
    if left < slab:
        raise BenchError(
            f"--utilization {given.utilization:g}: {len(folders)} models need {needed / 2**30:.1f} GiB without any KV "
            f"cache, more than that: serve fewer, or say --memory SIZE for a KV pool beside weights that come and go"
        )
    return left // slab * slab


def _gpu_bytes(device: str) -> int:
    words = [
        "nvidia-smi",
        f"--id={device.partition(':')[2]}",
        "--query-gpu=memory.total",
        "--format=csv,noheader,nounits",
    ]
    try:
        said = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30).stdout
        return int(said.strip()) << 20
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise BenchError(f"{device}: nvidia-smi does not tell its memory ({error}); give --memory SIZE") from error

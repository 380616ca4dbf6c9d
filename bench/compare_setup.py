"""What a comparison compares: models, device, workloads of any rate. Kept in its folder, so that a later call of the
same command adds to the same comparison and to no other."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from forebay.bench.arrivals import power_law_rates
from forebay.bench.draws import Draws
from forebay.bench.errors import BenchError
from forebay.bench.goodput import generated
from forebay.bench.servegen_files import parse_selections, read_clients, read_windows
from forebay.bench.workload_file import Workload

DEFAULT_WEIGHTS = (12.0, 5.0, 3.0)
"""Of three models, as in MuxServe's example."""

DEFAULT_ALPHA = 2.1
MOST_SCALE = 1e4


class ComparedModel(msgspec.Struct, frozen=True):
    """`folder` is absolute; `popularity` its share of the requests relative to the others, as far as known."""

    name: str
    folder: str
    popularity: float


class Setup(msgspec.Struct, frozen=True):
    """Everything that the figures of all arms depend on. `devices` are those of the arm that spreads its models; the
    others use the first. `kv_bytes` is the KV pool of one of ours on one device, `utilization` the share of the
    device's memory that all engines of the others have together. `workload` holds words for `bench.workload`."""

    models: tuple[ComparedModel, ...]
    devices: tuple[str, ...]
    dtype: str
    load_format: str
    max_context: int
    max_sequences: int
    step_tokens: int
    kv_bytes: int
    utilization: float
    seconds: float
    workload: tuple[str, ...]
    trace: tuple[str, ...] = ()
    """ServeGen's files of client windows and of clients; then the models are its busiest clients."""
    ours: tuple[tuple[str, str], ...] = ()
    """Keys of our configuration and what they are to be, in YAML: `device.KEY` and `model.KEY` for all devices and
    models."""

    def build(self, rate: float) -> Workload:
        """Its arrivals at `rate` requests per second in all; the same ones for every arm. Raises BenchError."""
        if not self.trace:
            return generated([*self.workload, "--total-rate", f"{rate:g}", "--duration", f"{self.seconds:g}"])
        words = [*self.workload, "--servegen-windows", self.trace[0], "--duration", f"{self.seconds:g}"]
        wanted = max(1, round(rate * self.seconds))
        # Clients send in bursts, so a slice of seconds has a rate of its own: take more than enough, and thin it out.
        scale = 1.0
        while len((workload := generated([*words, "--scale-rate", f"{scale:g}"])).requests) < wanted:
            if scale > MOST_SCALE:
                raise BenchError(
                    f"{self.trace[0]}: no {wanted} requests in {self.seconds:g} s at any scale: lower --rates"
                )
            scale *= 2
        return thinned(workload, wanted)


def thinned(workload: Workload, count: int) -> Workload:
    """`count` of its requests, each as likely as the others, the same ones each time."""
    kept = sorted(Draws(0, "thinning").permutation(len(workload.requests))[:count])
    return Workload(
        workload.info, [workload.arrivals[place] for place in kept], [workload.requests[place] for place in kept]
    )


def model_names(count: int) -> list[str]:
    return [f"llm-{place}" for place in range(count)]


def popularity(count: int, weights: Sequence[float] | None, alpha: float | None) -> list[float]:
    """Of each model, the first one's 1 or more. Raises BenchError where the weights are not as many as the models."""
    if weights is not None:
        if len(weights) != count:
            raise BenchError(f"--weights names {len(weights)} for {count} models: give as many, or --alpha A")
        return list(weights)
    if alpha is None and count == len(DEFAULT_WEIGHTS):
        return list(DEFAULT_WEIGHTS)
    return power_law_rates(count, DEFAULT_ALPHA if alpha is None else alpha, 100.0)


def workload_words(
    names: Sequence[str], shares: Sequence[float], prompts: str, outputs: str, longest: int, seed: int,
    drift: float | None, more: Sequence[str],
) -> tuple[str, ...]:  # fmt: skip
    """Words for `bench.workload` without a rate. No prompt and no output is longer than `longest` tokens."""
    models = ",".join(f"{name}:{share:g}" for name, share in zip(names, shares, strict=True))
    moving = () if drift is None else ("--drift", f"{drift:g}")
    return ("--models", models, *moving, *_lengths(prompts, outputs, longest), "--seed", str(seed), *more)


def servegen_words(
    names: Sequence[str], windows: Path, clients: Path, prompts: str, outputs: str, longest: int, seed: int,
    more: Sequence[str],
) -> tuple[str, ...]:  # fmt: skip
    """The same for ServeGen's busiest clients, each of which stands for one model, from the first window on in which
    most of them send. Raises BenchError."""
    busiest = sorted(read_clients(clients), key=lambda client: -client.requests)[: len(names)]
    if len(busiest) < len(names):
        raise BenchError(f"{clients}: lists {len(busiest)} clients, for {len(names)} models: compare fewer")
    models = ",".join(f"{one.model}/{one.client}={name}" for one, name in zip(busiest, names, strict=True))
    sending = Counter(window.start_s for window in read_windows(windows, parse_selections(models), 0.0, math.inf))
    start = max(sending, key=lambda moment: (sending[moment], -moment))
    lengths = _lengths(prompts, outputs, longest)
    return ("--models", models, "--start", f"{start:g}", *lengths, "--seed", str(seed), *more)


def _lengths(prompts: str, outputs: str, longest: int) -> tuple[str, ...]:
    limits = ("--max-prompt", str(longest), "--max-output", str(longest))
    return ("--prompt-lengths", prompts, "--output-lengths", outputs, *limits)

"""What a request takes when it is alone on the server: the yardstick of SLO attainment."""

import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from forebay.bench.client import Completions, Outcome
from forebay.bench.draws import Draws
from forebay.bench.errors import BenchError
from forebay.bench.workload_file import Workload, WorkloadRequest

POINTS = 4
"""How many prompt lengths are measured for each model, spread over the workload's range."""

OUTPUT_TOKENS = 16
"""The output of a measured request: enough decode steps for a mean."""


class Sample(msgspec.Struct, frozen=True):
    """One lone request: lengths in tokens, times in seconds."""

    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    latency_s: float


class ModelBaseline(msgspec.Struct, frozen=True):
    """Seconds of a lone request: prefill = `prefill_base_s` + prompt tokens x `prefill_token_s`, and each output
    token `decode_step_s`."""

    prefill_base_s: float
    prefill_token_s: float
    decode_step_s: float
    samples: tuple[Sample, ...] = ()

    def latency_s(self, prompt_tokens: int, output_tokens: int) -> float:
        prefill = self.prefill_base_s + prompt_tokens * self.prefill_token_s
        return prefill + output_tokens * self.decode_step_s


class Baseline(msgspec.Struct, frozen=True):
    models: dict[str, ModelBaseline]

    def check_models(self, names: Sequence[str], origin: str) -> None:
        missing = [name for name in names if name not in self.models]
        if missing:
            raise BenchError(
                f"{origin}: has nothing on the model {missing[0]!r}; it knows {', '.join(sorted(self.models))}: "
                f"measure again"
            )


def read_baseline(path: Path) -> Baseline:
    """Reads what `write_baseline` wrote. Raises BenchError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Baseline)
    except OSError as error:
        raise BenchError(f"baseline {path}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise BenchError(f"baseline {path}: not a baseline file: {error}") from error


def write_baseline(path: Path, baseline: Baseline) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(baseline)) + b"\n")


async def measure_baseline(
    client: Completions, workload: Workload, advance: Callable[[str, int, int], None]
) -> Baseline:
    """Sends lone requests to each model, one after the other, after one that warms it up. `advance` is told model,
    requests done and requests in all. Raises BenchError if one fails."""
    plans = {name: _probes(workload, name) for name in workload.models}
    total = sum(len(plan) for plan in plans.values())
    done = 0
    models: dict[str, ModelBaseline] = {}
    for name, plan in plans.items():
        samples: list[Sample] = []
        for prompt, output_tokens in plan:
            advance(name, done, total)
            outcome = Outcome(name, len(prompt), output_tokens, scheduled=time.perf_counter())
            await client.complete(outcome, prompt)
            if outcome.failure is not None:
                raise BenchError(
                    f"baseline: a lone request to {name!r} with {len(prompt)} prompt and {output_tokens} output "
                    f"tokens failed: {outcome.failure}: {outcome.message}"
                )
            samples.append(
                Sample(
                    len(prompt),
                    output_tokens,
                    outcome.first_token - outcome.scheduled,
                    outcome.end - outcome.scheduled,
                )
            )
            done += 1
        models[name] = fit(samples[1:])
        advance(name, done, total)
    return Baseline(models)


def fit(samples: Sequence[Sample]) -> ModelBaseline:
    """Least squares for the prefill line, the mean over all steps for decode. Neither part of the line may be
    negative: noise on nearly equal prompts must not make a longer prompt cheaper, or an empty one a gain."""
    prompts = np.array([sample.prompt_tokens for sample in samples], dtype=float)
    times = np.array([sample.ttft_s for sample in samples])
    base, per_token = float(times.mean()), 0.0
    if np.ptp(prompts) > 0:
        slope = float(np.cov(prompts, times, bias=True)[0, 1] / prompts.var())
        intercept = float(times.mean() - slope * prompts.mean())
        if slope > 0 and intercept >= 0:
            base, per_token = intercept, slope
        elif slope > 0:
            base, per_token = 0.0, float((prompts * times).sum() / (prompts * prompts).sum())
    steps = sum(sample.output_tokens - 1 for sample in samples)
    decode = sum(sample.latency_s - sample.ttft_s for sample in samples) / steps if steps else 0.0
    return ModelBaseline(base, per_token, decode, tuple(samples))


def _probes(workload: Workload, model: str) -> list[tuple[list[int], int]]:
    """(prompt, output length) of the lone requests of a model, the first one to warm it up. Prompts have lengths
    that occur in the workload but are made of its tokens anew, else a prefix cache would hold them."""
    requests = [request for request in workload.requests if request.model_name == model]
    by_length = sorted(requests, key=lambda request: request.prompt_tokens)
    places = np.linspace(0, len(by_length) - 1, POINTS).round().astype(int).tolist()
    chosen: dict[int, WorkloadRequest] = {}
    for place in places:
        chosen.setdefault(by_length[place].prompt_tokens, by_length[place])
    tokens = by_length[-1].prompt
    longest = max(request.prompt_tokens + request.output_tokens for request in requests)

    def output_tokens(request: WorkloadRequest) -> int:
        # Not past the longest context of the workload: the model may not have room for more.
        if request.prompt_tokens + OUTPUT_TOKENS <= longest:
            return OUTPUT_TOKENS
        return min(request.output_tokens, OUTPUT_TOKENS)

    # By chance, not by a fixed seed: a server's prefix cache may hold the prompts of an earlier baseline.
    draws = Draws(secrets.randbits(32), f"baseline of {model}")
    # One length alone is measured twice, so that a single hiccup does not make the yardstick.
    measured = list(chosen.values()) if len(chosen) > 1 else list(chosen.values()) * 2
    return [
        (
            [tokens[place] for place in draws.many_below(len(tokens), request.prompt_tokens).tolist()],
            output_tokens(request),
        )
        for request in [measured[0], *measured]
    ]

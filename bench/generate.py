"""Synthetic workloads: Poisson arrivals for several models, contents from a length source."""

import itertools
from collections.abc import Callable, Sequence

from forebay.bench.draws import Draws
from forebay.bench.errors import BenchError
from forebay.bench.lengths import LengthSource
from forebay.bench.models_file import ModelLoad
from forebay.bench.workload_file import Workload, WorkloadInfo, WorkloadRequest


def generate(
    models: Sequence[ModelLoad],
    source_of: Callable[[ModelLoad], LengthSource],
    *,
    seed: int,
    duration: float | None = None,
    num_requests: int | None = None,
    from_dataset: bool = False,
) -> Workload:
    """Requests of all models for `duration` seconds, or `num_requests` of them; exactly one of the two is given.

    The models' Poisson processes are drawn as one of the summed rate, each arrival given to a model by its share of
    the rate, which is the same. Raises BenchError if no request falls into `duration`."""
    if (duration is None) == (num_requests is None):
        raise ValueError("give either duration or num_requests")
    arrival_draws = Draws(seed, "arrivals")
    choice_draws = Draws(seed, "choice")
    content_draws = {model.name: Draws(seed, f"content of {model.name}") for model in models}
    sources = {model.name: source_of(model) for model in models}
    running_sums = list(itertools.accumulate(model.rate for model in models))
    arrivals: list[float] = []
    requests: list[WorkloadRequest] = []
    now = 0.0
    while num_requests is None or len(requests) < num_requests:
        now += arrival_draws.exponential(running_sums[-1])
        if duration is not None and now >= duration:
            break
        name = models[choice_draws.choose(running_sums)].name
        prompt, output_tokens = sources[name].draw(content_draws[name])
        arrivals.append(now)
        requests.append(WorkloadRequest(name, len(requests), (prompt, len(prompt), output_tokens)))
    if not requests:
        raise BenchError(
            f"no request arrives within {duration} s at {running_sums[-1]:g} req/s in all; raise the duration"
        )
    info = describe(
        [(model.name, model.rate) for model in models],
        requests,
        duration=now if duration is None else duration,
        distribution="poisson",
        from_dataset=from_dataset,
    )
    return Workload(info, arrivals, requests)


def describe(
    rates: list[tuple[str, float]],
    requests: Sequence[WorkloadRequest],
    *,
    duration: float,
    distribution: str,
    from_dataset: bool,
) -> WorkloadInfo:
    """The `info` of a workload; `prompt_len` and `output_len` are means in tokens."""
    counts = {name: 0 for name, _ in rates}
    for request in requests:
        counts[request.model_name] += 1
    return WorkloadInfo(
        rates=rates,
        start=0.0,
        duration=duration,
        num_requests=list(counts.values()),
        distribution=distribution,
        use_share_gpt=from_dataset,
        prompt_len=sum(request.prompt_tokens for request in requests) / len(requests),
        output_len=sum(request.output_tokens for request in requests) / len(requests),
    )

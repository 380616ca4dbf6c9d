"""Synthetic workloads: arrivals for several models by rate and law, contents from a source."""

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from forebay.bench.arrivals import POISSON, Gaps, Rate, arrival_times
from forebay.bench.draws import Draws
from forebay.bench.errors import BenchError
from forebay.bench.lengths import LengthSource
from forebay.bench.limits import check_count
from forebay.bench.models_file import ModelLoad
from forebay.bench.workload_file import Workload, WorkloadInfo, WorkloadRequest


class TurnPlan(NamedTuple):
    """One request of a conversation: `delay_s` after the conversation's first one; lengths in tokens."""

    delay_s: float
    prompt: list[int]
    output_tokens: int


@runtime_checkable
class ConversationSource(Protocol):
    """Where whole conversations come from. `mean_turns` is how many turns one has on average."""

    @property
    def mean_turns(self) -> float: ...

    def draw_turns(self, draws: Draws) -> list[TurnPlan]:
        """At least one turn, in the order of their delays, the first one's 0."""
        ...


class Arrival(NamedTuple):
    """A request of a model, `seconds` after the start. Its order is that of time, then of models."""

    seconds: float
    place: int
    number: int
    prompt: list[int]
    output_tokens: int


def generate(
    models: Sequence[ModelLoad],
    source_of: Callable[[ModelLoad], LengthSource | ConversationSource],
    *,
    seed: int,
    duration: float | None = None,
    num_requests: int | None = None,
    from_dataset: bool = False,
    gaps: Gaps = POISSON,
    rates: Sequence[Rate] | None = None,
) -> Workload:
    """Requests of all models for `duration` seconds, or `num_requests` of them; exactly one of the two is given.

    Each model's arrivals are drawn by themselves, so another model more or less leaves them as they were. `rates`
    (one for each model) replaces the constant rates of `models`. Where the source draws conversations, their first
    turns arrive by rate / mean turns and by law, so that all turns together come at the rate once conversations of
    every age are under way; later turns follow as the source says, and what would come after `duration` is cut off.
    Raises BenchError if no request falls into `duration`."""
    if (duration is None) == (num_requests is None):
        raise ValueError("give either duration or num_requests")
    courses = rates if rates is not None else [Rate((model.rate,)) for model in models]
    check_count(num_requests or sum(course.mean for course in courses) * (duration or 0.0))
    streams = [
        _requests_of(place, course, gaps, source_of(model), seed, model.name)
        for place, (model, course) in enumerate(zip(models, courses, strict=True))
    ]
    arrivals: list[float] = []
    requests: list[WorkloadRequest] = []
    now = 0.0
    for arrival in heapq.merge(*streams):
        if duration is not None and arrival.seconds >= duration:
            break
        now = arrival.seconds
        prompt = arrival.prompt
        arrivals.append(now)
        requests.append(
            WorkloadRequest(models[arrival.place].name, len(requests), (prompt, len(prompt), arrival.output_tokens))
        )
        if len(requests) == num_requests:
            break
    if not requests:
        total = sum(course.mean for course in courses)
        within = "" if duration is None else f" within {duration} s"
        raise BenchError(f"no request arrives{within} at {total:g} req/s in all; raise the duration or the rate")
    info = describe(
        [(model.name, course.mean) for model, course in zip(models, courses, strict=True)],
        requests,
        duration=now if duration is None else duration,
        distribution=gaps.kind,
        from_dataset=from_dataset,
    )
    return Workload(info, arrivals, requests)


def _requests_of(
    place: int, rate: Rate, gaps: Gaps, source: LengthSource | ConversationSource, seed: int, name: str
) -> Iterator[Arrival]:
    """One model's requests, in the order of time, endless where its rate is not 0."""
    content_draws = Draws(seed, f"content of {name}")
    if isinstance(source, ConversationSource):
        rate = rate.divided_by(source.mean_turns)
    later: list[Arrival] = []
    number = 0
    for start in arrival_times(rate, gaps, Draws(seed, f"arrivals of {name}")):
        while later and later[0].seconds <= start:
            yield heapq.heappop(later)
        for delay_s, prompt, output_tokens in _turns(source, content_draws):
            heapq.heappush(later, Arrival(start + delay_s, place, number, prompt, output_tokens))
            number += 1


def _turns(source: LengthSource | ConversationSource, draws: Draws) -> list[TurnPlan]:
    if isinstance(source, ConversationSource):
        return source.draw_turns(draws)
    return [TurnPlan(0.0, *source.draw(draws))]


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

"""ServeGen's production load of several models as workloads: arrivals drawn from rates by window, or from the law of
gaps that was fitted to each client in each window; lengths from the clients' summaries. Readers: servegen_files."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

from forebay.bench.arrivals import Gaps, Rate, arrival_times
from forebay.bench.draws import Draws
from forebay.bench.errors import BenchError
from forebay.bench.generate import describe
from forebay.bench.lengths import Lengths, Vocabulary
from forebay.bench.limits import check_count
from forebay.bench.servegen_files import (
    WINDOW_S,
    Client,
    Selection,
    TokenSummary,
    Window,
    read_clients,
    read_rates,
    read_windows,
)
from forebay.bench.token_ids import TokenIds
from forebay.bench.trace import Slice, scaled
from forebay.bench.workload_file import Workload, WorkloadRequest

Z99 = NormalDist().inv_cdf(0.99)


class ClientLengths:
    """The lengths of one client, or those of a group's clients mixed as they send requests. Clients without summaries
    take the mix of their model."""

    def __init__(self, clients: Sequence[Client]) -> None:
        known = [client for client in clients if client.prompt is not None and client.output is not None]
        self._laws = [(_lognormal(client.prompt), _lognormal(client.output)) for client in known]
        self._running_sums = list(itertools.accumulate(max(client.requests, 1e-9) for client in known))

    @property
    def known(self) -> bool:
        return bool(self._laws)

    def draw(self, draws: Draws) -> tuple[int, int]:
        prompt, output = self._laws[draws.choose(self._running_sums)]
        return prompt.draw(draws), output.draw(draws)


def _lognormal(summary: TokenSummary | None) -> Lengths:
    """Keeps the mean, which is the load; how wide it is comes from the distance between median and 99th percentile."""
    assert summary is not None
    sigma = math.log(max(summary.p99, 1.0) / max(summary.p50, 1.0)) / Z99
    return Lengths("lognormal", max(summary.mean, 1.0), max(sigma, 0.0))


@dataclass(frozen=True)
class LengthsByClient:
    """What to draw lengths from: the summaries of `clients`, or the two laws where there are none."""

    prompt: Lengths
    output: Lengths
    clients: Sequence[Client] = ()

    @classmethod
    def read(cls, prompt: Lengths, output: Lengths, path: Path | None) -> "LengthsByClient":
        return cls(prompt, output, [] if path is None else read_clients(path))

    def of(self, model: str, client: str | None) -> ClientLengths | None:
        """Of one client, or of all clients of a model. None where the two laws hold. Raises BenchError where there
        are summaries but none of this model."""
        if not self.clients:
            return None
        everybody = [one for one in self.clients if one.model == model]
        own = ClientLengths([one for one in everybody if client in (None, one.client)])
        found = own if own.known else ClientLengths(everybody)
        if not found.known:
            names = sorted({one.model for one in self.clients if one.prompt is not None and one.output is not None})
            raise BenchError(
                f"the clients file has no lengths for the model {model!r}; it knows {', '.join(names) or 'none'}"
            )
        return found

    def draw(self, source: ClientLengths | None, draws: Draws) -> tuple[int, int]:
        return (self.prompt.draw(draws), self.output.draw(draws)) if source is None else source.draw(draws)


def convert_rates(
    path: Path,
    selections: Sequence[Selection],
    part: Slice,
    gaps: Gaps,
    lengths: LengthsByClient,
    vocabulary: Vocabulary,
    *,
    seed: int,
) -> Workload:
    """`part` of the file of rates by window (its start counts from the file's day 0): each selected model's requests
    come at its windows' rates x `scale_rate`, with these gaps. Raises BenchError."""
    for selection in selections:
        if selection.client is not None:
            raise BenchError(
                f"models {selection.model}/{selection.client}: {path} has rates of whole models; name clients with "
                f"the file of client windows"
            )
    tables = read_rates(path, {selection.model for selection in selections}, part.start, part.end)
    first = math.floor(part.start / WINDOW_S)
    offset = part.start - first * WINDOW_S

    def arrivals(selection: Selection) -> Iterator[float]:
        table = tables[selection.model]
        steps = [table.get(first + place, 0.0) for place in range(max(table) - first + 1)]
        duration = len(steps) * WINDOW_S - offset if part.duration is None else part.duration
        rate = Rate(tuple(step * part.scale_rate for step in steps), WINDOW_S)
        check_count(rate.mean * duration)
        times = arrival_times(rate, gaps, Draws(seed, f"arrivals of {selection.name}"))
        for time in itertools.takewhile(lambda time: time < offset + duration, times):
            if time >= offset:
                yield time - offset

    streams = {selection: [(time, None) for time in arrivals(selection)] for selection in selections}
    return _workload(streams, path, part, lengths, vocabulary, seed, "servegen rates")


def convert_windows(
    path: Path,
    selections: Sequence[Selection],
    part: Slice,
    lengths: LengthsByClient,
    vocabulary: Vocabulary,
    *,
    seed: int,
) -> Workload:
    """`part` of the file of client windows: each client's requests in a window are as many as its rate x `scale_rate`
    says, with gaps drawn from its fitted law and stretched to fill the window. Raises BenchError."""
    streams: dict[Selection, list[tuple[float, str | None]]] = {selection: [] for selection in selections}
    expected = 0.0
    for window in read_windows(path, selections, part.start, part.end):
        expected += window.rate_rps * part.scale_rate * WINDOW_S
        check_count(expected)
        for selection in selections:
            if selection.takes(window.model, window.client):
                draws = Draws(seed, f"{window.model}/{window.client} from {window.start_s:g} s")
                times = window_arrivals(window, part.scale_rate, draws)
                streams[selection] += [
                    (time - part.start, window.client) for time in times if part.start <= time < part.end
                ]
    return _workload(streams, path, part, lengths, vocabulary, seed, "servegen windows")


def window_arrivals(window: Window, scale_rate: float, draws: Draws) -> list[float]:
    """Arrivals of one client in one window, in seconds of the trace, in no particular order.

    There are rate x `scale_rate` x 600 of them, a fraction standing for the chance of one more. The gaps close a ring
    that is turned at random: laid end to end from the window's start, every client would have a request on every
    border between windows, all of them at once."""
    expected = window.rate_rps * scale_rate * WINDOW_S
    count = math.floor(expected + 1e-6)
    count += draws.uniform() < expected - count
    gaps = [window.draw_gap(draws) for _ in range(count)]
    total = sum(gaps)
    if total <= 0:
        # Very bursty laws draw gaps too small for a float: all at one moment.
        gaps, total = [0.0] * count, 1.0
    turn = draws.uniform()
    times = (turn + place / total for place in itertools.accumulate(gaps))
    return [window.start_s + WINDOW_S * (time % 1.0) for time in times]


def _workload(
    streams: Mapping[Selection, Sequence[tuple[float, str | None]]],
    origin: Path,
    part: Slice,
    lengths: LengthsByClient,
    vocabulary: Vocabulary,
    seed: int,
    distribution: str,
) -> Workload:
    """Arrivals (seconds, client) of each selection as one workload."""
    merged = sorted(
        (time, place, client or "") for place, times in enumerate(streams.values()) for time, client in times
    )
    selections = list(streams)
    if not merged:
        raise BenchError(
            f"{origin}: no request of {', '.join(selection.source for selection in selections)} arrives from "
            f"{part.start:g} s {part.until} at --scale-rate {part.scale_rate:g}: change one of them"
        )
    draws = {selection: Draws(seed, f"content of {selection.name}") for selection in selections}
    sources: dict[tuple[str, str], ClientLengths | None] = {}
    requests: list[WorkloadRequest] = []
    for _, place, client in merged:
        selection = selections[place]
        key = (selection.model, client)
        if key not in sources:
            sources[key] = lengths.of(selection.model, client or None)
        prompt_tokens, output_tokens = (
            scaled(length, part.scale_tokens, maximum)
            for length, maximum in zip(
                lengths.draw(sources[key], draws[selection]), (part.max_prompt, part.max_output), strict=True
            )
        )
        prompt = TokenIds(vocabulary.draw(draws[selection], prompt_tokens))
        requests.append(WorkloadRequest(selection.name, len(requests), (prompt, prompt_tokens, output_tokens)))
    arrivals = [time for time, _, _ in merged]
    duration = arrivals[-1] if part.duration is None else part.duration
    counts = [(selection.name, len(streams[selection])) for selection in selections]
    rates = [(name, count / duration if duration > 0 else 0.0) for name, count in counts]
    info = describe(rates, requests, duration=duration, distribution=distribution, from_dataset=False)
    return Workload(info, arrivals, requests)

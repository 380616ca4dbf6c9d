"""The probes of a search for goodput: workloads of any rate, and a folder that keeps each probe's result."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec

from forebay.bench.draws import Draws
from forebay.bench.errors import BenchError
from forebay.bench.limits import LEAST_RATE, MOST_RATE
from forebay.bench.report import Report
from forebay.bench.token_ids import TokenIds
from forebay.bench.workload_file import Workload, WorkloadRequest

Read = TypeVar("Read", bound=msgspec.Struct)

RateSource: TypeAlias = Callable[[float], tuple[Workload, float]]
"""For a rate in requests per second: a workload, and what its arrival times are multiplied by."""


def mean_rate(workload: Workload, origin: str) -> float:
    """Requests per second, from the first arrival to the last. Raises BenchError where they span no time."""
    span = workload.arrivals[-1] - workload.arrivals[0]
    if span <= 0:
        raise BenchError(
            f"workload {origin}: its {len(workload.arrivals)} requests all arrive at once, so it has no rate to scale"
        )
    if not LEAST_RATE * span <= len(workload.arrivals) - 1 <= MOST_RATE * span:
        raise BenchError(
            f"workload {origin}: {len(workload.arrivals)} requests in {span:g} s; a rate from {LEAST_RATE:g} to "
            f"{MOST_RATE:,g} requests/s can be scaled"
        )
    return (len(workload.arrivals) - 1) / span


def by_time_scale(workload: Workload, origin: str) -> RateSource:
    """One workload at every rate, faster or slower. Raises BenchError."""
    own = mean_rate(workload, origin)
    return lambda rate: (workload, own / rate)


def relabelled(workload: Workload, seed: int) -> Workload:
    """The same workload with its token ids exchanged for one another at random: prompts share with each other what
    they shared before, and nothing with those of another seed. So a prefix cache does not hold the last probe's."""
    used = sorted({token for request in workload.requests for token in set(request.data[0])})
    exchanged = [used[place] for place in Draws(seed, "relabelling").permutation(len(used))]
    table = dict(zip(used, exchanged, strict=True))
    requests = [
        WorkloadRequest(
            request.model_name,
            request.idx,
            (TokenIds(table[token] for token in request.data[0]), request.prompt_tokens, request.output_tokens),
            request.slo,
            request.time_stamp,
        )
        for request in workload.requests
    ]
    return Workload(workload.info, workload.arrivals, requests)


class ProbeFile(msgspec.Struct, frozen=True):
    """`rate` in requests per second."""

    rate: float
    report: Report


class Setup(msgspec.Struct, frozen=True):
    """What all probes in a folder have in common."""

    base_url: str
    workload: str


@dataclass(frozen=True)
class ProbeFolder:
    """Keeps results, a file for each rate. Every write is whole or not at all."""

    folder: Path

    def open(self, setup: Setup) -> list[ProbeFile]:
        """Makes the folder, or reads what it holds, ascending by rate. Raises BenchError if it belongs to another
        search or holds a broken file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "setup.json"
        if path.exists():
            held = _read(path, Setup)
            if held != setup:
                raise BenchError(
                    f"{self.folder}: holds probes of another search ({held.workload} against {held.base_url}, this is "
                    f"{setup.workload} against {setup.base_url}): give another --folder, or delete it"
                )
        else:
            partial = path.with_name(".setup.json.partial")
            partial.write_bytes(msgspec.json.encode(setup) + b"\n")
            os.replace(partial, path)
        probes = [_read(file, ProbeFile) for file in self.folder.glob("probe-*.json")]
        return sorted(probes, key=lambda probe: probe.rate)

    def path(self, rate: float) -> Path:
        return self.folder / f"probe-{rate:g}.json"

    def write(self, probe: ProbeFile) -> None:
        path = self.path(probe.rate)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(probe)) + b"\n")
        os.replace(partial, path)


def _read(path: Path, kind: type[Read]) -> Read:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise BenchError(f"{path}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise BenchError(f"{path}: not a file of this search ({error}): delete it to repeat that probe") from error

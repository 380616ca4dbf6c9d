"""The workload file: MuxServe's JSON form as frozen structs, checked when read. Nothing here decides what is in it."""

import itertools
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from forebay.bench.errors import BenchError

Positive = Annotated[int, msgspec.Meta(ge=1)]
TokenId = Annotated[int, msgspec.Meta(ge=0)]


class WorkloadInfo(msgspec.Struct, frozen=True):
    """How a workload was made. `rates` holds (model, requests per second), `start` and `duration` are seconds,
    `num_requests` counts per model in the order of `rates`. Files of other makers put numbers, lists or null into
    the rest, and nothing here depends on them."""

    rates: list[tuple[str, float]] = []
    start: float | None = 0.0
    duration: float | None = None
    num_requests: int | list[int] | None = None
    distribution: str | None = None
    use_share_gpt: bool | None = None
    prompt_len: Any = None
    output_len: Any = None


class WorkloadRequest(msgspec.Struct, frozen=True):
    """One request. `data` is (token ids of the prompt, prompt length, output length), lengths in tokens."""

    model_name: str
    idx: int
    data: tuple[list[TokenId], Positive, Positive]
    slo: float | None = None
    time_stamp: dict[str, Any] | None = {}

    @property
    def prompt(self) -> list[int]:
        return self.data[0]

    @property
    def prompt_tokens(self) -> int:
        return self.data[1]

    @property
    def output_tokens(self) -> int:
        return self.data[2]


class Workload(msgspec.Struct, frozen=True):
    """`arrivals[i]` is when `requests[i]` arrives, in seconds from the start of the replay."""

    info: WorkloadInfo
    arrivals: list[float]
    requests: list[WorkloadRequest]

    @property
    def models(self) -> list[str]:
        """The models that its requests name, sorted."""
        return sorted({request.model_name for request in self.requests})

    def first(self, count: int) -> "Workload":
        """The same workload cut after its first `count` requests."""
        return Workload(self.info, self.arrivals[:count], self.requests[:count])


def write_workload(path: Path, workload: Workload) -> None:
    """Writes beside `path` first and renames, so that a reader never sees half a file."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(msgspec.json.encode(workload) + b"\n")
    os.replace(partial, path)


def read_workload(path: Path) -> Workload:
    """Reads and checks a file. Run-time fields of its requests (null on disk) are ignored.

    Raises BenchError that names the file, the request by index, the field, its value and what is allowed."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BenchError(f"workload {path}: cannot be read: {error.strerror}") from error
    try:
        workload = msgspec.json.decode(content, type=Workload)
    except msgspec.ValidationError as error:
        raise BenchError(f"workload {path}: {_explain(str(error), content)}") from error
    except msgspec.DecodeError as error:
        raise BenchError(
            f"workload {path}: not whole JSON ({error}; the file holds {len(content)} bytes): write or copy it again"
        ) from error
    problem = next(_problems(workload), None)
    if problem is not None:
        raise BenchError(f"workload {path}: {problem}")
    return workload


def _problems(workload: Workload) -> Iterator[str]:
    """What the types alone do not rule out."""
    if not workload.requests:
        yield "requests: is empty; at least one request is needed"
    if len(workload.arrivals) != len(workload.requests):
        yield (
            f"arrivals: holds {len(workload.arrivals)} times for {len(workload.requests)} requests; "
            f"one for each request is needed"
        )
    for index, arrival in enumerate(workload.arrivals):
        if not (math.isfinite(arrival) and arrival >= 0):
            yield f"arrivals[{index}]: is {arrival}; seconds of 0 or more are allowed"
    for index, (earlier, later) in enumerate(itertools.pairwise(workload.arrivals), start=1):
        if later < earlier:
            yield f"arrivals[{index}]: is {later}, before the {earlier} ahead of it; arrivals must be sorted"
    for index, request in enumerate(workload.requests):
        if request.prompt_tokens != len(request.prompt):
            yield (
                f"requests[{index}]: data[1] (prompt_len) is {request.prompt_tokens}; it must be the number of token "
                f"ids in data[0], {len(request.prompt)}"
            )


_FIELDS = {"data[0]": "token_ids", "data[1]": "prompt_len", "data[2]": "output_len"}


def _explain(message: str, content: bytes) -> str:
    """msgspec says what is allowed and where (`Expected ... - at `$.requests[3].data[1]``): adds the value."""
    found = re.fullmatch(r"(?P<rule>.*?) - at `\$\.?(?P<where>.*)`", message)
    if found is None:
        return f"top level: {message[0].lower()}{message[1:]}"
    rule, where = found["rule"], found["where"]
    value: Any = msgspec.json.decode(content)
    for step in re.findall(r"[^.\[\]]+", where):
        value = value[int(step)] if isinstance(value, list) else value[step]
    name = next((f"{where} ({field})" for suffix, field in _FIELDS.items() if where.endswith(suffix)), where)
    if rule.startswith("Object missing"):
        return f"{name}: {rule[0].lower()}{rule[1:]}"
    shown = json.dumps(value)
    return f"{name}: is {shown if len(shown) <= 60 else shown[:57] + '...'}; {rule[0].lower()}{rule[1:]}"

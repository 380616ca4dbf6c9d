"""The workload file: MuxServe's JSON form as frozen structs, checked when read. Nothing here decides what is in it.

A file of a gigabyte must be no trouble: it is mapped, not read, and prompts stay arrays of four bytes a token."""

import codecs
import itertools
import json
import math
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec

from forebay.bench.errors import BenchError
from forebay.bench.limits import MOST_TOKENS
from forebay.bench.token_ids import TokenIds, of_json, to_json

Positive = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]


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
    data: tuple[Sequence[int], int, int]
    slo: float | None = None
    time_stamp: dict[str, Any] | None = {}

    @property
    def prompt(self) -> list[int]:
        """The token ids, as a list made anew each time."""
        return list(self.data[0])

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


class _StoredRequest(msgspec.Struct, frozen=True):
    """A request as it must be on disk."""

    model_name: str
    idx: int
    data: tuple[TokenIds, Positive, Positive]
    slo: float | None = None
    time_stamp: dict[str, Any] | None = None


class _StoredWorkload(msgspec.Struct, frozen=True):
    info: WorkloadInfo
    arrivals: list[float]
    requests: list[_StoredRequest]


class _Parts(msgspec.Struct, frozen=True):
    """The same file, looked at only as far as an error asks."""

    info: msgspec.Raw = msgspec.Raw(b"null")
    arrivals: msgspec.Raw = msgspec.Raw(b"null")
    requests: msgspec.Raw = msgspec.Raw(b"null")


def write_workload(path: Path, workload: Workload) -> None:
    """Writes beside `path` first and renames, so that a reader never sees half a file."""
    partial = path.with_name(f".{path.name}.partial")
    encode = msgspec.json.Encoder(enc_hook=to_json).encode
    with partial.open("wb") as file:
        file.write(b'{"info":' + encode(workload.info) + b',"arrivals":' + encode(workload.arrivals))
        file.write(b',"requests":[')
        for index, request in enumerate(workload.requests):
            file.write(b"," if index else b"")
            file.write(encode(request))
        file.write(b"]}\n")
    os.replace(partial, path)


def read_workload(path: Path) -> Workload:
    """Reads and checks a file. Run-time fields of its requests (null on disk) are ignored.

    Raises BenchError that names the file, the request by index, the field, its value and what is allowed."""
    try:
        with _mapped(path) as content:
            stored = _decode(path, content)
    except OSError as error:
        raise BenchError(f"workload {path}: cannot be read: {error.strerror}") from error
    requests = [
        WorkloadRequest(request.model_name, request.idx, request.data, request.slo, request.time_stamp)
        for request in stored.requests
    ]
    workload = Workload(stored.info, stored.arrivals, requests)
    problem = next(_problems(workload), None)
    if problem is not None:
        raise BenchError(f"workload {path}: {problem}")
    return workload


@contextmanager
def _mapped(path: Path) -> Iterator[memoryview]:
    """The bytes of a file, without a byte order mark. Raises OSError."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            yield memoryview(b"")  # nothing cannot be mapped
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as content:
            begin = len(codecs.BOM_UTF8) if mapped[: len(codecs.BOM_UTF8)] == codecs.BOM_UTF8 else 0
            with content[begin:] as text:
                yield text


def _decode(path: Path, content: memoryview) -> _StoredWorkload:
    try:
        return msgspec.json.decode(content, type=_StoredWorkload, dec_hook=of_json)
    except msgspec.ValidationError as error:
        # The traceback would keep views of the file, which is about to be unmapped.
        message = str(error)
    except msgspec.DecodeError as error:
        raise BenchError(
            f"workload {path}: not whole JSON ({error}; the file holds {len(content)} bytes): write or copy it again"
        ) from None
    except RecursionError:
        raise BenchError(f"workload {path}: its values are nested too deeply for a workload: write it again") from None
    raise BenchError(f"workload {path}: {_explain(message, content)}")


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
        if request.prompt_tokens != len(request.data[0]):
            yield (
                f"requests[{index}]: data[1] (prompt_len) is {request.prompt_tokens}; it must be the number of token "
                f"ids in data[0], {len(request.data[0])}"
            )


_FIELDS = {"data[0]": "token_ids", "data[1]": "prompt_len", "data[2]": "output_len"}


def _explain(message: str, content: memoryview) -> str:
    """msgspec says what is allowed and where (`Expected ... - at `$.requests[3].data[1]``): adds the value."""
    rule, *places = message.split(" - at `$")
    # What is wrong inside a prompt has a place within it, and then the prompt's own.
    where = "".join(place.rstrip("`") for place in reversed(places)).removeprefix(".")
    if not where:
        return f"top level: {rule[0].lower()}{rule[1:]}"
    name = next((f"{where} ({field})" for suffix, field in _FIELDS.items() if where.endswith(suffix)), where)
    if rule.startswith("Object missing"):
        return f"{name}: {rule[0].lower()}{rule[1:]}"
    try:
        shown = json.dumps(_value_at(where, content))
    except (msgspec.DecodeError, RecursionError):
        return f"{name}: {rule[0].lower()}{rule[1:]}"  # a value that nothing can hold
    return f"{name}: is {shown if len(shown) <= 60 else shown[:57] + '...'}; {rule[0].lower()}{rule[1:]}"


def _value_at(where: str, content: memoryview) -> Any:
    """The value at a place such as `requests[3].data[1]`. Of the requests only that one is taken apart."""
    first, *steps = re.findall(r"[^.\[\]]+", where)
    part: msgspec.Raw = getattr(msgspec.json.decode(content, type=_Parts), first)
    if first == "requests" and steps:
        part = msgspec.json.decode(part, type=list[msgspec.Raw])[int(steps.pop(0))]
    value: Any = msgspec.json.decode(part)
    for step in steps:
        value = value[int(step)] if isinstance(value, list) else value[step]
    return value

"""What a comparison keeps in its folder: a file for each arm and for each point, whole or not at all."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from forebay.bench.baseline import Baseline
from forebay.bench.client import Outcome
from forebay.bench.compare_setup import Setup
from forebay.bench.errors import BenchError

Kept = TypeVar("Kept", bound=msgspec.Struct)


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One request of a replay. Seconds from its scheduled arrival; None for what never came."""

    model: str
    prompt_tokens: int
    output_tokens: int
    sent_s: float | None
    first_s: float | None
    end_s: float | None
    failure: str | None

    @classmethod
    def of(cls, outcome: Outcome) -> "Sample":
        def since(moment: float | None) -> float | None:
            return None if moment is None else moment - outcome.scheduled

        came = bool(outcome.chunk_times)
        return cls(
            outcome.model, outcome.prompt_tokens, outcome.output_tokens, since(outcome.sent),
            since(outcome.first_token) if came else None, since(outcome.end) if came else None, outcome.failure,
        )  # fmt: skip

    @property
    def outcome(self) -> Outcome:
        """As if it had been scheduled at 0, with two chunks."""
        times = [] if self.first_s is None or self.end_s is None else [self.first_s, self.end_s]
        return Outcome(
            self.model, self.prompt_tokens, self.output_tokens, 0.0, self.sent_s, times,
            tokens=None if self.failure else self.output_tokens, failure=self.failure,
        )  # fmt: skip


class Point(msgspec.Struct, frozen=True):
    """A replay at `rate` requests per second in one arm. `call` names the run of the command that made it. `ended`:
    "cut" where what had not finished in time was cut off (it counts as failed), "server_lost" where a server went.
    `errors` has one message of each kind of failure."""

    arm: str
    rate: float
    call: str
    duration_s: float
    ended: Literal["complete", "cut", "server_lost"]
    samples: tuple[Sample, ...]
    errors: dict[str, str]

    @property
    def outcomes(self) -> list[Outcome]:
        return [sample.outcome for sample in self.samples]


class ArmState(msgspec.Struct, frozen=True):
    """The last time an arm was started. `failure` says why it gave no figures, or no more; `baseline` is what lone
    requests took in it."""

    arm: str
    call: str
    command: tuple[str, ...]
    commit: str | None
    gpu: str | None
    start_s: float | None = None
    failure: str | None = None
    baseline: Baseline | None = None


@dataclass(frozen=True)
class ComparisonFolder:
    folder: Path

    def open(self, setup: Setup) -> None:
        """Makes the folder. Raises BenchError if it belongs to another comparison."""
        for folder in (self.folder, self.folder / "points", self.folder / "arms", self.folder / "logs"):
            folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "setup.json"
        if not path.exists():
            _write(path, setup)
            return
        held = _read(path, Setup)
        for name in Setup.__struct_fields__:
            before, now = getattr(held, name), getattr(setup, name)
            if before != now:
                raise BenchError(
                    f"{self.folder}: holds another comparison ({name} is {before!r} there, {now!r} here): give another "
                    f"--output, or delete it"
                )

    def points(self) -> list[Point]:
        """All of them, by arm and rate. Raises BenchError for a broken file."""
        points = [_read(path, Point) for path in (self.folder / "points").glob("*.json")]
        return sorted(points, key=lambda point: (point.arm, point.rate))

    def has(self, arm: str, rate: float) -> bool:
        """Whether the point needs no repetition."""
        path = self._point(arm, rate)
        return path.exists() and _read(path, Point).ended != "server_lost"

    def write_point(self, point: Point) -> None:
        _write(self._point(point.arm, point.rate), point)

    def forget(self, arm: str, rates: Sequence[float]) -> None:
        for rate in rates:
            self._point(arm, rate).unlink(missing_ok=True)

    def arms(self) -> dict[str, ArmState]:
        return {state.arm: state for path in (self.folder / "arms").glob("*.json") for state in [_read(path, ArmState)]}

    def write_arm(self, state: ArmState) -> None:
        _write(self.folder / "arms" / f"{state.arm}.json", state)

    def _point(self, arm: str, rate: float) -> Path:
        return self.folder / "points" / f"{arm}-{rate:g}.json"


def _write(path: Path, content: msgspec.Struct) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(msgspec.json.encode(content) + b"\n")
    os.replace(partial, path)


def _read(path: Path, kind: type[Kept]) -> Kept:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise BenchError(f"{path}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise BenchError(
            f"{path}: not a file of this comparison ({error}): delete it to repeat what it held"
        ) from error

"""What a worker did, as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing: its lanes with their steps, copies,
and the events that came in. One JSON object a line, in an array that is whole but for its last bracket while it is
being written; both programs read it so, and after a SIGKILL as well.

Times are those of the machine's monotonic clock, so that the traces of several workers can be laid side by side. A step
is drawn for the time that it took on the device, up to when it landed.
"""

import os
from pathlib import Path
from typing import Any

import msgspec

from forebay.sched.lane_events import (
    DropSlabs,
    FillSlabs,
    LaneCommand,
    LaneEvent,
    LendSlabs,
    ModelOpened,
    Reset,
    SlabsBack,
    SpillFreed,
    SpillGrew,
    SpillRevoked,
    TakeBackSlabs,
    WantSpill,
)
from forebay.transport.messages import (
    Cancel,
    CopyBlocks,
    CopyDone,
    CopyFailed,
    EvictWeights,
    RestoreWeights,
    Start,
    StepDone,
    StepFailed,
    StepPlan,
    WeightsBack,
    WeightsFailed,
    WeightsGone,
)

BUFFER_BYTES = 1 << 16
"""Held back at most before it is written; what is held back is lost with a process that is killed."""

MOST_BYTES = 1 << 30
"""A trace grows no larger: what comes after is not recorded."""

MARKS = (
    Reset, SlabsBack, SpillFreed, SpillGrew, SpillRevoked, LendSlabs, TakeBackSlabs, WantSpill, ModelOpened, DropSlabs,
    FillSlabs,
)  # fmt: skip
"""Events and commands that are drawn as a moment."""

_encode = msgspec.json.Encoder().encode


class StepTrace:
    """Writes to `path`; a folder: to a new file in it, named by device and process. Raises OSError."""

    def __init__(self, path: Path, gpu: str) -> None:
        if path.is_dir():
            path /= f"worker-{gpu.replace(':', '-')}-{os.getpid()}.json"
        self.path = path
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._lines: list[bytes] = [b"[\n"]
        self._held = 0
        self._written = 0
        self.problem = ""
        """Why the trace ended before its worker, or nothing."""
        self._process = os.getpid()
        self._tracks: dict[str, int] = {}
        self._steps: dict[int, tuple[StepPlan, float]] = {}
        self._copies: dict[int, tuple[CopyBlocks, float]] = {}
        self._moves: dict[str, tuple[EvictWeights | RestoreWeights, float]] = {}
        self._free: dict[str, float] = {}
        self._write({"ph": "M", "name": "process_name", "pid": self._process, "args": {"name": f"worker {gpu}"}})

    def event(self, now: float, event: LaneEvent) -> None:
        """What enters the lane core."""
        match event:
            case StepDone():
                self._landed(now, event.step, event.seconds, "")
            case StepFailed(step, reason):
                self._landed(now, step, 0.0, reason)
            case CopyDone(copy):
                self._copied(now, copy, "")
            case CopyFailed(copy, reason):
                self._copied(now, copy, reason)
            case WeightsGone(model) | WeightsBack(model):
                self._moved(now, model, "")
            case WeightsFailed(model, reason):
                self._moved(now, model, reason)
            case Start(request=request, model=model, prompt_tokens=prompt_tokens):
                self._mark(now, "Start", {"request": request, "model": model, "prompt_tokens": prompt_tokens})
            case Cancel(request):
                self._mark(now, "Cancel", {"request": request})
            case _:
                self._moment(now, event)

    def command(self, now: float, command: LaneCommand) -> None:
        """What comes out of it."""
        match command:
            case StepPlan():
                self._steps[command.step] = command, now
            case CopyBlocks():
                self._copies[command.copy] = command, now
            case EvictWeights(model) | RestoreWeights(model):
                self._moves[model] = command, now
            case _:
                self._moment(now, command)

    def _moment(self, now: float, message: Any) -> None:
        if isinstance(message, MARKS):
            self._mark(now, type(message).__name__, msgspec.structs.asdict(message))

    def _landed(self, now: float, step: int, seconds: float, failure: str) -> None:
        plan, queued = self._steps.pop(step)
        track = f"decode {plan.model}" if plan.lane == "decode" else plan.lane
        # A lane takes one step after the other; the device's clock and this one may differ by a little.
        began = max(now - seconds, queued, self._free.get(track, 0.0)) if seconds else queued
        self._free[track] = now
        self._span(
            track,
            plan.model,
            began,
            now,
            {
                "step": plan.step,
                "model": plan.model,
                "lane": plan.lane,
                "share": plan.share,
                "batch": len(plan.work),
                "prompt_tokens": sum(work.count for work in plan.work if work.count > 1 or not work.sample),
                "queued_us": _us(queued),
                "started_us": _us(began),
                "landed_us": _us(now),
                **({"failed": failure} if failure else {}),
            },
        )

    def _copied(self, now: float, copy: int, failure: str) -> None:
        command, began = self._copies.pop(copy)
        arguments = {"model": command.model, "blocks": len(command.source), **({"failed": failure} if failure else {})}
        # Copies overlap: each kind has as many tracks as there were at once.
        number = 1
        while self._free.get(track := f"copies {command.kind} {number}", 0.0) > began:
            number += 1
        self._free[track] = now
        self._span(track, command.model, began, now, arguments)

    def _moved(self, now: float, model: str, failure: str) -> None:
        command, began = self._moves.pop(model)
        comes = isinstance(command, RestoreWeights)
        self._span("weights in" if comes else "weights out", model, began, now, {"failed": failure} if failure else {})

    # The file --------------------------------------------------------------------------------------------------------

    def _span(self, track: str, name: str, began: float, ended: float, arguments: dict[str, Any]) -> None:
        place = {"pid": self._process, "tid": self._track(track), "ts": _us(began), "dur": _us(ended) - _us(began)}
        self._write({"ph": "X", "name": name, "cat": track.partition(" ")[0], **place, "args": arguments})

    def _mark(self, now: float, name: str, arguments: dict[str, Any]) -> None:
        place = {"pid": self._process, "tid": self._track("events"), "ts": _us(now), "s": "t"}
        self._write({"ph": "i", "name": name, "cat": "events", **place, "args": arguments})

    def _track(self, name: str) -> int:
        if name not in self._tracks:
            self._tracks[name] = number = len(self._tracks) + 1
            place = {"pid": self._process, "tid": number}
            self._write({"ph": "M", "name": "thread_name", **place, "args": {"name": name}})
        return self._tracks[name]

    def _write(self, record: dict[str, Any]) -> None:
        if self._written > MOST_BYTES:
            return
        line = _encode(record) + b",\n"
        self._lines.append(line)
        self._held += len(line)
        if self._held > BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """To the operating system, so that a process that is killed later loses nothing of it."""
        if self._lines:
            data = memoryview(b"".join(self._lines))
            self._written += len(data)
            self._lines.clear()
            self._held = 0
            try:
                while data:
                    data = data[os.write(self._file, data) :]
            except OSError as error:  # a full disk ends the trace, not the worker
                self.problem = f"{self.path}: {error.strerror}"
                self._written = MOST_BYTES + 1

    def close(self) -> None:
        """Ends the array. Closing twice is fine."""
        if self._file >= 0:
            end = {"ph": "M", "name": "process_labels", "pid": self._process, "args": {"labels": "ended"}}
            self._lines.append(_encode(end) + b"\n]\n")
            self.flush()
            os.close(self._file)
            self._file = -1


def _us(seconds: float) -> int:
    return round(seconds * 1e6)

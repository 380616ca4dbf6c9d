"""What the command lines of a measurement share: signals, exit codes, where output goes."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import uvloop
from rich.console import Console

from forebay.bench.errors import BenchError, Interrupted
from forebay.gpu.errors import DeviceError, ModelLoadError

Result = TypeVar("Result")

PLAIN_WIDTH = 140
"""Columns of a table that does not go to a terminal."""


def run_until_signal(work: Callable[[asyncio.Event], Awaitable[Result]]) -> tuple[Result, int | None]:
    """Runs `work` with an event that SIGINT and SIGTERM set; returns its result and the signal that came, if any."""
    received: list[int] = []

    async def main() -> Result:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def note(number: int) -> None:
            received.append(number)
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, note, number)
        try:
            return await work(stop)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(main())
    return result, received[0] if received else None


def exit_code(failed: int, signal_number: int | None) -> int:
    """128 + the signal if one came (130 for Ctrl-C), else 1 if anything failed."""
    if signal_number is not None:
        return 128 + signal_number
    return 1 if failed else 0


def reported(work: Callable[[], int]) -> int:
    """The exit status of `work`; an error that a person can mend is printed, and 1. SIGTERM ends it in good order, as
    Ctrl-C does: what was started is ended."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        return work()
    except Interrupted as error:
        print(f"error: {error}", file=sys.stderr)
        return 130
    except (BenchError, DeviceError, ModelLoadError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def check_outputs(*paths: Path | None) -> None:
    """Makes the folders of files that are to be written at the end of a measurement. Raises BenchError before it
    begins if one cannot be written."""
    for path in paths:
        if path is None:
            continue
        if path.is_dir() or not path.name:
            raise BenchError(f"{path}: is a folder; name a file in it")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BenchError(
                f"{path}: the folder {path.parent} cannot be made ({error.strerror}); give a path that can be written"
            ) from error
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise BenchError(f"{path}: nothing can be written in {path.parent}; give another folder, or allow it")


def table_console() -> Console:
    """Standard output, wide enough for the tables also where it is a file."""
    return Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)

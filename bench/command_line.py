"""What the command lines of a measurement share: signals, exit codes, where output goes."""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

import uvloop
from rich.console import Console

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


def table_console() -> Console:
    """Standard output, wide enough for the tables also where it is a file."""
    return Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)

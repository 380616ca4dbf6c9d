"""Servers started for a measurement: ready, or why not; and nothing of them left afterwards."""

import asyncio
import os
import select
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from forebay.bench.errors import BenchError, Interrupted
from forebay.bench.server_process import ServerProcess

PRELUDE = """
import os, signal, subprocess, sys, threading
def tell(number):
    with open(sys.argv[1], "w") as pipe:
        pipe.write(str(number))
"""


class Program:
    """A server of a few lines, which can `tell` the test one number."""

    def __init__(self, program: str, folder: Path, stop_s: float = 10.0) -> None:
        self._pipe = folder / "pipe"
        os.mkfifo(self._pipe)
        command = [sys.executable, "-c", PRELUDE + textwrap.dedent(program), str(self._pipe)]
        self.process = ServerProcess(command, folder / "server.log", stop_s)

    async def told(self) -> int:
        return int(await asyncio.to_thread(self._pipe.read_text))


def has_ended(descriptor: int) -> bool:
    """Waits a little for the process behind a pidfd to end, and closes it."""
    try:
        return bool(select.select([descriptor], [], [], 5)[0])
    finally:
        os.close(descriptor)


async def test_a_server_that_ends_early_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    process = Program("print('no such device', file=sys.stderr); sys.exit(3)", tmp_path).process
    shown: list[str] = []
    with pytest.raises(BenchError, match=r"status 3 before it was ready; .*server\.log:\nno such device"):
        async with process:
            await process.ready(asyncio.Event(), shown.append)
    assert process.returncode == 3


async def test_waiting_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.bench.server_process.START_S", 0.2)
    async with Program("print('still busy', flush=True); signal.pause()", tmp_path).process as process:
        with pytest.raises(BenchError, match=r"0\.2 s passed before it was ready"):
            await process.ready(asyncio.Event(), lambda _: None)


async def test_stop_interrupts_waiting(tmp_path: Path) -> None:
    stop = asyncio.Event()
    program = Program("tell(os.getpid()); signal.pause()", tmp_path)
    async with program.process as process:
        pid = os.pidfd_open(await program.told())
        stop.set()
        with pytest.raises(Interrupted):
            await process.ready(stop, lambda _: None)
    assert has_ended(pid)
    assert process.returncode == -signal.SIGTERM


async def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN); tell(os.getpid()); threading.Event().wait()"
    program = Program(ignore, tmp_path, stop_s=0.3)
    async with program.process as process:
        pid = os.pidfd_open(await program.told())
    assert process.returncode == -signal.SIGKILL
    assert has_ended(pid)


async def test_offspring_in_other_sessions_is_found_and_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.bench.server_process.STRAGGLER_S", 0.2)
    parent = """
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        tell(child.pid)
        threading.Event().wait()
    """
    program = Program(parent, tmp_path)
    async with program.process as process:
        child = await program.told()
        descriptor = os.pidfd_open(child)
    assert process.returncode == 0
    assert process.left_behind == [child]
    assert has_ended(descriptor)


async def test_an_exception_inside_leaves_nothing_running(tmp_path: Path) -> None:
    program = Program("tell(os.getpid()); signal.pause()", tmp_path)
    pids = []

    async def fail_inside() -> None:
        async with program.process:
            pids.append(os.pidfd_open(await program.told()))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail_inside()
    assert has_ended(pids[0])

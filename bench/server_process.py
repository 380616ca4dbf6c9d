"""A server started for a measurement: a real process, whose whole offspring is gone when the measurement is over."""

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
import msgspec

from forebay.bench.errors import BenchError, Interrupted

POLL_S = 0.1
START_S = 300.0
"""How long a server may take until every model is ready."""
STRAGGLER_S = 5.0
"""How long what the server started may outlive it: such processes notice by themselves that it is gone."""
MARK = "FOREBAY_MEASUREMENT"
"""Environment variable by which all descendants of a server are found, whatever session they are in."""
SOCKETS = "XDG_RUNTIME_DIR"
"""A folder of its own for the server's sockets lets it run beside another one of the same user."""
LOG_LINES = 20
LEASH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG; an exec keeps it
if os.getppid() != int(sys.argv[1]):
    sys.exit("the measurement has ended before its server began")
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]}: {error.strerror}")
"""
"""Becomes the server's command: it is asked to end when the measurement ends without having asked, as after SIGKILL."""


class ReadyFile(msgspec.Struct):
    """What a server writes once its front door listens."""

    url: str


class ServerProcess:
    """Runs `command`; its output goes to `log`. One of ours gets `--ready-file PATH` appended and tells its address
    there; any other OpenAI-compatible server will answer at `url`, and is ready once it lists its models. `environment`
    is added to ours. Leaving the context ends the server and everything it started, by force where asking does not help
    within `stop_s` seconds."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        stop_s: float,
        *,
        url: str | None = None,
        environment: Mapping[str, str] | None = None,
        start_s: float | None = None,
    ) -> None:
        self.command = list(command)
        self.log = log
        self.returncode: int | None = None
        self.left_behind: list[int] = []
        """Processes of the server's that had to be killed after it had ended."""
        self._stop_s = stop_s
        self._start_s = START_S if start_s is None else start_s
        self._url = url
        self._environment = environment or {}
        self._mark = secrets.token_hex(8)

    async def __aenter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="forebay-")
        self._ready_file = Path(self._folder.name, "ready.json")
        with self.log.open("wb") as log:
            # A session of its own: Ctrl-C at a terminal is for us, who then end the server in good order.
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                LEASH,
                str(os.getpid()),
                *self.command,
                *([] if self._url else ["--ready-file", str(self._ready_file)]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **self._environment, MARK: self._mark, SOCKETS: self._folder.name},
            )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.stop()
        finally:
            for pid in self._running():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await self._offspring_gone()
            await self._process.wait()
            self._folder.cleanup()

    async def ready(self, stop: asyncio.Event, show: Callable[[str], None]) -> str:
        """Waits until every model is ready; the server's base URL. `show` is told what it waits for.

        Raises BenchError, with the last lines of the log, if the server ends before or takes too long;
        Interrupted if `stop` is set."""
        url = self._url
        path = "readyz" if url is None else "v1/models"
        deadline = time.monotonic() + self._start_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
            while not stop.is_set():
                if self._process.returncode is not None:
                    raise self._not_ready(f"the server ended with status {self._process.returncode}")
                if time.monotonic() > deadline:
                    raise self._not_ready(f"{self._start_s:g} s passed")
                if url is None:
                    url = self._announced()
                    show("starting")
                elif await _is_ready(session, f"{url}/{path}"):
                    return url
                else:
                    show("loading models")
                await asyncio.sleep(POLL_S)
        raise Interrupted("interrupted before the server was ready: there is nothing to report")

    async def stop(self) -> None:
        """Asks the server to end, waits, and kills what is left. Afterwards `returncode` and `left_behind` tell how
        it went. Does nothing the second time."""
        if self.returncode is not None:
            return
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._stop_s):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
        self.returncode = await self._process.wait()
        self.left_behind = await self._offspring_gone()

    async def _offspring_gone(self) -> list[int]:
        """Waits up to STRAGGLER_S for what is left to end; what is still left then."""
        deadline = time.monotonic() + STRAGGLER_S
        left = self._running()
        while left and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
            left = self._running()
        return left

    def _announced(self) -> str | None:
        try:
            return msgspec.json.decode(self._ready_file.read_bytes(), type=ReadyFile).url
        except FileNotFoundError:
            return None

    def _running(self) -> list[int]:
        """Living processes that carry our mark. A zombie has no environment any more and is not among them."""
        mark = f"{MARK}={self._mark}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes()
            except OSError:
                continue  # ended meanwhile, or another user's
            if mark in environment.split(b"\0"):
                found.append(int(folder.name))
        return found

    def _not_ready(self, what: str) -> BenchError:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return BenchError("\n".join([f"{what} before it was ready; the end of {self.log}:", *lines]))


def scheduler_command(config: Path, port: int = 0) -> list[str]:
    """Starts our own server on `port`, 0 being any free one."""
    return [sys.executable, "-m", "forebay.runtime.scheduler", str(config), "--port", str(port)]


async def _is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False

"""An MPS daemon of one's own: NVIDIA's service through which several processes share a GPU at the same time. It needs
no root: all that it has lies in one folder, pipes in `pipe`, logs in `log`.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

CONTROL, SERVER = "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"
PIPES, LOGS, PERCENTAGE = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"

REQUIRED = "FOREBAY_MPS_REQUIRED"
"""Set for a process that must not use the GPU without the daemon: CUDA itself goes on without one where none is, and
without the percentage."""

PATIENCE_S = 30.0
"""How long a daemon may take to come up, or to end."""

LONGEST_PATH = 107
"""Bytes of a Unix socket's address; the daemon has several in its folder of pipes."""

LONGEST_NAME = "control_privileged"

LEFTOVERS = ("control", "control_lock", "control_privileged", "log", f"{CONTROL}.pid")
"""What a daemon that was killed leaves in its folder of pipes."""


class MpsError(Exception):
    """Says what is wrong and what to do."""


def environment(folder: Path, percentage: int = 100) -> dict[str, str]:
    """Variables that make a process a client of the folder's daemon, with at most that part of each GPU's SMs."""
    variables = {PIPES: str(folder / "pipe"), LOGS: str(folder / "log")}
    return variables if percentage == 100 else {**variables, PERCENTAGE: str(percentage)}


def running(folder: Path) -> int | None:
    """The process id of the folder's daemon, if one lives. One of another user is not seen."""
    with contextlib.suppress(OSError, ValueError):
        pid = int((folder / "pipe" / f"{CONTROL}.pid").read_text())
        if _is_daemon(pid, folder):
            return pid
    return next((pid for pid in _processes() if _is_daemon(pid, folder)), None)


def servers(folder: Path) -> list[int]:
    """The process ids of the daemon's servers, which it starts when clients come. They survive a daemon that is
    killed: their clients go on, but nobody can join them any more."""
    return sorted(pid for pid in _processes() if any(word.endswith(SERVER.encode()) for word in _words(pid, folder)))


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _is_daemon(pid: int, folder: Path) -> bool:
    """Whether this process is a daemon (not one that only talks to it) with that folder."""
    words = _words(pid, folder)
    return b"-d" in words and any(word.endswith(CONTROL.encode()) for word in words)


def _words(pid: int, folder: Path) -> list[bytes]:
    """The command line of a living process that has that folder in its environment; nothing for any other."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        dead = b") Z " in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return []
    return words if not dead and f"{PIPES}={folder / 'pipe'}".encode() in variables else []


def require() -> None:
    """Raises MpsError where this process must be a daemon's client and there is none."""
    if REQUIRED in os.environ and (pipes := os.environ.get(PIPES)) and running(folder := Path(pipes).parent) is None:
        raise MpsError(f"no MPS daemon runs in {folder}; start one with: forebay mps start {folder}")


def explain() -> str:
    """For an error of a process that is to be a client: what it is a client of, and if no daemon is there, that."""
    pipes = os.environ.get(PIPES)
    if pipes is None:
        return ""
    folder = Path(pipes).parent
    if running(folder) is None:
        return f" (no MPS daemon runs in {folder}; forebay mps start {folder} starts one)"
    return f" (this process uses the MPS daemon in {folder})"


def start(folder: Path) -> int:
    """Starts a daemon with this folder, which is made if need be; what a dead one left there is removed. Gives its
    process id. Raises MpsError."""
    folder = folder.absolute()
    _require_program()
    if len(os.fsencode(folder / "pipe" / LONGEST_NAME)) > LONGEST_PATH:
        raise MpsError(f"{folder} is too long a path for the daemon's sockets; name a shorter one")
    if (pid := running(folder)) is not None:
        raise MpsError(
            f"an MPS daemon runs in {folder} already (process {pid}); end it with: forebay mps stop {folder}"
        )
    if left := servers(folder):
        raise MpsError(
            f"the MPS daemon in {folder} died, its servers live on (processes {', '.join(map(str, left))}) and may "
            f"have clients yet, which lose the GPU with them; end what was left with: forebay mps stop {folder}"
        )
    try:
        for part in ("pipe", "log"):
            (folder / part).mkdir(parents=True, exist_ok=True, mode=0o700)
        clear(folder)
    except OSError as error:
        raise MpsError(f"{folder} cannot be the daemon's folder: {error.strerror}; name another") from error
    _tell(folder, ["-d"], "")
    deadline = time.monotonic() + PATIENCE_S
    while (pid := running(folder)) is None:
        if time.monotonic() > deadline:
            raise MpsError(f"no MPS daemon came up in {folder} within {PATIENCE_S:g} s{_log(folder)}")
        time.sleep(0.02)
    return pid


def stop(folder: Path) -> int:
    """Ends the folder's daemon, and gives the process id that it had. Raises MpsError where none runs (what a dead one
    left is removed, its servers are ended) and where it does not end: it waits for its clients."""
    folder = folder.absolute()
    pid = running(folder)
    if pid is None:
        ended = [f"{SERVER} {server}" for server in _end_servers(folder)]
        if left := clear(folder) + ended:
            raise MpsError(f"the MPS daemon in {folder} was dead; what it left was removed ({', '.join(left)})")
        raise MpsError(f"no MPS daemon runs in {folder}; forebay mps start {folder} starts one")
    _require_program()
    _tell(folder, [], "quit\n", f"process {pid} waits for its clients: end them first")
    deadline = time.monotonic() + PATIENCE_S
    while running(folder) is not None:
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _end_servers(folder)
            raise MpsError(f"the MPS daemon in {folder} (process {pid}) did not end within {PATIENCE_S:g} s; killed it")
        time.sleep(0.02)
    clear(folder)
    return pid


def _end_servers(folder: Path) -> list[int]:
    """Of a daemon that is dead; gives their process ids. Raises MpsError where one cannot be ended."""
    ended = servers(folder)
    for how, patience_s in ((signal.SIGTERM, 3.0), (signal.SIGKILL, PATIENCE_S)):
        for pid in servers(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
        deadline = time.monotonic() + patience_s
        while servers(folder) and time.monotonic() < deadline:
            time.sleep(0.02)
    if left := servers(folder):
        raise MpsError(
            f"the servers of the dead MPS daemon in {folder} do not end (processes {left}): end them by hand"
        )
    return ended


def clear(folder: Path) -> list[str]:
    """Removes what a dead daemon left in its folder of pipes, and tells what that was."""
    left = [name for name in LEFTOVERS if os.path.lexists(folder / "pipe" / name)]
    for name in left:
        (folder / "pipe" / name).unlink()
    return left


def _require_program() -> None:
    if shutil.which(CONTROL) is None:
        raise MpsError(f"{CONTROL} is not on the PATH; it comes with NVIDIA's driver (some systems pack it separately)")


def _tell(folder: Path, words: list[str], told: str, why_not: str = "") -> None:
    """Runs the control program to its end. Raises MpsError with what it said."""
    command = " ".join([CONTROL, *words])
    # To a file: the daemon inherits its standard output, and a pipe would stay open for as long as it lives.
    with open(folder / "log" / "forebay.log", "w+", encoding="utf-8", errors="replace") as said:
        try:
            ended = subprocess.run(
                [CONTROL, *words],
                input=told,
                text=True,
                stdout=said,
                stderr=said,
                env={**os.environ, **environment(folder)},
                timeout=PATIENCE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise MpsError(f"{command} did not end within {PATIENCE_S:g} s. {why_not}".rstrip()) from None
        except OSError as error:
            raise MpsError(f"{command} cannot be run: {error.strerror}") from error
        if ended.returncode:
            said.seek(0)
            raise MpsError(f"{command} ended with status {ended.returncode}: {said.read().strip()}{_log(folder)}")


def _log(folder: Path) -> str:
    """The end of the daemon's own log, for an error message."""
    try:
        lines = (folder / "log" / "control.log").read_text(errors="replace").splitlines()[-5:]
    except OSError:
        return ""
    return "\n" + "\n".join(lines)

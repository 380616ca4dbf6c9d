"""Starting and ending an MPS daemon of one's own, with a program that behaves as NVIDIA's does: a daemon that lives on
when its caller is gone, with a file of its process id, and that ends when it is told to."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from forebay.runtime import mps
from forebay.runtime.mps import MpsError
from tests.runtime.lending_hub import until

DAEMON = f"""#!{sys.executable}
import os, signal, sys
pipes = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
pid_file = os.path.join(pipes, "nvidia-cuda-mps-control.pid")
if sys.argv[1:] == ["-d"]:
    if os.environ.get("MPS_FAILS"):
        print("cannot bind", file=sys.stderr)
        sys.exit(1)
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.environ.get("MPS_SERVES") and not os.fork():
        os.execv(sys.executable, ["/usr/bin/nvidia-cuda-mps-server", "-c", "import signal; signal.pause()"])
    open(os.path.join(pipes, "control"), "w").close()
    with open(pid_file + ".new", "w") as file:
        file.write(f"{{os.getpid()}}\\n")
    os.rename(pid_file + ".new", pid_file)
    signal.pause()
assert sys.stdin.read() == "quit\\n"
os.kill(int(open(pid_file).read()), signal.SIGTERM)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / mps.CONTROL).write_text(DAEMON)
    (programs / mps.CONTROL).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    place = tmp_path / "mps"
    yield place
    if (pid := mps.running(place)) is not None:
        kill(pid)
    for pid in mps.servers(place):
        kill(pid)
    assert mps.running(place) is None


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    # It is no child of ours: whoever adopted it may leave it a zombie.
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        os.sched_yield()


def test_a_daemon_is_started_found_and_ended(folder: Path) -> None:
    assert mps.running(folder) is None
    pid = mps.start(folder)
    assert mps.running(folder) == pid
    assert mps.environment(folder, 40) == {
        "CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe",
        "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "40",
    }
    with pytest.raises(MpsError, match=rf"runs in {folder} already \(process {pid}\)"):
        mps.start(folder)
    assert mps.stop(folder) == pid
    with pytest.raises(MpsError, match=f"no MPS daemon runs in {folder}; forebay mps start"):
        mps.stop(folder)


def test_a_daemon_without_its_file_is_found_all_the_same(folder: Path) -> None:
    pid = mps.start(folder)
    (folder / "pipe" / f"{mps.CONTROL}.pid").write_text("1\n")
    assert mps.running(folder) == pid
    (folder / "pipe" / f"{mps.CONTROL}.pid").write_text(str(pid))


def test_what_a_dead_daemon_left_is_removed(folder: Path) -> None:
    for then in ("stop", "start"):
        pid = mps.start(folder)
        kill(pid)
        if then == "stop":
            with pytest.raises(MpsError, match=rf"was dead; what it left was removed \(control, {mps.CONTROL}.pid\)"):
                mps.stop(folder)
            assert not list((folder / "pipe").iterdir())
        else:
            assert mps.start(folder) != pid


def test_servers_of_a_dead_daemon_are_ended_when_a_person_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPS_SERVES", "1")
    daemon = mps.start(folder)
    until(lambda: mps.servers(folder), len)
    (server,) = mps.servers(folder)
    assert mps.servers(folder / "other") == []
    kill(daemon)
    with pytest.raises(MpsError, match=rf"died, its servers live on \(processes {server}\).*forebay mps stop {folder}"):
        mps.start(folder)
    assert mps.servers(folder) == [server]
    with pytest.raises(MpsError, match=rf"was dead; what it left was removed \(.*, nvidia-cuda-mps-server {server}\)"):
        mps.stop(folder)
    assert mps.servers(folder) == []
    monkeypatch.delenv("MPS_SERVES")
    assert mps.start(folder) != daemon


def test_what_keeps_it_from_starting_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MPS_FAILS", "1")
    with pytest.raises(MpsError, match="-d ended with status 1: cannot bind"):
        mps.start(folder)
    with pytest.raises(MpsError, match="too long a path"):
        mps.start(folder / ("x" * 100))
    (tmp_path / "file").touch()
    with pytest.raises(MpsError, match="Not a directory; name another"):
        mps.start(tmp_path / "file" / "mps")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MpsError, match="is not on the PATH; it comes with NVIDIA's driver"):
        mps.start(folder)


def test_the_command_says_what_clients_need(folder: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "forebay.apps.mps", *arguments],
            capture_output=True, text=True, timeout=50, check=False,
        )  # fmt: skip

    started = run("start", str(folder))
    assert started.returncode == 0, started.stderr
    assert f"export CUDA_MPS_PIPE_DIRECTORY={folder}/pipe" in started.stdout
    again = run("start", str(folder))
    assert again.returncode == 1
    assert again.stderr.startswith("forebay mps: an MPS daemon runs in")
    stopped = run("stop", str(folder))
    assert (stopped.returncode, stopped.stderr) == (0, "")


def test_a_client_without_its_daemon_is_told_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mps.explain() == ""
    monkeypatch.setenv(mps.PIPES, f"{folder}/pipe")
    assert mps.explain() == f" (no MPS daemon runs in {folder}; forebay mps start {folder} starts one)"
    mps.start(folder)
    assert mps.explain() == f" (this process uses the MPS daemon in {folder})"
    monkeypatch.setenv(mps.REQUIRED, "1")
    mps.require()
    mps.stop(folder)
    with pytest.raises(MpsError, match=f"no MPS daemon runs in {folder}; start one with: forebay mps start {folder}"):
        mps.require()
    monkeypatch.delenv(mps.REQUIRED)
    mps.require()

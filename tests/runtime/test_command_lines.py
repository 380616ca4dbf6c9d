"""What a command line says that cannot work ends its process before anything starts, in one line that says why."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from forebay.runtime import front_door, scheduler
from forebay.transport.codec import read_to_scheduler
from forebay.transport.messages import Query, ToScheduler
from forebay.transport.zeromq import ZmqHub
from tests.system.server import Server

ROOT = Path(__file__).resolve().parent.parent.parent


def run(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.mark.parametrize("port", ["65536", "-1", "http", "1e3", "", "\N{ARABIC-INDIC DIGIT TWO}"])
def test_a_port_that_is_none(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    for main in (scheduler.main, front_door.main):
        with pytest.raises(SystemExit, match="2"):
            main([f"--port={port}"])
        assert f"argument --port: {port!r} is no port; allowed are 0 to 65535" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["forebay.runtime.scheduler", "forebay.runtime.front_door"])
def test_a_port_that_is_none_ends_the_process(module: str) -> None:
    ended = run(module, "--port=65536")
    assert ended.returncode == 2
    assert "argument --port: '65536' is no port; allowed are 0 to 65535" in ended.stderr
    assert "Traceback" not in ended.stderr


def cannot_start(*arguments: str, **environment: str) -> str:
    """The error of the scheduler's one log line; nothing of it is left."""
    with tempfile.TemporaryDirectory(prefix="fb-") as folder:  # pytest's own are too long for a Unix socket's address
        runtime = Path(folder, "runtime")
        ended = run("runtime.scheduler", "--port", "0", *arguments, **{"XDG_RUNTIME_DIR": str(runtime), **environment})
        (line,) = ended.stderr.splitlines()
        said = json.loads(line)
        assert (ended.returncode, said["event"]) == (1, "cannot start")
        assert not [path for path in runtime.rglob("*") if path.is_file() or path.is_socket()]
        assert not list(runtime.rglob("run-*"))
    return str(said["error"])


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--journal", "file", "journals cannot be written to"),
        ("--journal", "file/below", "Not a directory"),
        ("--journal", "/proc/forebay", "journals cannot be written to '/proc/forebay'"),
        ("--ready-file", "missing/ready.json", "make it"),
        ("--ready-file", "folder", "it is a folder"),
    ],
)
def test_a_place_that_cannot_be_written(tmp_path: Path, option: str, value: str, words: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    error = cannot_start(option, str(tmp_path / value))
    assert str(tmp_path / value) in error
    assert words in error


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ("relative", "'relative'; it must be an absolute path"),
        ("/dev/null", "'/dev/null/forebay' cannot be made for sockets: Not a directory"),
        ("/tmp/" + "x" * 100, "a shorter XDG_RUNTIME_DIR helps"),
    ],
)
def test_an_unusable_runtime_folder(tmp_path: Path, base: str, words: str) -> None:
    try:
        assert words in cannot_start(XDG_RUNTIME_DIR=base)
    finally:
        if base.startswith("/tmp/"):
            Path(base, "forebay").rmdir()
            Path(base).rmdir()


def test_an_endpoint_that_is_a_file_is_named_as_the_configurations_and_the_file_stays(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("text")
    (tmp_path / "x.yaml").write_text(f"endpoint: ipc://{precious}\n")
    ended = run("runtime.scheduler", str(tmp_path / "x.yaml"), "--port", "0")
    said = json.loads(ended.stderr)
    assert (ended.returncode, said["event"]) == (1, "the configuration cannot be used")
    assert "endpoint: " in said["error"]
    assert "there is a file" in said["error"]
    assert precious.read_text() == "text"
    assert sorted(os.listdir(tmp_path)) == ["precious", "x.yaml"]


async def test_a_second_scheduler_leaves_the_files_of_the_first_alone(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/first.sock"
    first: ZmqHub[Query, ToScheduler] = ZmqHub(
        endpoint, read_to_scheduler(), lambda peer, messages: None, lambda peer, error: None
    )
    ready, journals = tmp_path / "ready.json", tmp_path / "journals"
    ready.write_text("of the first")
    (tmp_path / "x.yaml").write_text(f"endpoint: {endpoint}\n")
    try:
        arguments = (str(tmp_path / "x.yaml"), "--ready-file", str(ready), "--journal", str(journals))
        assert "another process listens at" in cannot_start(*arguments)
    finally:
        first.close()
    assert ready.read_text() == "of the first"
    assert not journals.exists()


@pytest.mark.system
def test_a_ready_file_of_an_earlier_run_is_gone_once_the_scheduler_listens(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    ready.write_text("of an earlier run")
    with Server(None, tmp_path, "--ready-file", str(ready), ready=False) as server:
        server.until("the scheduler listens")
        assert not ready.exists() or "url" in json.loads(ready.read_text())
        server.start({})
        assert server.stop() == 0
        assert json.loads(ready.read_text())["url"] == server.url
        server.assert_nothing_left()


def test_a_workers_journal_where_none_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = run("runtime.worker", "--gpu", "cpu:0", "--scheduler", "ipc:///tmp/x", "--journal", str(tmp_path / "file"))
    assert ended.returncode == 2
    assert "argument --journal: journals cannot be written to" in ended.stderr
    assert "Traceback" not in ended.stderr

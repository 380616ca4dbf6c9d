"""Starting, stopping and dying, with real processes and real signals."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.system.server import ROOT, Process, Server, configuration, events, small

pytestmark = [pytest.mark.system, pytest.mark.timeout(200)]

LONG = {"model": "llm", "prompt": "On and on", "max_tokens": 1500, "ignore_eos": True, "stream": True}


def test_sigterm_lets_running_requests_end_and_takes_no_new_ones(smollm2: Path, tmp_path: Path) -> None:
    with Server(small(smollm2), tmp_path, "--journal", str(tmp_path / "journal")) as server:
        body = {**LONG, "max_tokens": 60, "stream_options": {"include_usage": True}}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            stream = events(response)
            next(stream)
            server.process.send_signal(signal.SIGTERM)
            server.until("draining: no new requests are taken")
            refused = server.complete({"model": "llm", "prompt": "x", "max_tokens": 1})
            assert refused.status_code == 503
            assert "shutting down" in refused.json()["error"]["message"]
            assert server.get("/readyz").status_code == 503
            assert list(stream)[-1]["usage"]["completion_tokens"] == 60
        assert server.wait() == 0
        server.assert_nothing_left()
        assert not list(server.runtime.rglob("run-*"))
        replayed = subprocess.run(
            [sys.executable, "-m", "runtime.journal", *map(str, (tmp_path / "journal").iterdir())],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert replayed.returncode == 0, replayed.stderr
        assert replayed.stdout.count("the same commands") == 3


def test_draining_has_its_bound_and_a_stream_that_is_cut_off_says_so(smollm2: Path, tmp_path: Path) -> None:
    with Server(small(smollm2, timeouts={"drain": 0.5}), tmp_path) as server:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=60) as response:
            stream = events(response)
            next(stream)
            server.process.send_signal(signal.SIGTERM)
            last = list(stream)[-1]
        assert "shutting down" in last["error"]["message"]
        assert server.wait() == 0
        server.assert_nothing_left()


def test_a_second_signal_does_not_wait(smollm2: Path, tmp_path: Path) -> None:
    with Server(small(smollm2, timeouts={"drain": 1000}), tmp_path) as server:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=60) as response:
            stream = events(response)
            next(stream)
            server.process.send_signal(signal.SIGINT)
            server.until("draining: no new requests are taken")
            server.process.send_signal(signal.SIGINT)
            assert server.wait() == 0
        server.assert_nothing_left()


def test_without_a_configuration_it_is_the_coordinator_alone_ready_at_once(tmp_path: Path) -> None:
    with Server(None, tmp_path) as server:
        assert server.get("/readyz").status_code == 200
        assert server.get("/healthz").status_code == 200
        assert server.workers() == []
        assert server.get("/v1/models").json()["data"] == []
        assert "text/html" in server.get("/").headers["content-type"]
        assert server.get("/docs").status_code == 200
        (door,) = server.children().values()
        assert "front_door" in " ".join(door.cmdline())
        assert server.stop() == 0
        server.assert_nothing_left()


def test_when_the_scheduler_is_killed_everything_that_it_started_ends(smollm2: Path, tmp_path: Path) -> None:
    with Server(configuration(smollm2), tmp_path) as server:
        assert len(server.children()) == 3
        server.process.kill()
        server.assert_nothing_left()


def test_a_worker_joins_by_hand_and_finds_a_scheduler_that_came_back(smollm2: Path, tmp_path: Path) -> None:
    by_hand = small(smollm2)
    by_hand["devices"][0]["spawn"] = False
    question = {"model": "llm", "prompt": "2 + 2 =", "max_tokens": 4, "temperature": 0}
    with Server(by_hand, tmp_path, ready=False) as first:
        endpoint = first.until("the scheduler listens")["endpoint"]
        worker_arguments = ("runtime.worker", "--gpu", "cpu:0", "--scheduler", endpoint)
        with Process(*worker_arguments, runtime=first.runtime) as worker:
            first.start(by_hand)
            pid = first.workers()[0]["pid"]
            assert pid == worker.process.pid
            answer = first.complete(question).json()["choices"][0]["text"]

            first.children()
            first.process.kill()
            first.assert_nothing_left()
            assert worker.process.poll() is None
            with Server(by_hand, tmp_path, ready=False, runtime=first.runtime) as second:
                second.start(by_hand)
                worker.until("joining anew; all requests are dropped")
                assert second.complete(question).json()["choices"][0]["text"] == answer
                assert [found["pid"] for found in second.workers()] == [pid]

                with Process(*worker_arguments, runtime=first.runtime) as rival:
                    assert rival.wait() == 78
                    assert "has a worker already" in rival.log
                worker.process.send_signal(signal.SIGTERM)
                assert worker.wait() == 0
                assert second.stop() == 0


def test_a_front_door_that_dies_comes_back_and_its_requests_are_ended(smollm2: Path, tmp_path: Path) -> None:
    with Server(small(smollm2), tmp_path) as server:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=60) as response:
            stream = events(response)
            next(stream)
            (door,) = [p for p in server.children().values() if "front_door" in " ".join(p.cmdline())]
            door.kill()
            with pytest.raises(httpx.HTTPError):
                list(stream)
        server.url = server.until("requests can be sent")["url"]
        # The first answer after the cancellation: the device is free for it.
        assert server.complete({"model": "llm", "prompt": "2 + 2 =", "max_tokens": 2}).status_code == 200
        assert [worker["running"] for worker in server.workers()] == [0]
        assert server.stop() == 0
        server.assert_nothing_left()


def test_requests_before_the_first_replica_are_refused_and_afterwards_they_queue(smollm2: Path, tmp_path: Path) -> None:
    with Server(small(smollm2), tmp_path, ready=False) as server:
        server.url = server.until("requests can be sent")["url"]
        early = server.complete({"model": "llm", "prompt": "x", "max_tokens": 1})
        assert early.status_code == 503
        assert early.headers["retry-after"]
        assert server.get("/readyz").status_code == 503
        server.until("a model is ready")
        assert server.get("/readyz").status_code == 200
        os.kill(server.workers()[0]["pid"], signal.SIGKILL)
        server.until("a process died and will be started again")
        late = server.complete({"model": "llm", "prompt": "2 + 2 =", "max_tokens": 2})
        assert late.status_code == 200, late.text
        server.children()
        assert server.stop() == 0
        server.assert_nothing_left()


def test_a_model_that_cannot_be_loaded_is_reported_and_the_others_serve(smollm2: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(smollm2, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    raw = small(smollm2)
    raw["models"].append({"name": "broken", "path": str(broken), "placement": ["cpu:0"]})
    with Server(raw, tmp_path, ready=False) as server:
        server.url = server.until("requests can be sent")["url"]
        failure = server.until(lambda line: line["event"] == "a model could not be loaded" and "worker" in line)
        assert failure["model"] == "broken"
        assert str(broken) in failure["reason"]
        status = server.get("/readyz")
        assert (status.status_code, status.json()["models"]["broken"]["state"]) == (503, "failed")
        refused = server.complete({"model": "broken", "prompt": "x", "max_tokens": 1})
        assert refused.status_code in (500, 503)
        assert "broken" in refused.json()["error"]["message"]
        assert server.complete({"model": "llm", "prompt": "x", "max_tokens": 1}).status_code == 200
        server.children()
        assert server.stop() == 0
        server.assert_nothing_left()


def run_scheduler(runtime: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "runtime.scheduler", *arguments],
        cwd=ROOT,
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_configuration_that_cannot_be_used_ends_it_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("devices: [{device: gpu}]")
    ended = run_scheduler(tmp_path, str(tmp_path / "bad.yaml"))
    assert ended.returncode == 1
    (line,) = map(json.loads, ended.stderr.splitlines())
    assert "devices[0].device" in line["error"]


def test_a_port_that_is_taken_ends_it_with_the_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, tempfile.TemporaryDirectory(prefix="fb-") as runtime:
        ended = run_scheduler(Path(runtime), "--port", str(taken.getsockname()[1]))
    assert ended.returncode == 1
    assert "Address already in use" in ended.stderr
    assert "front door exited with status 78" in ended.stderr


def test_a_second_scheduler_of_the_same_user_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with Server(None, tmp_path) as server:
        ended = run_scheduler(server.runtime, "--port", "0")
        assert ended.returncode == 1
        assert "another process listens at" in ended.stderr
        assert server.get("/workers").status_code == 200
        assert server.stop() == 0


def test_a_device_that_cannot_be_opened_ends_it_with_the_reason(smollm2: Path, tmp_path: Path) -> None:
    raw: dict[str, Any] = small(smollm2)
    raw["devices"][0]["device"] = "cuda:0"
    raw["models"][0]["placement"] = ["cuda:0"]
    with Server(raw, tmp_path, ready=False) as server:
        assert server.wait(100) == 1
        assert "cuda:0" in server.log
        assert "the device cannot be opened" in server.log
        server.assert_nothing_left()


def test_a_worker_that_dies_again_and_again_is_started_again_each_time(smollm2: Path, tmp_path: Path) -> None:
    question = {"model": "llm", "prompt": "2 + 2 =", "max_tokens": 2, "temperature": 0}
    with Server(small(smollm2), tmp_path) as server, ThreadPoolExecutor(1) as pool:
        answers = set()
        for _ in range(3):
            pid = server.workers()[0]["pid"]
            os.kill(pid, signal.SIGKILL)
            server.until("a process died and will be started again")
            answer = pool.submit(server.complete, question).result()
            assert answer.status_code == 200, answer.text + server.log
            answers.add(answer.json()["choices"][0]["text"])
            assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        assert len(answers) == 1
        server.children()
        assert server.stop() == 0
        server.assert_nothing_left()

"""A GPU's worker that is lost in the middle of its work, as real processes: how long its restart takes, and that every
request goes on.

    python -m pytest -q -s tests/cuda/test_lost_workers.py

takes about two minutes; what fails shows the server's log.
"""

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from forebay.runtime import mps
from forebay.runtime.child import EXIT_BROKEN
from forebay.runtime.supervisor import UNUSABLE
from tests.cuda.mps_processes import end_all
from tests.system.server import Process, Server

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

pytestmark = [pytest.mark.system, pytest.mark.model, pytest.mark.timeout(400)]

REQUESTS = 16
TOKENS = 400
BROKE_DOWN = "the device broke down; this worker ends"


def configured(model: Path, **device: Any) -> dict[str, Any]:
    return {
        "devices": [{"device": "cuda:0", "memory": "2GiB", "slab": "64MiB", **device}],
        "models": [
            {"name": "llm", "path": str(model), "placement": ["cuda:0"], "dtype": "bfloat16", "max_context": 2048,
             "max_sequences": 32, "step_tokens": 1024},
        ],
    }  # fmt: skip


def question(number: int) -> dict[str, Any]:
    return {
        "model": "llm", "prompt": f"{number} + {number} =", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip


class Answers:
    """REQUESTS streams at once, whose tokens are counted as they come."""

    def __init__(self, server: Server, pool: ThreadPoolExecutor) -> None:
        self._server = server
        self.pieces = [0] * REQUESTS
        self.futures: list[Future[dict[str, Any]]] = [pool.submit(self._ask, number) for number in range(REQUESTS)]

    def _ask(self, number: int) -> dict[str, Any]:
        """The last event, with its usage."""
        body = {**question(number), "stream": True, "stream_options": {"include_usage": True}}
        last: dict[str, Any] = {}
        with httpx.stream("POST", f"{self._server.url}/v1/completions", json=body, timeout=300) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    last = json.loads(line.removeprefix("data: "))
                    assert "error" not in last, last
                    self.pieces[number] += 1
        return last

    def until_all_decode(self, bound_s: float = 120.0) -> None:
        deadline = time.monotonic() + bound_s
        while min(self.pieces) < 10:
            for future in self.futures:
                assert not future.done() or future.exception() is None, future.exception()
            assert time.monotonic() < deadline, f"{self.pieces}\n{self._server.log}"
            time.sleep(0.002)

    def check(self) -> None:
        for future in self.futures:
            assert future.result(300)["usage"]["completion_tokens"] == TOKENS, self._server.log


def worker_pid(server: Server) -> int:
    return int(server.workers()[0]["pid"])


def test_a_worker_that_is_killed_while_it_replays_graphs(smollm2: Path, tmp_path: Path) -> None:
    with Server(configured(smollm2), tmp_path) as server, ThreadPoolExecutor(REQUESTS) as pool:
        for attempt in range(2):
            answers = Answers(server, pool)
            answers.until_all_decode()
            before, killed_at = worker_pid(server), time.monotonic()
            had = list(answers.pieces)
            assert max(had) < TOKENS, "the answers are not over yet"
            os.kill(before, signal.SIGKILL)
            server.until("a process died and will be started again")
            server.until("joined")
            joined = time.monotonic() - killed_at
            server.until("a model is ready")
            ready = time.monotonic() - killed_at
            answers.check()
            whole = time.monotonic() - killed_at
            print(
                f"\nkilled after {min(had)} to {max(had)} tokens, attempt {attempt}: device open after {joined:.1f} s, "
                f"model ready {ready:.1f} s, all {REQUESTS} answers whole {whole:.1f} s"
            )
            assert worker_pid(server) != before
        assert server.stop() == 0, server.log
        server.assert_nothing_left()


def test_a_sticky_error_ends_the_worker_and_its_requests_go_on_with_another(smollm2: Path, tmp_path: Path) -> None:
    by_hand = configured(smollm2, spawn=False)
    with Server(by_hand, tmp_path, ready=False) as server, ThreadPoolExecutor(REQUESTS) as pool:
        arguments = ("--gpu", "cuda:0", "--scheduler", server.until("the scheduler listens")["endpoint"])
        with Process("tests.cuda.sticky_worker", "150", *arguments, runtime=server.runtime) as broken:
            server.start(by_hand)
            answers = Answers(server, pool)
            error = broken.until(BROKE_DOWN)["error"]
            lost_at = time.monotonic()
            assert "must be started again" in error, error
            assert broken.wait() == EXIT_BROKEN, broken.log
            print(f"\nsticky error: {error}\nit ended {time.monotonic() - lost_at:.1f} s after its last word")
        with Process("runtime.worker", *arguments, runtime=server.runtime) as fresh:
            server.until("a model is ready")
            print(f"another is ready {time.monotonic() - lost_at:.1f} s after the error")
            answers.check()
            print(f"all answers are whole {time.monotonic() - lost_at:.1f} s after the error")
            assert server.stop() == 0, server.log + fresh.log


@pytest.fixture
def folder() -> Iterator[Path]:
    if shutil.which(mps.CONTROL) is None:
        pytest.skip("there is no MPS here")
    with tempfile.TemporaryDirectory(prefix="fb-mps-") as name:
        yield Path(name)
        end_all(Path(name))


def test_an_mps_daemon_that_dies_under_its_worker(smollm2: Path, tmp_path: Path, folder: Path) -> None:
    """With its server: the worker ends by CUDA's error, cannot come back, and does once there is a daemon again."""
    mps.start(folder)
    with Server(configured(smollm2, mps=str(folder)), tmp_path) as server, ThreadPoolExecutor(REQUESTS) as pool:
        answers = Answers(server, pool)
        answers.until_all_decode()
        daemon, servers = mps.running(folder), mps.servers(folder)
        print(f"\ndaemon {daemon}, servers {servers}")
        assert daemon is not None
        assert servers, "a client is served by one"
        died_at = time.monotonic()
        for pid in (daemon, *servers):
            os.kill(pid, signal.SIGKILL)
        ended = server.until(lambda line: line["event"] == BROKE_DOWN or line.get("child") == "worker cuda:0")
        print(f"{time.monotonic() - died_at:.1f} s later: {ended}")
        said = server.until(UNUSABLE)
        print(f"{time.monotonic() - died_at:.1f} s later: {said}")
        reasons = [line["error"] for line in server.lines if line["event"] == "the device cannot be opened"]
        print(f"the worker says: {reasons}")
        assert f"forebay mps start {folder}" in reasons[-1]
        server.until("a process died and will be started again")
        mps.start(folder)
        server.until("a model is ready")
        answers.check()
        print(f"all answers are whole {time.monotonic() - died_at:.1f} s after the daemon's death")
        assert server.stop() == 0, server.log
        server.assert_nothing_left()

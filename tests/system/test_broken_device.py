"""A device that breaks down under its worker; and what a worker's trace shows of its work."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from forebay.runtime.child import EXIT_BROKEN
from tests.runtime.test_step_trace import read, tracks
from tests.system.server import Process, Server, small

pytestmark = [pytest.mark.system, pytest.mark.model, pytest.mark.timeout(300)]

QUESTION = {"model": "llm", "prompt": "Once upon a time", "max_tokens": 40, "temperature": 0, "ignore_eos": True}


def test_the_worker_of_a_broken_device_ends_and_its_requests_go_on_with_another(smollm2: Path, tmp_path: Path) -> None:
    by_hand = small(smollm2)
    by_hand["devices"][0]["spawn"] = False
    with Server(by_hand, tmp_path, ready=False) as server, ThreadPoolExecutor(1) as pool:
        endpoint = server.until("the scheduler listens")["endpoint"]
        arguments = ("--gpu", "cpu:0", "--scheduler", endpoint)
        with Process("tests.system.broken_worker", "20", *arguments, runtime=server.runtime) as broken:
            server.start(by_hand)
            answer = pool.submit(server.complete, QUESTION)
            assert broken.until("the device broke down; this worker ends")["step"] == 20
            assert broken.wait() == EXIT_BROKEN
        with Process("runtime.worker", *arguments, runtime=server.runtime):
            server.until("a model is ready")
            interrupted = answer.result(100)
            assert interrupted.status_code == 200, interrupted.text
            text = interrupted.json()["choices"][0]["text"]
            assert text == server.complete(QUESTION).json()["choices"][0]["text"]
            assert interrupted.json()["usage"]["completion_tokens"] == 40
            assert server.stop() == 0


def test_a_trace_holds_all_steps_in_their_order_also_after_sigkill(smollm2: Path, tmp_path: Path) -> None:
    with Server(small(smollm2, trace="traces"), tmp_path) as server:
        assert server.complete(QUESTION).status_code == 200
        before = [process for process in server.children().values() if "runtime.worker" in " ".join(process.cmdline())]
        before[0].kill()
        server.until("a model is ready")
        assert server.complete(QUESTION).status_code == 200
        assert server.stop() == 0
        server.assert_nothing_left()
    traces = [read(path) for path in sorted((tmp_path / "traces").iterdir())]
    assert len(traces) == 2, "a file for each process"
    counts = []
    for records in traces:
        names = tracks(records)
        spans = [record for record in records if record["ph"] == "X"]
        assert {names[record["tid"]] for record in spans} <= {"mixed"}
        for first, second in pairwise(spans):
            assert first["ts"] + first["dur"] <= second["ts"] + second["dur"]
            assert first["args"]["landed_us"] <= second["args"]["started_us"], "one step after the other"
        counts.append(len(spans))
    assert max(counts) == 40

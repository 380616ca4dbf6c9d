"""A device that has worked and cannot be opened, or cannot load its model, any more: the others go on, its requests
wait, and it comes back when the cause is gone."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forebay.runtime.supervisor import UNUSABLE
from tests.system.server import Server, configuration

pytestmark = [pytest.mark.system, pytest.mark.model, pytest.mark.timeout(300)]

COSTS = {"some": {"1": {"100": {"1": {"32": {"prefill": 14.5, "decoding": 13.5}}}}}}


def question(model: str) -> dict[str, object]:
    return {"model": model, "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}


def test_a_device_that_stops_working_ends_nobody_and_comes_back(smollm2: Path, tmp_path: Path) -> None:
    costs, folder = tmp_path / "costs.json", tmp_path / "model"
    costs.write_text(json.dumps(COSTS))
    folder.mkdir()
    for file in smollm2.iterdir():
        (folder / file.name).symlink_to(file)
    raw = configuration(smollm2, costs=str(costs))
    raw["models"] = [
        {"name": "lost", "path": str(folder), "placement": ["cpu:0"]},
        {"name": "other", "path": str(smollm2), "placement": ["cpu:1"]},
    ]
    with Server(raw, tmp_path) as server, ThreadPoolExecutor(1) as pool:
        expected = server.complete(question("lost")).json()["choices"][0]["text"]
        pids = {worker["gpu"]: worker["pid"] for worker in server.workers()}

        costs.unlink()
        os.kill(pids["cpu:0"], signal.SIGKILL)
        said = server.until(UNUSABLE)
        assert (said["child"], said["how"]) == ("worker cpu:0", "exited with status 78")
        assert str(costs) in server.log
        answer = pool.submit(server.complete, question("lost"))
        assert server.complete(question("other")).status_code == 200
        server.until("a process died and will be started again")
        server.until("a process died and will be started again")

        folder.rename(tmp_path / "elsewhere")
        costs.write_text(json.dumps(COSTS))
        failed = server.until(lambda line: line["event"] == "a model could not be loaded" and "worker" in line)
        assert (failed["model"], failed["worker"][:5]) == ("lost", "cpu:0")
        assert "the folder does not exist" in failed["reason"]
        assert server.complete(question("other")).status_code == 200
        status = server.get("/readyz").json()["models"]["lost"]
        assert status["state"] in ("waiting", "loading")
        assert not answer.done(), "it waits"

        (tmp_path / "elsewhere").rename(folder)
        server.until(lambda line: line["event"] == "a model is ready" and line["model"] == "lost")
        back = answer.result(100)
        assert back.status_code == 200, back.text
        assert back.json()["choices"][0]["text"] == expected
        assert {w["gpu"]: w["pid"] for w in server.workers()}["cpu:1"] == pids["cpu:1"]
        server.children()
        assert server.stop() == 0
        server.assert_nothing_left()
    assert server.log.count(UNUSABLE) == 1, "said once"
    for event in ("a model could not be loaded", "the folder does not exist"):
        assert server.log.count(event) <= 2, "once by the worker, once by the scheduler"

"""A device whose memory others take: its pool gives back what is idle, says so, and serves on."""

from pathlib import Path

import pytest

from tests.system.server import Server, small

pytestmark = [pytest.mark.system, pytest.mark.model, pytest.mark.timeout(300)]

TAKEN = "another process takes the device's memory: KV memory is given back to it until there is room again"


def test_a_pool_gives_back_what_is_idle_and_requests_are_served_with_the_rest(smollm2: Path, tmp_path: Path) -> None:
    raw = small(smollm2)
    raw["devices"][0] |= {"reserve": "32TiB"}  # no machine has so much: there is always too little left
    with Server(raw, tmp_path) as server:
        said = server.until(TAKEN)
        assert said["reserve"] == 32 << 40
        assert said["bytes"] == 7 * (16 << 20), "128 MiB are 8 slabs: all but one"
        answer = server.complete({"model": "llm", "prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 40
        (worker,) = server.workers()
        assert worker["given"] == said["bytes"]
        gauge = f'forebay_worker_pool_given_bytes{{gpu="cpu:0",worker="{worker["id"]}"}}'
        (line,) = [line for line in server.get("/metrics").text.splitlines() if line.startswith(gauge)]
        assert float(line.split()[-1]) == said["bytes"]
        assert server.stop() == 0
        server.assert_nothing_left()
    assert server.log.count(TAKEN) == 1, "said once"

"""Memory overfilled three times: every text is what it is without pressure, whatever gives way and however."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.server import ROOT, Server

pytestmark = [pytest.mark.system, pytest.mark.model, pytest.mark.timeout(300)]

BLOCK_MIB = 0.703125  # 16 tokens of 30 layers, 3 heads of 64 numbers, keys and values, in float32
PROMPTS = [f"{number} friends walk along the river and talk about" for number in range(2, 11)]
OUTPUT = 48


def one_model(model: Path, memory: str, **device: Any) -> dict[str, Any]:
    return {
        "devices": [{"device": "cpu:0", "memory": memory, "slab": "4MiB", "threads": 1, **device}],
        "models": [{"name": "llm", "path": str(model), "placement": ["cpu:0"]}],
    }


async def complete_all(server: Server, model: str = "llm") -> list[str]:
    async with httpx.AsyncClient(base_url=server.url, timeout=200) as client:

        async def complete(prompt: str) -> str:
            body = {"model": model, "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            text: str = response.json()["choices"][0]["text"]
            return text

        return list(await asyncio.gather(*map(complete, PROMPTS)))


@pytest.fixture(scope="module")
def calm(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The texts with memory for all at once."""
    with Server(one_model(smollm2, "128MiB"), tmp_path_factory.mktemp("calm")) as server:
        texts = asyncio.run(complete_all(server))
        assert server.stop() == 0
        server.assert_nothing_left()
    return texts


@pytest.mark.parametrize("spill", ["64MiB", ""], ids=["spill", "recompute"])
@pytest.mark.parametrize("fairness", ["cfs", "fcfs"])
def test_greedy_text_is_the_same_under_pressure(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calm: list[str], fairness: str, spill: str
) -> None:
    monkeypatch.setenv("FOREBAY_CHECK_SPILLS", "1")
    needed = len(PROMPTS) * -(-(10 + OUTPUT) // 16) * BLOCK_MIB
    assert needed > 3 * 8
    configuration = one_model(smollm2, "8MiB", fairness=fairness, **({"spill": spill} if spill else {}))
    with Server(configuration, tmp_path, "--journal", str(tmp_path / "journal")) as server:
        texts = asyncio.run(complete_all(server))
        assert server.stop() == 0
        server.assert_nothing_left()
    assert texts == calm
    assert "a copy failed" not in server.log
    journals = sorted(map(str, (tmp_path / "journal").glob("lane-*.journal")))
    assert len(journals) == 1
    copies = Path(journals[0]).read_bytes().count(b"CopyDone")
    assert (copies > 4) == bool(spill), f"{copies} copies"
    replay_all(tmp_path / "journal")


def replay_all(folder: Path) -> None:
    """All journals lead to the same commands again."""
    replay = [sys.executable, "-m", "runtime.journal", *map(str, folder.iterdir())]
    done = subprocess.run(replay, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


async def both(server: Server) -> list[list[str]]:
    """The first model alone until it has borrowed, then the second one needs its memory back."""
    first = asyncio.create_task(complete_all(server, "first"))
    await asyncio.to_thread(server.until, "borrowed")
    second = asyncio.create_task(complete_all(server, "second"))
    return list(await asyncio.gather(first, second))


def test_a_device_lends_what_is_idle_and_takes_it_back_for_its_own_load(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calm: list[str]
) -> None:
    monkeypatch.setenv("FOREBAY_CHECK_SPILLS", "1")
    configuration = {
        "devices": [
            {"device": "cpu:0", "memory": "8MiB", "slab": "4MiB", "threads": 1, "fairness": "cfs"},
            {"device": "cpu:1", "memory": "32MiB", "slab": "4MiB", "threads": 1, "lend": True},
        ],
        "models": [
            {"name": "first", "path": str(smollm2), "placement": ["cpu:0"]},
            {"name": "second", "path": str(smollm2), "placement": ["cpu:1"]},
        ],
    }
    with Server(configuration, tmp_path, "--journal", str(tmp_path / "journal")) as server:
        server.until("lending what is idle")
        first, second = asyncio.run(both(server))
        server.until("lent memory is back")
        assert server.stop() == 0
        server.assert_nothing_left()
    assert first == second == calm
    assert "a copy failed" not in server.log
    replay_all(tmp_path / "journal")

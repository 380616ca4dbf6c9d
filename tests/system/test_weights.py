"""More models than fit: all are served as if they did, and a worker that dies over it costs nobody anything."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.server import ROOT, Server

pytestmark = [pytest.mark.system, pytest.mark.model, pytest.mark.timeout(400)]

NAMES = ("one", "two", "three", "four")
PROMPTS = ("Two friends walk along the river and talk about", "The best way to cook rice is")
OUTPUT = 12


def copies(model: Path, folder: Path) -> dict[str, Path]:
    """The same model in several folders, so that each name has weights of its own."""
    found = {}
    for name in NAMES:
        (folder / name).mkdir()
        for file in model.iterdir():
            (folder / name / file.name).symlink_to(file)
        found[name] = folder / name
    return found


def configuration(models: dict[str, Path], **device: Any) -> dict[str, Any]:
    return {
        "devices": [{"device": "cpu:0", "memory": "128MiB", "slab": "16MiB", "threads": 1, **device}],
        "models": [{"name": name, "path": str(path), "placement": ["cpu:0"]} for name, path in models.items()],
    }


async def complete_all(server: Server, names: tuple[str, ...] = NAMES) -> dict[str, list[str]]:
    """All prompts to all these models at once."""
    async with httpx.AsyncClient(base_url=server.url, timeout=200) as client:

        async def complete(model: str, prompt: str) -> str:
            body = {"model": model, "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            text: str = response.json()["choices"][0]["text"]
            return text

        async def of(model: str) -> list[str]:
            return list(await asyncio.gather(*(complete(model, prompt) for prompt in PROMPTS)))

        return dict(zip(names, await asyncio.gather(*map(of, names)), strict=True))


@pytest.fixture(scope="module")
def calm(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The texts of one model, whose weights stay: they are all the same one."""
    with Server(configuration({"one": smollm2}), tmp_path_factory.mktemp("calm")) as server:
        texts = asyncio.run(complete_all(server, ("one",)))
        assert server.stop() == 0
        server.assert_nothing_left()
    return dict.fromkeys(NAMES, texts["one"])


def metric(server: Server, name: str) -> dict[str, float]:
    """By model."""
    lines = [line for line in server.get("/metrics").text.splitlines() if line.startswith(f"{name}{{")]
    return {line.split('model="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}


def test_four_models_are_served_in_the_room_of_two(smollm2: Path, tmp_path: Path, calm: dict[str, list[str]]) -> None:
    models = copies(smollm2, tmp_path)
    with Server(
        configuration(models, weights_memory="1100MiB"), tmp_path, "--journal", str(tmp_path / "journal")
    ) as server:
        first = asyncio.run(complete_all(server))
        second = asyncio.run(complete_all(server, NAMES[:2]))
        restores = metric(server, "forebay_weights_restores_total")
        evictions = metric(server, "forebay_weights_evictions_total")
        seconds = metric(server, "forebay_weights_restore_seconds")
        assert server.stop() == 0
        server.assert_nothing_left()
    assert first == calm
    assert second == {name: calm[name] for name in NAMES[:2]}
    assert all(restores[name] >= 1 for name in NAMES)
    assert sum(restores.values()) - sum(evictions.values()) in (1, 2), "never more than two are there"
    assert all(0 < seconds[name] < 100 for name in NAMES)
    replay = [sys.executable, "-m", "runtime.journal", *map(str, (tmp_path / "journal").iterdir())]
    done = subprocess.run(replay, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_worker_that_is_killed_while_weights_come_costs_no_request(
    smollm2: Path, tmp_path: Path, calm: dict[str, list[str]]
) -> None:
    models = copies(smollm2, tmp_path)

    async def interrupted(server: Server) -> dict[str, list[str]]:
        answers = asyncio.create_task(complete_all(server))
        await asyncio.to_thread(server.until, "weights are gone")
        await asyncio.to_thread(server.until, "weights come")
        (worker,) = server.workers()
        os.kill(worker["pid"], signal.SIGKILL)
        return await answers

    with Server(configuration(models, weights_memory="1100MiB"), tmp_path) as server:
        texts = asyncio.run(interrupted(server))
        assert server.stop() == 0
        server.assert_nothing_left()
    assert texts == calm


def test_weights_that_cannot_be_read_fail_their_requests_with_the_reason_and_nobody_elses(
    smollm2: Path, tmp_path: Path
) -> None:
    models = copies(smollm2, tmp_path)
    broken = models["two"] / "model.safetensors"
    broken.unlink()
    broken.write_bytes(b"nonsense" * 100)
    with Server(configuration(models, weights_memory="600MiB"), tmp_path) as server:
        failed = server.complete({"model": "two", "prompt": "x", "max_tokens": 2})
        served = server.complete({"model": "three", "prompt": "x", "max_tokens": 2})
        assert server.stop() == 0
        server.assert_nothing_left()
    assert failed.status_code == 500
    assert "the weights of model 'two' cannot be loaded" in failed.json()["error"]["message"]
    assert served.status_code == 200, served.text


def test_a_model_that_never_fits_is_reported_when_it_is_loaded(smollm2: Path, tmp_path: Path) -> None:
    with Server(configuration({"one": smollm2}, weights_memory="100MiB"), tmp_path, ready=False) as server:
        line = server.until("a model could not be loaded")
        assert "its weights take 538" in line["error"]
        assert "the device's weights_memory is 104857600: raise it" in line["error"]
        assert server.stop() == 0
        server.assert_nothing_left()

"""The text of the whole server is the model's own: concurrent, mixed, and through the death of every worker."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any

import httpx
import openai
import pytest

from forebay.runtime.recording import replay
from tests.system.server import Server, configuration, events

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

PROMPTS = (
    "The water of a mountain lake is",
    "Once upon a time, a small robot",
    "def fibonacci(n):",
    "List three rivers of Europe:",
    "Gravity is a force that",
    "The best way to learn chess is",
    "Dear Madam, thank you for your letter of the third of May, in which you ask about the old mill by the river. " * 6,
    "2 + 2 =",
    "In 1969, the first",
)
MODELS = ("llm-0", "llm-1", "llm-2")


def requests() -> list[dict[str, Any]]:
    """Mixed traffic over all models: lengths differ, so that batches change all the time."""
    return [
        {"model": MODELS[index % 3], "prompt": prompt, "max_tokens": 20 + 5 * (index % 5), "temperature": 0}
        for index, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with Server(configuration(smollm2), folder, "--journal", str(folder / "journal")) as running:
        yield running


@pytest.fixture(scope="module")
def expected(smollm2: Path) -> list[str]:
    """What transformers' own `generate` writes for each request, one at a time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    texts = []
    for request in requests():
        ids = tokenizer(request["prompt"], return_tensors="pt").input_ids
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=request["max_tokens"], do_sample=False
        )
        texts.append(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
    return texts


def stream(server: Server, request: dict[str, Any], meet: Barrier | None = None, after: int = 4) -> dict[str, Any]:
    """Reads one stream to its end; after some tokens it waits for the others at the barrier."""
    body = {**request, "stream": True, "stream_options": {"include_usage": True}}
    text, finish, used = "", None, None
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=200) as response:
        assert response.status_code == 200, response.read()
        for count, event in enumerate(events(response)):
            assert "error" not in event, event
            if count == after and meet is not None:
                try:
                    meet.wait(120)
                except BrokenBarrierError:
                    pytest.fail("not all streams began")
            for choice in event["choices"]:
                text += choice["text"]
                finish = choice["finish_reason"] or finish
            used = event.get("usage") or used
    assert used is not None
    return {"text": text, "finish": finish, "tokens": used["completion_tokens"]}


def stream_all(server: Server, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: stream(server, body), bodies))


def stream_all_through_a_massacre(server: Server, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As soon as every stream has begun, every worker is killed."""
    before = {worker["pid"] for worker in server.workers()}
    meet = Barrier(len(bodies) + 1)
    with ThreadPoolExecutor(len(bodies)) as pool:
        streams = [pool.submit(stream, server, body, meet) for body in bodies]
        meet.wait(120)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        answers = [future.result() for future in streams]
    assert before.isdisjoint(worker["pid"] for worker in server.workers())
    server.children()
    return answers


def test_concurrent_mixed_traffic_is_generates_text(server: Server, expected: list[str]) -> None:
    answers = stream_all(server, requests())
    assert [answer["text"] for answer in answers] == expected


def test_it_still_is_when_every_worker_is_killed_in_mid_stream(server: Server, expected: list[str]) -> None:
    answers = stream_all_through_a_massacre(server, requests())
    assert [answer["text"] for answer in answers] == expected


def test_seeded_sampling_goes_on_with_the_same_text_after_a_massacre(server: Server) -> None:
    bodies = [
        {**request, "temperature": 0.9, "top_p": 0.95, "seed": 700 + index, "max_tokens": 24, "ignore_eos": True}
        for index, request in enumerate(requests())
    ]
    undisturbed = stream_all(server, bodies)
    assert len({answer["text"] for answer in undisturbed}) == len(bodies)
    assert stream_all_through_a_massacre(server, bodies) == undisturbed
    assert {answer["tokens"] for answer in undisturbed} == {24}


def test_a_frozen_worker_is_given_up_and_its_requests_move(smollm2: Path, tmp_path: Path, expected: list[str]) -> None:
    timeouts = {"heartbeat": 0.25, "silence": 2.0}
    with Server(configuration(smollm2, timeouts=timeouts), tmp_path) as server:
        bodies = requests()[:4]
        meet = Barrier(len(bodies) + 1)
        with ThreadPoolExecutor(len(bodies)) as pool:
            streams = [pool.submit(stream, server, body, meet) for body in bodies]
            meet.wait(120)
            for worker in server.workers():
                os.kill(worker["pid"], signal.SIGSTOP)
            assert [future.result()["text"] for future in streams] == expected[:4]
        assert "silent for" in server.log
        assert server.stop() == 0
        server.assert_nothing_left()


def test_the_official_client_streams_and_does_not(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    assert sorted(model.id for model in client.models.list()) == list(MODELS)
    messages: Any = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    whole = client.chat.completions.create(model="llm-1", messages=messages, temperature=0, max_completion_tokens=24)
    assert "Paris" in (whole.choices[0].message.content or "")
    assert whole.choices[0].finish_reason == "stop"
    pieces = client.chat.completions.create(
        model="llm-1", messages=messages, temperature=0, max_completion_tokens=24, stream=True
    )
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content
    completion = client.completions.create(model="llm-2", prompt="2 + 2 =", max_tokens=3, temperature=0)
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 3
    with pytest.raises(openai.NotFoundError, match="llm-9"):
        client.completions.create(model="llm-9", prompt="x")


def test_a_client_that_leaves_ends_its_request_at_once(server: Server) -> None:
    body = {"model": "llm-0", "prompt": "On and on", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        stream_of_it = events(response)
        next(stream_of_it)
        assert sum(worker["running"] for worker in server.workers()) == 1
    # A later request of the same model answers only after the first was taken off the device's batch.
    server.complete({"model": "llm-0", "prompt": "2 + 2 =", "max_tokens": 1})
    assert sum(worker["running"] for worker in server.workers()) == 0


def test_a_recorded_run_replays_to_the_same_commands(server: Server) -> None:
    """Runs last: its journals hold all of the above, two massacres included."""
    assert server.stop() == 0
    server.assert_nothing_left()
    journals = sorted((server.folder / "journal").glob("*.journal"))
    names = {}
    for path in journals:
        name, count, _ = replay(path)
        names[name] = count
    assert names["central"] > 100
    lanes = [count for name, count in names.items() if name.startswith("lane-cpu:")]
    assert len(lanes) >= 6, "two workers, and two more after each massacre"
    assert max(lanes) > 50

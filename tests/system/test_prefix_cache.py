"""A second turn of a chat computes its new tokens only, and says the same as without the cache."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.server import Server, small

pytestmark = [pytest.mark.system, pytest.mark.timeout(200)]

QUESTIONS = (
    "I have a small garden by a river and want to grow vegetables. What should I plant first, and why?",
    "And what about the second year?",
    "Summarise that in one sentence.",
)


def chat(server: Server) -> tuple[list[str], list[dict[str, Any]]]:
    """A conversation of three turns: answers and usages."""
    messages: list[dict[str, str]] = []
    answers, usages = [], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        body = {"model": "llm", "messages": messages, "max_tokens": 24, "temperature": 0}
        response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=100)
        assert response.status_code == 200, response.text
        answer = response.json()
        answers.append(answer["choices"][0]["message"]["content"])
        usages.append(answer["usage"])
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers, usages


def test_a_chat_is_computed_once_and_says_the_same_as_without_the_cache(smollm2: Path, tmp_path: Path) -> None:
    with Server(small(smollm2), tmp_path) as server:
        answers, usages = chat(server)
        again, _ = chat(server)
        metrics = server.get("/metrics").text
        assert server.stop() == 0
        server.assert_nothing_left()
    with Server(small(smollm2, prefix_cache=False), tmp_path) as server:
        plain, plain_usages = chat(server)
        assert server.stop() == 0
        server.assert_nothing_left()
    assert answers == again == plain
    for usage, before in zip(usages[1:], usages, strict=False):
        computed = before["prompt_tokens"] + before["completion_tokens"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert computed - 32 <= cached <= computed, "all but the last, partly filled block of the turn before"
    assert {usage["prompt_tokens_details"]["cached_tokens"] for usage in plain_usages} == {0}
    (hits,) = [line for line in metrics.splitlines() if line.startswith("forebay_prefix_cache_hit_tokens_total{")]
    assert float(hits.split()[-1]) > sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)

"""Every request that is refused, and the official client against the whole front door."""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from forebay.runtime.text import ModelText
from tests.runtime.front import Front, Peer, front_door, ready_model
from tests.runtime.tiny_text import byte_level

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CONTEXT = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(byte_level(tmp_path_factory.mktemp("llm")))


@pytest.fixture(scope="module")
def text(folder: str) -> ModelText:
    return ModelText.load(folder)


@pytest.fixture
async def front(folder: str, text: ModelText) -> AsyncIterator[Front]:
    peer = Peer([ready_model("llm", folder, CONTEXT), ready_model("other", folder, CONTEXT)])
    peer.says(text.encode("the water turns"))
    async with front_door(peer) as front:
        yield front


GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "llm", "prompt": "the wheel"},
    CHAT: {"model": "llm", "messages": [{"role": "user", "content": "the wheel"}]},
}

# (change to a good request, or None for a missing one; the parameter named; what the message must have)
BAD_IN_BOTH: list[tuple[dict[str, Any], str, str]] = [
    ({"model": 3}, "model", "3"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1.*got 0"),
    ({"max_tokens": -1}, "max_tokens", "got -1"),
    ({"max_tokens": "5"}, "max_tokens", "integer.*got '5'"),
    ({"max_tokens": 1.5}, "max_tokens", "integer.*got 1.5"),
    ({"max_tokens": True}, "max_tokens", "integer"),
    ({"max_tokens": 10**30}, "max_tokens", "less than"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "got 0"),
    ({"max_completion_tokens": CONTEXT}, "max_completion_tokens", "at most"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens", "5 while max_tokens is 6.*give one"),
    ({"max_tokens": CONTEXT + 1}, "max_tokens", rf"{CONTEXT + 1}.*{CONTEXT} tokens"),
    ({"temperature": -0.1}, "temperature", "got -0.1"),
    ({"temperature": 2.1}, "temperature", "less than or equal to 2.*got 2.1"),
    ({"temperature": "hot"}, "temperature", "number.*hot"),
    ({"temperature": float("nan")}, "temperature", "nan"),
    ({"temperature": 10**400}, "temperature", ""),
    ({"top_p": 0}, "top_p", "greater than 0.*got 0"),
    ({"top_p": 1.5}, "top_p", "got 1.5"),
    ({"seed": "x"}, "seed", "integer"),
    ({"seed": 2**63}, "seed", "less than"),
    ({"stop": ""}, "stop", "empty string"),
    ({"stop": ["a", ""]}, "stop", "empty string"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "5 strings; up to 4"),
    ({"stop": [1]}, "stop", "strings"),
    ({"stop": {"a": 1}}, "stop", "string"),
    ({"stop": "\ud800"}, "stop", "surrogate"),
    ({"stream": "yes"}, "stream", "boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream set to true"),
    ({"stream": True, "stream_options": 1}, "stream_options", ""),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "boolean.*got 1"),
    ({"ignore_eos": "x"}, "ignore_eos", "boolean"),
    ({"min_tokens": -1}, "min_tokens", "got -1"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "9 is more than max_tokens, which is 8"),
    ({"user": 3}, "user", "string"),
    ({"n": 2}, "n", "2 is not supported.*1"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
    ({"presence_penalty": 0.5}, "presence_penalty", "0.5 is not supported.*0"),
    ({"frequency_penalty": -1}, "frequency_penalty", "not supported"),
    ({"repetition_penalty": 1.1}, "repetition_penalty", "not supported.*1"),
    ({"top_k": 5}, "top_k", "-1 or 0"),
    ({"min_p": 0.1}, "min_p", "not supported"),
    ({"stop_token_ids": [2]}, "stop_token_ids", "not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format", '"text"'),
    ({"tools": [{"type": "function"}]}, "tools", "tool_choice"),
    ({"tools": [{"type": "function"}], "tool_choice": "auto"}, "tools", "tool_choice"),
]
BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "string or a list of token ids, not NoneType"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": 5}, "prompt", "not int"),
    ({"prompt": {"a": 1}}, "prompt", "not dict"),
    ({"prompt": ["a", "b"]}, "prompt", "2 prompts"),
    ({"prompt": [[1], [2]]}, "prompt", "2 prompts"),
    ({"prompt": [1, "a"]}, "prompt", "int"),
    ({"prompt": [1, 2.5]}, "prompt", "int"),
    ({"prompt": [1, True]}, "prompt", "int"),
    ({"prompt": [1, 512]}, "prompt", "512 is not in the vocabulary.*0 to 511"),
    ({"prompt": [1, -1]}, "prompt", "-1 is not in the vocabulary"),
    ({"prompt": [10**30]}, "prompt", ""),
    ({"prompt": "\ud800"}, "prompt", "surrogate"),
    ({"prompt": [1] * CONTEXT}, "prompt", f"{CONTEXT} tokens leave no room"),
    ({"prompt": [1] * 60, "max_tokens": 5}, "max_tokens", "60 .*5 .*65.*64 tokens; ask for at most 4"),
    ({"best_of": 2}, "best_of", "not supported"),
    ({"logprobs": 0}, "logprobs", "not supported"),
    ({"echo": True}, "echo", "true|True"),
    ({"suffix": "end"}, "suffix", "not supported"),
]
BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": "hello"}, "messages", "list"),
    ({"messages": [{"content": "a"}]}, "messages[0].role", "missing"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role", "'user'.*robot"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "string"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "not int"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "surrogate"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "image_url"),
    ({"messages": ["hello"]}, "messages[0]", ""),
    ({"messages": [{"role": "user", "content": "a"}, *[1] * 10_000]}, "messages[1]", "dictionary.*got 1"),
    ({"messages": [{"role": "user", "content": "refuse"}]}, "messages", "no such talk here"),
    ({"messages": [{"role": "user", "content": "the " * 80}]}, "messages", "leave no room"),
    ({"logprobs": True}, "logprobs", "not supported"),
    ({"top_logprobs": 3}, "top_logprobs", "not supported"),
    ({"functions": [{"name": "f"}]}, "functions", "function_call"),
]
CASES = [
    *((path, *case) for path in (COMPLETIONS, CHAT) for case in BAD_IN_BOTH),
    *((COMPLETIONS, *case) for case in BAD_COMPLETIONS),
    *((CHAT, *case) for case in BAD_CHATS),
]


async def test_every_bad_parameter_is_400_and_named(front: Front, subtests: pytest.Subtests) -> None:
    for path, change, param, message in CASES:
        with subtests.test(path=path, change=repr(change)[:80]):
            status, body, _ = await front.post(path, json.dumps(GOOD[path] | change), headers=JSON)
            error = body["error"]
            assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
            assert error["message"].startswith(param)
            assert re.search(message, error["message"]), error["message"]
    assert front.peer.submitted.empty(), "nothing of these reached the scheduler"


JSON = {"Content-Type": "application/json"}
NO_OBJECTS: list[tuple[str | bytes, str, str]] = [
    ('{"model": ', "application/json", "not valid JSON"),
    ("", "application/json", "must be a JSON object"),
    ("[1]", "application/json", "must be a JSON object"),
    ("7", "application/json", "must be a JSON object"),
    ("null", "application/json", "must be a JSON object"),
    (b'{"model": "\xff"}', "application/json", "cannot be read as JSON"),
    ("[" * 100_000, "application/json", "cannot be read as JSON"),
    ('{"model": "llm"}', "application/x-www-form-urlencoded", "Content-Type"),
]


async def test_a_body_that_is_no_json_object(front: Front, subtests: pytest.Subtests) -> None:
    for path in (COMPLETIONS, CHAT):
        for body, content_type, message in NO_OBJECTS:
            with subtests.test(path=path, body=body[:20]):
                status, answer, _ = await front.post(path, body, headers={"Content-Type": content_type})
                assert status == 400
                assert message in answer["error"]["message"]
                assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "missing"), [(COMPLETIONS, "prompt"), (COMPLETIONS, "model"), (CHAT, "messages"), (CHAT, "model")]
)
async def test_what_is_missing_is_named(front: Front, path: str, missing: str) -> None:
    status, body, _ = await front.post(path, {k: v for k, v in GOOD[path].items() if k != missing})
    assert (status, body["error"]["param"]) == (400, missing)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_an_unknown_model_is_404_and_names_those_that_exist(front: Front, path: str) -> None:
    status, body, _ = await front.post(path, GOOD[path] | {"model": "nobody"})
    error = body["error"]
    assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")
    assert "llm, other" in error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_what_asks_for_nothing_is_taken(front: Front, path: str) -> None:
    neutral = {
        "n": 1, "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0, "top_k": -1, "min_p": 0,
        "repetition_penalty": 1.0, "logprobs": None, "response_format": {"type": "text"}, "seed": -5,
        "tools": [{"type": "function"}], "tool_choice": "none", "stop": [], "metadata": {"a": "b"},
        "store": False, "temperature": 1, "top_p": 1, "something_new": 5, "max_tokens": None,
    }  # fmt: skip
    status, body, _ = await front.post(path, GOOD[path] | neutral)
    assert status == 200, body
    assert (await front.peer.next_submit()).sampling.seed >= 0


LONG = "wheel" * 1000
ECHOES: list[tuple[str, dict[str, Any]]] = [
    (path, change)
    for path in (COMPLETIONS, CHAT)
    for change in (
        {"model": LONG},
        {"model": [LONG] * 9},
        {"stop": {LONG: LONG}},
        {"stop": [[LONG] * 9] * 9},
        {"max_tokens": LONG},
        {"max_tokens": 10**4000},
        {"stream_options": LONG, "stream": True},
        {"logit_bias": {LONG: LONG}},
        {"response_format": [[[[[LONG]]]]]},
    )
] + [
    (CHAT, {"messages": [{"role": LONG, "content": "a"}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{LONG: LONG}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": "refuse " + LONG}]}),
    (COMPLETIONS, {"prompt": [1, LONG]}),
    (COMPLETIONS, {"prompt": [10**4000]}),
]


async def test_an_error_repeats_little_of_what_it_refuses(front: Front, subtests: pytest.Subtests) -> None:
    for path, change in ECHOES:
        with subtests.test(path=path, change=repr(change)[:80]):
            status, body, _ = await front.post(path, GOOD[path] | change)
            assert status in (400, 404)
            assert len(body["error"]["message"]) < 450
    for content_type in ("text/" + "a" * 5000,):
        _, body, _ = await front.post(CHAT, "{}", headers={"Content-Type": content_type})
        assert len(body["error"]["message"]) < 450
    status, body = await front.get("/" + "a" * 5000)
    assert (status, len(body["error"]["message"]) < 450) == (404, True)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_half_a_surrogate_pair_in_what_nobody_reads_is_ignored(front: Front, path: str) -> None:
    odd = {"\ud800": 1, "x": "\ud800", "stream": True, "stream_options": {"\ud800": 1}}
    async with front.client.post(front.url + path, data=json.dumps(GOOD[path] | odd), headers=JSON) as response:
        assert response.status == 200, await response.text()
        assert (await response.text()).endswith("data: [DONE]\n\n")


async def test_both_names_of_the_limit_are_taken(front: Front) -> None:
    for path in (COMPLETIONS, CHAT):
        for limits in ({"max_tokens": 2}, {"max_completion_tokens": 2}, {"max_tokens": 2, "max_completion_tokens": 2}):
            status, body, _ = await front.post(path, GOOD[path] | limits)
            assert (status, body["usage"]["completion_tokens"]) == (200, 2)


async def test_a_developer_is_the_system(front: Front, text: ModelText) -> None:
    talk = [{"role": "developer", "content": "Brief."}, {"role": "user", "content": "a"}]
    status, _, _ = await front.post(CHAT, {"model": "llm", "messages": talk})
    assert status == 200
    submit = await front.peer.next_submit()
    expected = text.chat([{"role": "system", "content": "Brief."}, {"role": "user", "content": "a"}])
    assert list(memoryview(submit.tokens).cast("I"))[: submit.prompt_tokens] == expected


async def test_a_limit_not_given_is_cut_to_the_room_that_is_left(front: Front) -> None:
    status, _, _ = await front.post(COMPLETIONS, {"model": "llm", "prompt": [1] * (CONTEXT - 3)})
    assert status == 200
    assert (await front.peer.next_submit()).sampling.max_tokens == 3


async def test_a_model_without_a_chat_template(tmp_path: Path) -> None:
    async with front_door(Peer([ready_model("llm", str(byte_level(tmp_path, chat=False)))])) as front:
        status, body, _ = await front.post(CHAT, GOOD[CHAT])
    assert (status, body["error"]["param"]) == (400, "messages")
    assert "'llm'" in body["error"]["message"]
    assert "chat template" in body["error"]["message"]


# --- the official client


@pytest.fixture
async def client(front: Front) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_openai_client_whole(client: openai.AsyncOpenAI, text: ModelText) -> None:
    answer = len(text.encode("the water turns"))
    completion = await client.completions.create(model="llm", prompt="a", max_tokens=20, temperature=0, seed=1)
    assert completion.choices[0].text == "the water turns"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (1, answer)
    chat = await client.chat.completions.create(
        model="other", messages=[{"role": "user", "content": "a"}], max_completion_tokens=answer, stop=["zzz"]
    )
    assert chat.choices[0].message.content == "the water turns"
    assert chat.model == "other"
    assert chat.usage is not None
    assert chat.usage.completion_tokens == answer


async def test_openai_client_streaming(client: openai.AsyncOpenAI, text: ModelText) -> None:
    shown = ""
    async for part in await client.completions.create(model="llm", prompt="a", stream=True):
        shown += part.choices[0].text
    assert shown == "the water turns"
    shown, used, reasons = "", None, []
    async for chunk in await client.chat.completions.create(
        model="llm",
        messages=[{"role": "user", "content": "a"}],
        stream=True,
        stream_options={"include_usage": True},
    ):
        used = chunk.usage or used
        for choice in chunk.choices:
            shown += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert (shown, reasons) == ("the water turns", ["stop"])
    assert used is not None
    assert used.completion_tokens == len(text.encode("the water turns"))


async def test_openai_client_errors(front: Front, client: openai.AsyncOpenAI, text: ModelText) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody"):
        await client.completions.create(model="nobody", prompt="a")
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model="llm", prompt="a", max_tokens=0)
    assert refused.value.param == "max_tokens"
    front.peer.script = lambda submit: front.peer.reject(submit, "queue_full", "32 requests wait already")
    with pytest.raises(openai.InternalServerError, match="32 requests wait") as busy:
        await client.completions.create(model="llm", prompt="a")
    assert busy.value.status_code == 503

    def breaks(submit: Any) -> None:
        front.peer.tokens(submit, text.encode("the"))
        front.peer.finish(submit, "failed", "its step raised")

    front.peer.script = breaks
    with pytest.raises(openai.APIError, match="its step raised"):
        async for _ in await client.completions.create(model="llm", prompt="a", stream=True):
            pass


async def test_openai_client_lists_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["llm", "other"]
    assert (await client.models.retrieve("llm")).owned_by == "forebay"

"""The front door over real sockets: answers, streams, disconnects, state pages."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from forebay.runtime import lending_api
from forebay.runtime.text import ModelText
from forebay.transport.messages import ModelStatus, Submit, WorkerStatus
from tests.runtime.front import PATIENCE_S, Front, Peer, front_door, ready_model
from tests.runtime.tiny_text import byte_level, sentence_piece

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(byte_level(tmp_path_factory.mktemp("llm")))


@pytest.fixture(scope="module")
def text(folder: str) -> ModelText:
    return ModelText.load(folder)


@pytest.fixture
async def front(folder: str) -> AsyncIterator[Front]:
    async with front_door(Peer([ready_model("llm", folder)])) as front:
        yield front


def prompt_of(submit: Submit) -> list[int]:
    return list(memoryview(submit.tokens).cast("I"))[: submit.prompt_tokens]


async def events_of(front: Front, path: str, body: dict[str, Any]) -> list[Any]:
    """All events of a stream, decoded; "[DONE]" as it is."""
    async with front.client.post(front.url + path, json=body | {"stream": True}) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        raw = (await response.read()).decode()
    assert raw.endswith("\n\n")
    lines = raw[:-2].split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


# --- whole answers


async def test_a_completion_of_text(front: Front, text: ModelText) -> None:
    answer = text.encode(" turns the mill 🌊")
    front.peer.says(answer)
    status, body, _ = await front.post(
        COMPLETIONS, {"model": "llm", "prompt": "the wheel", "seed": 7, "max_tokens": 64, "temperature": 0}
    )
    assert status == 200
    assert body["object"] == "text_completion"
    assert body["model"] == "llm"
    assert body["choices"] == [{"index": 0, "text": " turns the mill 🌊", "finish_reason": "stop", "logprobs": None}]
    prompt = text.encode("the wheel")
    assert body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(answer),
        "total_tokens": len(prompt) + len(answer),
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    submit = await front.peer.next_submit()
    assert prompt_of(submit) == prompt
    assert (submit.sampling.seed, submit.sampling.temperature, submit.sampling.max_tokens) == (7, 0.0, 64)


async def test_token_ids_go_through_as_they_are(front: Front, text: ModelText) -> None:
    front.peer.says(text.encode("water"))
    for prompt in ([5, 511, 9], [[5, 511, 9]]):
        status, body, _ = await front.post(COMPLETIONS, {"model": "llm", "prompt": prompt})
        assert (status, body["usage"]["prompt_tokens"]) == (200, 3)
        assert prompt_of(await front.peer.next_submit()) == [5, 511, 9]


async def test_a_chat_answer(front: Front, text: ModelText) -> None:
    front.peer.says([*text.encode("the pool"), text.backend.token_to_id("<|end|>")])
    parts = [{"type": "text", "text": "what"}, {"type": "text", "text": "fills?"}]
    messages = [{"role": "system", "content": "Brief."}, {"role": "user", "content": parts}]
    status, body, _ = await front.post(CHAT, {"model": "llm", "messages": messages})
    assert status == 200
    assert body["object"] == "chat.completion"
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "the pool", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == len(text.encode("the pool")) + 1, "the end token counts"
    submit = await front.peer.next_submit()
    expected = text.chat([{"role": "system", "content": "Brief."}, {"role": "user", "content": "what\nfills?"}])
    assert prompt_of(submit) == expected
    assert submit.sampling.max_tokens == 256 - len(expected), "without a limit: the rest of the context"


async def test_the_limit_is_told(front: Front, text: ModelText) -> None:
    front.peer.says(text.encode("the water turns the wheel"))
    _, body, _ = await front.post(COMPLETIONS, {"model": "llm", "prompt": "a", "max_tokens": 2})
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 2


async def test_defaults_of_a_completion(front: Front, text: ModelText) -> None:
    front.peer.says(text.encode("a"))
    seeds = set()
    for _ in range(2):
        await front.post(COMPLETIONS, {"model": "llm", "prompt": "a", "temperature": None, "stop": None})
        sampling = (await front.peer.next_submit()).sampling
        seeds.add(sampling.seed)
        assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (16, 1.0, 1.0)
        assert (sampling.min_tokens, sampling.ignore_eos) == (0, False)
    assert len(seeds) == 2, "without a seed every request draws anew"


async def test_vllms_parameters_reach_the_worker(front: Front, text: ModelText) -> None:
    front.peer.says(text.encode("the water turns"))
    await front.post(
        COMPLETIONS,
        {"model": "llm", "prompt": "a", "ignore_eos": True, "min_tokens": 3, "max_tokens": 3, "user": "me"},
    )
    sampling = (await front.peer.next_submit()).sampling
    assert (sampling.ignore_eos, sampling.min_tokens, sampling.max_tokens) == (True, 3, 3)


async def test_a_first_word_keeps_its_space(tmp_path: Path) -> None:
    folder = str(sentence_piece(tmp_path))
    peer = Peer([ready_model("llm", folder)])
    peer.says(ModelText.load(folder).encode("turns"))
    async with front_door(peer) as front:
        _, body, _ = await front.post(COMPLETIONS, {"model": "llm", "prompt": "the wheel"})
    assert body["choices"][0]["text"] == " turns"


async def test_a_prompt_as_long_as_a_book_is_read_and_refused_for_its_length(front: Front) -> None:
    status, body, _ = await front.post(COMPLETIONS, {"model": "llm", "prompt": "the wheel turns " * 50_000})
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


# --- streams


async def test_a_stream_of_a_completion(front: Front, text: ModelText) -> None:
    answer = text.encode(" turns 🌊 and é")
    front.peer.says(answer)
    events = await events_of(front, COMPLETIONS, {"model": "llm", "prompt": "the wheel"})
    assert events[-1] == "[DONE]"
    choices = [event["choices"][0] for event in events[:-1]]
    assert "".join(choice["text"] for choice in choices) == " turns 🌊 and é"
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert len({event["id"] for event in events[:-1]}) == 1
    assert all("usage" not in event for event in events[:-1]), "usage only where it is asked for"


async def test_a_stream_of_a_chat_with_usage(front: Front, text: ModelText) -> None:
    answer = text.encode("the pool")
    front.peer.says(answer, "length")
    body = {"model": "llm", "messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 99}
    events = await events_of(front, CHAT, body | {"stream_options": {"include_usage": True}})
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == len(answer)
    assert all(event["usage"] is None for event in events[:-2])
    deltas = [event["choices"][0]["delta"] for event in events[:-2]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert "".join(delta.get("content", "") for delta in deltas) == "the pool"
    assert events[-3]["choices"][0]["finish_reason"] == "length"
    assert {event["object"] for event in events[:-1]} == {"chat.completion.chunk"}


async def test_the_first_token_is_an_event_even_without_text(front: Front, text: ModelText) -> None:
    sending = asyncio.create_task(
        front.client.post(front.url + COMPLETIONS, json={"model": "llm", "prompt": "a", "stream": True})
    )
    submit = await front.peer.next_submit()
    front.peer.tokens(submit, text.encode("🌊")[:1])
    async with await sending as response:
        event = await response.content.readuntil(b"\n\n")
        assert json.loads(event[6:])["choices"][0]["text"] == ""
        front.peer.finish(submit, "length")
        rest = await response.read()
    assert "\N{REPLACEMENT CHARACTER}" in rest.decode()


async def test_a_stop_string_ends_the_request(front: Front, text: ModelText) -> None:
    answer = text.encode("the water; the wheel")
    before = next(n for n in range(len(answer)) if ";" in text.backend.decode(answer[: n + 1]))
    for stream in (False, True):
        sending = asyncio.create_task(
            front.post(COMPLETIONS, {"model": "llm", "prompt": "a", "stop": ["; the", ";"], "max_tokens": 99})
            if not stream
            else events_of(
                front,
                COMPLETIONS,
                {"model": "llm", "prompt": "a", "stop": ";", "stream_options": {"include_usage": True}},
            )
        )
        submit = await front.peer.next_submit()
        front.peer.tokens(submit, answer)  # the worker is ahead: all at once, and it never ends by itself
        assert await front.peer.next_abort() == submit.request
        if stream:
            events = await sending
            shown = "".join(event["choices"][0]["text"] for event in events[:-2])
            reason, used = events[-3]["choices"][0]["finish_reason"], events[-2]["usage"]
        else:
            _, body, _ = await sending
            shown, reason, used = body["choices"][0]["text"], body["choices"][0]["finish_reason"], body["usage"]
        assert (shown, reason) == ("the water", "stop")
        assert used["completion_tokens"] == before + 1


async def test_a_lost_worker_is_not_seen_by_the_client(front: Front, text: ModelText) -> None:
    answer = text.encode("the water turns the wheel")
    sending = asyncio.create_task(events_of(front, COMPLETIONS, {"model": "llm", "prompt": "a"}))
    first = await front.peer.next_submit()
    front.peer.tokens(first, answer[:3])
    front.peer.interrupt(first)
    second = await front.peer.next_submit()
    front.peer.tokens(first, answer[3:], epoch=first.epoch)  # a worker that wakes up again
    assert list(memoryview(second.tokens).cast("I"))[second.prompt_tokens :] == answer[:3]
    assert second.sampling == first.sampling
    front.peer.tokens(second, answer[3:])
    front.peer.finish(second, "stop")
    events = await sending
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "the water turns the wheel"


# --- failures


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("unknown_model", 404, "model_not_found"),
        ("context_too_long", 400, "context_length_exceeded"),
        ("not_ready", 503, "not_ready"),
        ("queue_full", 503, "queue_full"),
        ("draining", 503, "draining"),
        ("failed", 500, "failed"),
    ],
)
async def test_a_rejection_has_its_status(front: Front, stream: bool, kind: Any, status: int, code: str) -> None:
    front.peer.script = lambda submit: front.peer.reject(submit, kind, "because of the test")
    got, body, headers = await front.post(COMPLETIONS, {"model": "llm", "prompt": "a", "stream": stream})
    assert got == status
    assert body["error"]["message"] == "because of the test"
    assert body["error"]["code"] == code
    assert ("Retry-After" in headers) == (status == 503)


async def test_a_failure_in_mid_stream_is_an_event_and_no_end_mark(front: Front, text: ModelText) -> None:
    sending = asyncio.create_task(events_of(front, COMPLETIONS, {"model": "llm", "prompt": "a"}))
    submit = await front.peer.next_submit()
    front.peer.tokens(submit, text.encode("the"))
    front.peer.finish(submit, "failed", "its step raised")
    *shown, last = await sending
    assert "".join(event["choices"][0]["text"] for event in shown) == "the"
    assert last["error"]["message"] == "its step raised"
    assert last["error"]["type"] == "server_error"


async def test_a_model_that_was_never_ready_is_503_and_a_lost_one_queues(folder: str) -> None:
    loading = ModelStatus("llm", folder, "loading", False, 0, 0, 0, 0)
    lost = ModelStatus("lost", folder, "waiting", True, 256, 0, 0, 0)
    async with front_door(Peer([loading, lost])) as front:
        status, body, headers = await front.post(COMPLETIONS, {"model": "llm", "prompt": "a"})
        assert (status, body["error"]["code"]) == (503, "not_ready")
        assert headers["Retry-After"] == "1"
        sending = asyncio.create_task(front.post(COMPLETIONS, {"model": "lost", "prompt": "a"}))
        submit = await front.peer.next_submit()
        front.peer.tokens(submit, [1])
        front.peer.finish(submit, "stop")
        assert (await sending)[0] == 200


async def test_a_draining_server_takes_nothing_new(folder: str) -> None:
    async with front_door(Peer([ready_model("llm", folder)], draining=True)) as front:
        status, body, _ = await front.post(COMPLETIONS, {"model": "llm", "prompt": "a"})
        assert (status, body["error"]["code"]) == (503, "draining")
        status, body = await front.get("/readyz")
        assert (status, body["draining"]) == (503, True)


async def test_a_model_whose_tokenizer_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    async with front_door(Peer([ready_model("llm", str(tmp_path))])) as front:
        status, body, _ = await front.post(COMPLETIONS, {"model": "llm", "prompt": "a"})
        assert status == 500
        assert str(tmp_path) in body["error"]["message"]


# --- clients that go


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True], ids=["queued", "begun"])
async def test_a_client_that_goes_ends_its_request(
    front: Front, text: ModelText, path: str, stream: bool, begun: bool
) -> None:
    contents = {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    body = json.dumps({"model": "llm", "stream": stream, **contents}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    submit = await front.peer.next_submit()
    if begun:
        front.peer.tokens(submit, text.encode("the"))
        if stream:
            await asyncio.wait_for(reader.readuntil(b"data: "), PATIENCE_S)
    assert front.peer.desk.live == 1
    writer.close()
    await writer.wait_closed()
    assert await front.peer.next_abort() == submit.request
    assert front.peer.desk.live == 0


async def test_a_finished_request_is_not_aborted(front: Front, text: ModelText) -> None:
    front.peer.says(text.encode("the"))
    for stream in (False, True):
        async with front.client.post(
            front.url + COMPLETIONS, json={"model": "llm", "prompt": "a", "stream": stream}
        ) as response:
            await response.read()
    assert front.peer.aborted.empty()


# --- state


@pytest.mark.parametrize("path", ["/", "/v1/models", "/v1/models/llm", "/healthz", "/readyz", "/workers", "/metrics"])
async def test_head_is_get_without_its_body(front: Front, path: str) -> None:
    async with front.client.get(front.url + path) as got, front.client.head(front.url + path) as headed:
        assert (headed.status, headed.content_type) == (got.status, got.content_type) == (200, got.content_type)
        assert await headed.read() == b""


async def test_head_of_a_server_that_is_not_ready(folder: str) -> None:
    async with front_door(Peer([], informs=False)) as front, front.client.head(front.url + "/readyz") as response:
        assert response.status == 503
        assert await response.read() == b""


async def test_the_models(front: Front) -> None:
    status, body = await front.get("/v1/models")
    assert (status, body["object"]) == (200, "list")
    [model] = body["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("llm", "model", 256)
    assert (await front.get("/v1/models/llm"))[1] == model
    status, body = await front.get("/v1/models/nobody")
    assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_readiness_names_what_is_missing(folder: str) -> None:
    failed = ModelStatus("other", folder, "failed", False, 0, 0, 0, 0, "no such file")
    peer = Peer([ready_model("llm", folder), failed])
    async with front_door(peer) as front:
        assert await front.get("/healthz") == (200, {"alive": True})
        status, body = await front.get("/readyz")
        assert status == 503
        assert body["models"] == {
            "llm": {"state": "ready"},
            "other": {"state": "failed", "reason": "no such file"},
        }
        peer.catalog([ready_model("llm", folder), ready_model("other", folder)])
        assert (await front.get("/readyz"))[0] == 200


async def test_a_server_that_has_not_heard_of_its_models_is_not_ready(folder: str) -> None:
    peer = Peer([], informs=False)
    async with front_door(peer, configuration="tests.yaml") as front:
        assert (await front.get("/readyz"))[0] == 503
        status, body, _ = await front.post(COMPLETIONS, {"model": "llm", "prompt": "a"})
        assert (status, body["error"]["code"]) == (503, "not_ready")
        peer.catalog([ready_model("llm", folder)])
        assert (await front.get("/readyz"))[0] == 200


async def test_a_coordinator_without_models_is_ready_at_once() -> None:
    peer = Peer([])
    peer.workers = ()
    async with front_door(peer, configuration=None) as front:
        assert (await front.get("/readyz"))[0] == 200
        assert await front.get("/workers") == (200, [])
        async with front.client.get(front.url + "/") as response:
            page = await response.text()
        assert "coordinator only" in page
        status, body, _ = await front.post(COMPLETIONS, {"model": "llm", "prompt": "a"})
        assert status == 404
        assert "no models" in body["error"]["message"]


async def test_the_workers(front: Front) -> None:
    status, body = await front.get("/workers")
    assert status == 200
    expected = {"id": "worker-0", "gpu": "cpu:0", "pid": 4711, "state": "ready", "models": ["llm"], "running": 0}
    assert body == [{**expected, "given": 0}]


async def test_a_silent_scheduler_is_told(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending_api, "ANSWER_TIMEOUT_S", 0.05)
    front.peer.answers_queries = False
    status, body = await front.get("/workers")
    assert (status, body["error"]["code"]) == (503, "no_scheduler")
    async with front.client.get(front.url + "/") as response:
        assert response.status == 200
        page = await response.text()
    assert "the scheduler has not answered" in page
    assert "llm" in page, "what the last catalog said is still shown"


async def test_the_page_shows_models_and_workers_and_takes_nothing_from_elsewhere(folder: str) -> None:
    odd = ModelStatus("<b>odd</b>", folder, "failed", False, 0, 0, 0, 0, "gone & lost")
    peer = Peer([ready_model("llm", folder), odd])
    peer.workers = (WorkerStatus("worker-9", "cpu:1", 99, "draining", ("llm",), 3),)
    async with front_door(peer) as front:
        async with front.client.get(front.url + "/") as response:
            assert response.content_type == "text/html"
            page = await response.text()
    for part in ("llm", "ready", "&lt;b&gt;odd&lt;/b&gt;", "gone &amp; lost", "worker-9", "cpu:1", "draining"):
        assert part in page
    for link in ("/docs", "/v1/models", "/workers", "/healthz", "/readyz"):
        assert f'href="{link}"' in page
    assert "http://" not in page
    assert "https://" not in page


async def test_the_documentation_describes_the_requests(front: Front) -> None:
    async with front.client.get(front.url + "/docs") as response:
        assert response.status == 200
    _, schema = await front.get("/openapi.json")
    assert {COMPLETIONS, CHAT, "/v1/models", "/workers", "/healthz", "/readyz"} <= set(schema["paths"])
    fields = schema["components"]["schemas"]["CompletionRequest"]["properties"]
    assert {"prompt", "ignore_eos", "stop", "stream_options"} <= set(fields)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", COMPLETIONS, 405), ("POST", "/healthz", 405), ("DELETE", "/v1/models", 405)],
)
async def test_a_wrong_path_or_method_has_openais_shape(front: Front, method: str, path: str, status: int) -> None:
    async with front.client.request(method, front.url + path) as response:
        assert response.status == status
        error = (await response.json())["error"]
    assert path in error["message"]
    assert set(error) == {"message", "type", "param", "code"}

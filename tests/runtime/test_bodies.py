"""Bodies that hurt: refused at a limit, and never in the way of others."""

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator

import pytest

from forebay.runtime.bodies import BODY_LIMIT
from forebay.runtime.text import ModelText
from tests.runtime.front import PATIENCE_S, Front, Peer, front_door, ready_model
from tests.runtime.tiny_text import byte_level

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(byte_level(tmp_path_factory.mktemp("llm")))


@pytest.fixture(scope="module")
def text(folder: str) -> ModelText:
    return ModelText.load(folder)


async def _raw(front: Front, head: str, *pieces: bytes) -> tuple[int, dict[str, str], bytes]:
    """Sends everything before it reads a byte, as the simplest of clients do. Returns status, headers and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    try:
        async with asyncio.timeout(PATIENCE_S):
            writer.write(f"{head}\r\nHost: a\r\nContent-Type: application/json\r\n".encode())
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            raw_head = (await reader.readuntil(b"\r\n\r\n")).decode()
            status, *lines = raw_head.strip().split("\r\n")
            headers = {key.lower(): value for key, _, value in (line.partition(": ") for line in lines)}
            return int(status.split()[1]), headers, await reader.readexactly(int(headers["content-length"]))
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_body_above_the_limit_is_413_even_to_a_client_that_sends_all_of_it_first(
    folder: str, path: str, chunked: bool
) -> None:
    body = b" " * 5_000_000
    async with front_door(Peer([ready_model("llm", folder)]), body_limit=1000) as front:
        if chunked:
            frames = [b"Transfer-Encoding: chunked\r\n\r\n"]
            frames += [b"%x\r\n" % 100_000 + body[:100_000] + b"\r\n"] * 50 + [b"0\r\n\r\n"]
        else:
            frames = [b"Content-Length: %d\r\n\r\n" % len(body), body]
        status, headers, content = await _raw(front, f"POST {path} HTTP/1.1", *frames)
        error = json.loads(content)["error"]
        assert (status, error["code"], error["type"]) == (413, "body_too_large", "invalid_request_error")
        assert "more than 1000 bytes" in error["message"]
        assert "http.body_limit" in error["message"]
        assert headers["connection"] == "close"


async def test_a_client_that_asks_before_it_sends_is_refused_at_once(folder: str) -> None:
    async with front_door(Peer([ready_model("llm", folder)]), body_limit=1000) as front:
        ask = b"Expect: 100-continue\r\nContent-Length: 5000000\r\n\r\n"
        assert (await _raw(front, f"POST {CHAT} HTTP/1.1", ask))[0] == 413


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_of_just_the_limit_is_taken(folder: str, text: ModelText, chunked: bool) -> None:
    peer = Peer([ready_model("llm", folder)])
    peer.says(text.encode("the"))
    body = json.dumps({"model": "llm", "prompt": "a"}).encode().ljust(1000)

    async def pieces() -> AsyncIterator[bytes]:
        yield body[:500]
        yield body[500:]

    async with front_door(peer, body_limit=len(body)) as front:
        async with front.client.post(
            front.url + COMPLETIONS, data=pieces() if chunked else body, headers={"Content-Type": "application/json"}
        ) as response:
            assert response.status == 200


def _filled(begin: str, unit: str, end: str) -> bytes:
    count = (BODY_LIMIT - len(begin) - len(end) + 1) // (len(unit) + 1)
    return (begin + ",".join([unit] * count) + end).encode()


LARGEST: dict[str, tuple[str, bytes, int]] = {
    "messages": (CHAT, _filled('{"model":"llm","messages":[', '{"role":"user","content":"a"}', "]}"), 400),
    "no messages": (CHAT, _filled('{"model":"llm","messages":[', "1", "]}"), 400),
    "token ids": (COMPLETIONS, _filled('{"model":"llm","prompt":[', "1", "]}"), 400),
    "text": (COMPLETIONS, _filled('{"model":"llm","prompt":"', "the wheel turns", '"}'), 400),
    "what nobody reads": (COMPLETIONS, _filled('{"model":"llm","prompt":"a","x":[', "[]", "]}"), 200),
}


@pytest.mark.system
@pytest.mark.parametrize("kind", LARGEST)
async def test_the_largest_bodies_leave_the_event_loop_free(folder: str, text: ModelText, kind: str) -> None:
    peer = Peer([ready_model("llm", folder)])
    peer.says(text.encode("the"))
    path, body, expected = LARGEST[kind]
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    async with front_door(peer) as front:
        sending = asyncio.create_task(front.post(path, io.BytesIO(body), headers=headers))
        longest, last = 0.0, time.perf_counter()
        while not sending.done():
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        status, answer, _ = sending.result()
    assert status == expected
    assert len(json.dumps(answer)) < 1000
    assert longest < 1.0, "about 0.2 s on two busy cores; without threads and limits 0.5 to 10 s"

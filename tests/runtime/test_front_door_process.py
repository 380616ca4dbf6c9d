"""The whole front door process in this one's event loop; the test is its scheduler's hub and its worker's feed."""

import asyncio
from array import array
from pathlib import Path

import aiohttp

from forebay.runtime.front_door_process import FrontDoorProcess, listen
from forebay.runtime.http import ServerInfo
from forebay.runtime.logs import set_up
from forebay.transport.codec import read_to_scheduler
from forebay.transport.messages import (
    Catalog,
    Finished,
    Open,
    Opened,
    Query,
    Status,
    Stop,
    Submit,
    ToFrontDoor,
    Tokens,
    ToScheduler,
)
from forebay.transport.zeromq import ZmqFeed, ZmqHub
from tests.runtime.front import PATIENCE_S, ready_model
from tests.runtime.tiny_text import byte_level


async def test_a_message_of_a_worker_that_makes_no_sense_ends_nothing(tmp_path: Path) -> None:
    opened: asyncio.Queue[tuple[str, Open]] = asyncio.Queue()
    submitted: asyncio.Queue[Submit] = asyncio.Queue()

    def take(peer: str, messages: list[ToScheduler]) -> None:
        for message in messages:
            if isinstance(message, Open):
                opened.put_nowait((peer, message))
            elif isinstance(message, Submit):
                submitted.put_nowait(message)
            elif isinstance(message, Query):
                hub.send(peer, Status(message.query, (), ()))

    def unreadable(peer: str, error: Exception) -> None:
        raise AssertionError(f"{peer}: {error}")

    model = ready_model("llm", str(byte_level(tmp_path / "llm")))
    hub: ZmqHub[ToFrontDoor, ToScheduler] = ZmqHub(f"ipc://{tmp_path}/hub", read_to_scheduler(), take, unreadable)
    with listen("127.0.0.1", 0) as listener:
        door = FrontDoorProcess(hub.endpoint, tmp_path, listener, 1.0, ServerInfo("0.0", None), set_up("front door"))
        serving = asyncio.create_task(door.run())
        try:
            async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as client:
                peer, join = await opened.get()
                hub.send(peer, Opened(join.version, join.session, 1.0, 7))
                hub.send(peer, Catalog((model,), False))
                async with client.get(f"{join.url}/workers") as response:
                    assert response.status == 200, "what the scheduler sent before its answer has come, too"
                asking = asyncio.create_task(
                    client.post(f"{join.url}/v1/completions", json={"model": "llm", "prompt": "a"})
                )
                await submitted.get()
                feed: ZmqFeed[ToFrontDoor] = ZmqFeed(join.sink)
                row = array("Q", [7]).tobytes(), array("I", [0]).tobytes(), array("I", [300]).tobytes()
                feed.send(Tokens(row[0], row[1], b""))
                feed.send(Tokens(row[0][:5], row[1], row[2]))
                feed.send(Tokens(*row))
                feed.send(Finished(7, 0, "stop"))
                async with await asking as response:
                    assert response.status == 200
                    used = (await response.json())["usage"]
                feed.close()
                hub.send(peer, Stop("the test is over"))
                assert await serving == 0
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            hub.close()
    assert used["completion_tokens"] == 1, "what came after in the same frame still counts"

"""How long a token takes from the end of its step to the client's socket.

Everything is real but the device: a scheduler with its front door, ZeroMQ, HTTP over loopback, a streaming client. The
worker here is this file's: it joins like any other, and at each tick of a clock one step "ends" with a token for every
stream. All processes read the same monotonic clock.
"""

import asyncio
import json
import multiprocessing
import os
import socket
import tempfile
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from forebay.bench.figures import Figure, write_figures
from forebay.bench.other_process import OtherProcess
from forebay.bench.server_process import ServerProcess, scheduler_command
from forebay.runtime.loop import run
from forebay.runtime.text import ModelText
from forebay.transport.codec import read_to_worker
from forebay.transport.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Ended,
    Finished,
    Heartbeat,
    Join,
    Load,
    ModelReady,
    Start,
    ToFrontDoor,
    Tokens,
    ToScheduler,
    ToWorker,
)
from forebay.transport.zeromq import ZmqFeed, ZmqLink

WORDS = " the quick water of a mountain river turns the old wheel and fills the basin before the night"
SETTLE = 10
"""Tokens at the beginning of each stream that are not counted."""


def measure(
    model: Path, streams: int, rate: float, tokens: int, json_file: Path | None, arguments: list[str] | None
) -> int:
    """Runs both, prints a table, writes the figures; returns the exit status."""
    sent = multiprocessing.get_context("spawn").Array("d", streams * tokens, lock=False)
    ours = run(_ours(model.resolve(), streams, rate, tokens, sent))
    bare = run(_bare(streams, rate, tokens))
    figures = {
        f"delivery_{name}_s": Figure(_percentile(ours, share), "s", _percentile(bare, share))
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
    }
    for name, figure in figures.items():
        assert figure.value is not None
        assert figure.baseline is not None
        print(f"{name:18}{1e3 * figure.value:8.2f} ms   bare FastAPI: {1e3 * figure.baseline:8.2f} ms")
    if json_file is not None:
        write_figures(json_file, "bench.delivery", ["python", "-m", "bench.delivery", *(arguments or [])], figures)
    return 0


def _percentile(times: Sequence[float], share: float) -> float:
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# Ours -----------------------------------------------------------------------------------------------------------------


async def _ours(model: Path, streams: int, rate: float, tokens: int, sent: Any) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="fb-") as folder:
        endpoint = f"ipc://{folder}/scheduler.sock"
        config = _write_configuration(Path(folder), endpoint, model, streams)
        text = ModelText.load(str(model))
        words = [token for token in text.encode(WORDS) if token > 0]
        async with ServerProcess(scheduler_command(config), Path(folder, "log"), 20.0) as server:
            with OtherProcess(_work, endpoint, streams, rate, tokens, words, sent):
                url = await server.ready(asyncio.Event(), lambda _: None)
                arrivals = await _read_streams(f"{url}/v1/completions", _requests(streams, tokens, words))
    return [
        arrival - sent[stream * tokens + index]
        for stream, times in enumerate(arrivals)
        for index, arrival in enumerate(times)
        if index >= SETTLE
    ]


def _write_configuration(folder: Path, endpoint: str, model: Path, streams: int) -> Path:
    placed = {"name": "m", "path": str(model), "placement": ["cpu:0"], "max_sequences": streams}
    device = {"device": "cpu:0", "spawn": False}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"endpoint": endpoint, "devices": [device], "models": [placed]}))
    return path


def _requests(streams: int, tokens: int, words: Sequence[int]) -> list[dict[str, Any]]:
    """The first token of a prompt tells the worker which stream it is."""
    return [
        {"model": "m", "prompt": [100 + stream, *words], "max_tokens": tokens, "stream": True, "temperature": 0}
        for stream in range(streams)
    ]


async def _read_streams(url: str, bodies: list[dict[str, Any]]) -> list[list[float]]:
    """When each event with text came, for each stream."""

    async def read(session: aiohttp.ClientSession, body: dict[str, Any]) -> list[float]:
        times = []
        async with session.post(url, json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b'data: {"'):
                    choice = json.loads(line[6:])["choices"][0]
                    if choice["text"]:
                        times.append(time.monotonic())
        assert len(times) == body["max_tokens"], f"{len(times)} events for {body['max_tokens']} tokens"
        return times

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        return list(await asyncio.gather(*(read(session, body) for body in bodies)))


async def _work(endpoint: str, streams: int, rate: float, tokens: int, words: list[int], sent: Any) -> None:
    """A worker whose steps come from a clock: it begins once all streams are there."""
    running: dict[int, tuple[Start, int]] = {}
    feeds: dict[str, ZmqFeed[ToFrontDoor]] = {}
    complete = asyncio.Event()

    def arrived(messages: list[ToWorker]) -> None:
        for message in messages:
            match message:
                case Load(model):
                    link.send(ModelReady(model.name, 4096, 1, 1))
                case Start(request=request, sink=sink):
                    running[request] = message, array("I", message.tokens)[0] - 100
                    feeds.setdefault(sink, ZmqFeed(sink))
                    if len(running) == streams:
                        complete.set()
                case Cancel(request):
                    running.pop(request, None)
                case _:
                    pass

    link: ZmqLink[ToScheduler, ToWorker] = ZmqLink(endpoint, "clockwork", read_to_worker(), arrived, _raise)
    link.send(Join(PROTOCOL_VERSION, 1, "cpu:0", os.getpid(), socket.gethostname()))
    await complete.wait()
    begin = time.monotonic() + 0.5
    for index in range(tokens):
        await asyncio.sleep(max(0.0, begin + index / rate - time.monotonic()))
        now = time.monotonic()
        requests = array("Q", running)
        for _, stream in running.values():
            sent[stream * tokens + index] = now
        step = Tokens(
            requests.tobytes(),
            array("I", [0] * len(requests)).tobytes(),
            array("I", [words[index % len(words)]] * len(requests)).tobytes(),
        )
        (feed,) = feeds.values()
        feed.send(step)
        link.send(Heartbeat())
    for request in list(running):
        feed.send(Finished(request, 0, "length"))
        link.send(Ended(request, 0, "length", tokens))
    await asyncio.Event().wait()


# The same without us ----------------------------------------------------------------------------------------------


async def _bare(streams: int, rate: float, tokens: int) -> list[float]:
    with socket.create_server(("127.0.0.1", 0), backlog=streams) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/stream"
        with OtherProcess(_serve_bare, listener, streams, rate, tokens):
            times = await _read_bare(url, streams)
    return [arrival - sent for stream in times for sent, arrival in stream[SETTLE:]]


async def _read_bare(url: str, streams: int) -> list[list[tuple[float, float]]]:
    async def read(session: aiohttp.ClientSession) -> list[tuple[float, float]]:
        times = []
        async with session.post(url, json={"stream": True}) as response:
            async for line in response.content:
                if line.startswith(b'data: {"'):
                    event = json.loads(line[6:])
                    times.append((event["sent"], time.monotonic()))
        return times

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return list(await asyncio.gather(*(read(session) for _ in range(streams))))


async def _serve_bare(listener: socket.socket, streams: int, rate: float, tokens: int) -> None:
    import uvicorn
    from fastapi import FastAPI
    from fastapi.responses import StreamingResponse

    app = FastAPI()
    waiting = 0
    begin = asyncio.get_running_loop().create_future()

    @app.post("/stream")
    async def stream() -> StreamingResponse:
        nonlocal waiting
        waiting += 1
        if waiting == streams:
            begin.set_result(time.monotonic() + 0.5)

        async def events() -> Any:
            start = await begin
            for index in range(tokens):
                due = start + index / rate
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                choice = {"index": 0, "text": " word", "finish_reason": None, "logprobs": None}
                yield f"data: {json.dumps({'sent': due, 'object': 'text_completion', 'choices': [choice]})}\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    await uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False)).serve([listener])


def _raise(peer: str, error: Exception) -> None:
    raise error

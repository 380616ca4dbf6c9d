"""The event plane by itself: real channels, a real central core, two processes; no devices, no HTTP.

Each measurement has its baseline in the same run: the same job done plainly, with pyzmq's own asyncio sockets and
msgpack dictionaries (throughput), or by a blocking pair of ZeroMQ sockets (round trip).
"""

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from forebay.bench.figures import Figure, write_figures
from forebay.bench.other_process import OtherProcess, Target, end_with_spawner
from forebay.runtime.loop import run
from forebay.sched.central import CentralCore
from forebay.sched.central_events import CentralSettings, Placement, Received, Send
from forebay.transport.codec import read_to_front_door, read_to_scheduler, read_to_worker
from forebay.transport.messages import (
    PROTOCOL_VERSION,
    Abort,
    Concluded,
    DeviceSettings,
    Ended,
    Join,
    Load,
    ModelReady,
    ModelSpec,
    Open,
    Query,
    Sampling,
    Start,
    Started,
    Status,
    Submit,
    ToFrontDoor,
    Tokens,
    ToScheduler,
    ToWorker,
)
from forebay.transport.zeromq import ZmqFeed, ZmqHub, ZmqLink, ZmqSink

SEQUENCES = 32
"""Sequences in one step event: one token for each."""
EVENTS_A_TURN = 64
TURNS_ON_THE_WAY = 32
REQUESTS_IN_FLIGHT = 400
PROMPT_TOKENS = 128
ROUND_TRIP_RATE = 1000.0
WARM_UP = 0.3
"""Share of a measurement that is not counted: processes start, caches fill."""


def measure(seconds: float, runs: int, json: Path | None, arguments: list[str] | None) -> int:
    """Runs everything, prints a table, writes the figures; returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="fb-") as folder:
        figures = {
            "events_per_s": _throughput(folder, _step_events, _plain_step_events, seconds),
            "request_events_per_s": _throughput(folder, _request_events, _plain_request_events, seconds),
        }
        ours = [run(_round_trips(folder, seconds)) for _ in range(runs)]
        plain = [_blocking_round_trips(folder, seconds) for _ in range(runs)]
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        value = statistics.median(_percentile(times, share) for times in ours)
        baseline = statistics.median(_percentile(times, share) for times in plain)
        figures[f"round_trip_{name}_s"] = Figure(value, "s", baseline)
    for name, figure in figures.items():
        print(f"{name:24}{figure.value:>14,.6g} {figure.unit:10} plain: {figure.baseline:,.6g}")
    if json is not None:
        write_figures(json, "bench.events", ["python", "-m", "bench.events", *(arguments or [])], figures)
    return 0


def _percentile(times: list[float], share: float) -> float:
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _throughput(folder: str, ours: Target, plain: Target, seconds: float) -> Figure:
    return Figure(run(ours(folder, seconds)), "events/s", run(plain(folder, seconds)))


class _Counter:
    """Events that arrived, and their rate once the warm-up is over. The clock starts with the first one."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._begin: float | None = None
        self._count = 0
        self._done: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def add(self, count: int) -> None:
        now = time.perf_counter()
        if self._begin is None:
            self._begin = now
        elapsed = now - self._begin - WARM_UP * self._seconds
        if elapsed < 0 or self._done.done():
            return
        self._count += count
        if elapsed > (1 - WARM_UP) * self._seconds:
            self._done.set_result(self._count / elapsed)

    async def rate(self) -> float:
        async with asyncio.timeout(60 + 10 * self._seconds):
            return await self._done


# Tokens: from a worker's encoder to decoded at the front door ------------------------------------------------------


async def _step_events(folder: str, seconds: float) -> float:
    counter = _Counter(seconds)

    def arrived(messages: list[ToFrontDoor]) -> None:
        for message in messages:
            if isinstance(message, Tokens):
                memoryview(message.requests).cast("Q")
                memoryview(message.epochs).cast("I")
                memoryview(message.tokens).cast("I")
        counter.add(len(messages))

        credit.send(Query(len(messages)))

    sink = ZmqSink(f"ipc://{folder}/tokens", read_to_front_door(), arrived, _raise)
    credit: ZmqFeed[ToScheduler] = ZmqFeed(f"ipc://{folder}/credit")
    with OtherProcess(_send_steps, sink.endpoint, f"ipc://{folder}/credit"):
        rate = await counter.rate()
    credit.close()
    sink.close()
    return rate


async def _send_steps(endpoint: str, credits: str) -> None:
    """Keeps a bounded number of events on the way, a loop turn's worth in a frame."""
    feed: ZmqFeed[ToFrontDoor] = ZmqFeed(endpoint)
    requests = array("Q", range(1 << 33, (1 << 33) + SEQUENCES)).tobytes()
    epochs = array("I", [0] * SEQUENCES).tobytes()
    step = 0

    def send(count: int) -> None:
        nonlocal step
        for _ in range(count):
            step += 1
            feed.send(Tokens(requests, epochs, step.to_bytes(4, "little") * SEQUENCES))

    def granted(messages: list[ToScheduler]) -> None:
        send(sum(message.query for message in messages if isinstance(message, Query)))

    ZmqSink(credits, read_to_scheduler(), granted, _raise)
    for _ in range(TURNS_ON_THE_WAY):
        send(EVENTS_A_TURN)
        await asyncio.sleep(0)
    await asyncio.Event().wait()


async def _plain_step_events(folder: str, seconds: float) -> float:
    counter = _Counter(seconds)
    socket = zmq.asyncio.Context.instance().socket(zmq.PULL)
    socket.bind(f"ipc://{folder}/plain-tokens")
    with OtherProcess(_send_plain_steps, f"ipc://{folder}/plain-tokens"):
        receiving = asyncio.create_task(_receive_plain(socket, counter))
        rate = await counter.rate()
        receiving.cancel()
    socket.close(linger=0)
    return rate


async def _receive_plain(socket: Any, counter: _Counter) -> None:
    while True:
        msgpack.unpackb(await socket.recv())
        counter.add(1)


async def _send_plain_steps(endpoint: str) -> None:
    socket = zmq.asyncio.Context.instance().socket(zmq.PUSH)
    socket.connect(endpoint)
    step = 0
    while True:
        step += 1
        tokens = [{"request": (1 << 33) + n, "epoch": 0, "token": step} for n in range(SEQUENCES)]
        await socket.send(msgpack.packb({"type": "tokens", "tokens": tokens}))


# Requests: through codec, ZeroMQ and the central core's handle -----------------------------------------------------


async def _request_events(folder: str, seconds: float) -> float:
    settings = CentralSettings(
        (Placement(ModelSpec("m", "/m", max_sequences=REQUESTS_IN_FLIGHT), ("cpu:0",)),),
        {"cpu:0": DeviceSettings(1)},
        queue_bound=2 * REQUESTS_IN_FLIGHT,
    )
    core = CentralCore(settings)
    counter = _Counter(seconds)
    loop = asyncio.get_running_loop()

    def arrived(peer: str, messages: list[ToScheduler]) -> None:
        now = loop.time()
        for message in messages:
            for command in core.handle(now, Received(peer, message)):
                assert isinstance(command, Send), command
                hub.send(command.peer, command.message)
        counter.add(len(messages))

    hub: ZmqHub[ToWorker | ToFrontDoor, ToScheduler] = ZmqHub(
        f"ipc://{folder}/control", read_to_scheduler(), arrived, _raise
    )
    with OtherProcess(_play_requests, hub.endpoint):
        rate = await counter.rate()
    hub.close()
    return rate


async def _play_requests(endpoint: str) -> None:
    """A front door and a worker: as soon as a request has ended, the next one is submitted."""
    tokens = array("I", range(PROMPT_TOKENS)).tobytes()
    numbers = iter(range(1 << 33, 1 << 62))

    def at_worker(messages: list[ToWorker]) -> None:
        for message in messages:
            match message:
                case Load():
                    worker.send(ModelReady("m", 1 << 20, 1, 1))
                    for _ in range(REQUESTS_IN_FLIGHT):
                        submit()
                case Start(request, epoch):
                    worker.send(Started(request, epoch))
                    worker.send(Ended(request, epoch, "length", 16))
                    door.send(Concluded(request))
                    submit()
                case _:
                    pass

    def submit() -> None:
        door.send(Submit(next(numbers), 0, "m", tokens, PROMPT_TOKENS, Sampling(16)))

    door: ZmqLink[ToScheduler, ToFrontDoor] = ZmqLink(endpoint, "door", read_to_front_door(), lambda _: None, _raise)
    door.send(Open(PROTOCOL_VERSION, 1, 1, "ipc:///sink", "http://"))
    worker: ZmqLink[ToScheduler, ToWorker] = ZmqLink(endpoint, "worker", read_to_worker(), at_worker, _raise)
    worker.send(Join(PROTOCOL_VERSION, 1, "cpu:0", 1, "host"))
    await asyncio.Event().wait()


async def _plain_request_events(folder: str, seconds: float) -> float:
    """The same traffic as dictionaries through an asyncio ROUTER that answers each arrival; no decisions at all."""
    counter = _Counter(seconds)
    socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    socket.bind(f"ipc://{folder}/plain-control")

    async def serve() -> None:
        while True:
            peer, frame = await socket.recv_multipart()
            event = msgpack.unpackb(frame)
            if event["type"] == "submit":
                await socket.send_multipart([peer, msgpack.packb({**event, "type": "start"})])
            counter.add(1)

    with OtherProcess(_play_plain_requests, f"ipc://{folder}/plain-control"):
        serving = asyncio.create_task(serve())
        rate = await counter.rate()
        serving.cancel()
    socket.close(linger=0)
    return rate


async def _play_plain_requests(endpoint: str) -> None:
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.connect(endpoint)
    tokens = list(range(PROMPT_TOKENS))
    for number in range(REQUESTS_IN_FLIGHT):
        await socket.send(msgpack.packb({"type": "submit", "request": number, "tokens": tokens}))
    while True:
        start = msgpack.unpackb(await socket.recv())
        for kind in ("started", "ended"):
            await socket.send(msgpack.packb({"type": kind, "request": start["request"]}))
        await socket.send(msgpack.packb({**start, "type": "submit", "request": start["request"] + 1}))


# Round trips ---------------------------------------------------------------------------------------------------------


async def _round_trips(folder: str, seconds: float) -> list[float]:
    """Seconds from a query to its answer, at ROUND_TRIP_RATE, one in flight."""
    endpoint = f"ipc://{folder}/echo"
    times: list[float] = []
    sent = 0.0
    answered: asyncio.Event = asyncio.Event()

    def arrived(messages: list[ToFrontDoor]) -> None:
        times.append(time.perf_counter() - sent)
        answered.set()

    with OtherProcess(_answer_queries, endpoint):
        link: ZmqLink[ToScheduler, ToFrontDoor] = ZmqLink(endpoint, "a", read_to_front_door(), arrived, _raise)
        loop = asyncio.get_running_loop()
        begin = None
        while begin is None or loop.time() - begin < seconds:
            answered.clear()
            sent = time.perf_counter()
            link.send(Query(len(times)))
            async with asyncio.timeout(30):
                await answered.wait()
            begin = begin or loop.time()
            await asyncio.sleep(max(0.0, 1 / ROUND_TRIP_RATE - (time.perf_counter() - sent)))
        link.close()
    return times[int(WARM_UP * len(times)) :]


async def _answer_queries(endpoint: str) -> None:
    def arrived(peer: str, messages: list[ToScheduler]) -> None:
        for message in messages:
            assert isinstance(message, Query | Abort)
            if isinstance(message, Query):
                hub.send(peer, Status(message.query, (), ()))

    hub: ZmqHub[ToFrontDoor, ToScheduler] = ZmqHub(endpoint, read_to_scheduler(), arrived, _raise)
    await asyncio.Event().wait()


def _blocking_round_trips(folder: str, seconds: float) -> list[float]:
    """The same bytes between two blocking sockets."""
    endpoint = f"ipc://{folder}/blocking"
    process = multiprocessing.get_context("spawn").Process(target=_answer_blocking, args=(endpoint,))
    process.start()
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(endpoint)
    times: list[float] = []
    begin = None
    try:
        while begin is None or time.perf_counter() - begin < seconds:
            sent = time.perf_counter()
            socket.send(msgpack.packb([["Query", len(times)]]))
            msgpack.unpackb(socket.recv())
            times.append(time.perf_counter() - sent)
            begin = begin or time.perf_counter()
            time.sleep(max(0.0, 1 / ROUND_TRIP_RATE - times[-1]))
    finally:
        socket.close(linger=0)
        process.terminate()
        process.join(10)
    return times[int(WARM_UP * len(times)) :]


def _answer_blocking(endpoint: str) -> None:
    end_with_spawner()
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    socket.bind(endpoint)
    while True:
        peer, frame = socket.recv_multipart()
        (_, query) = msgpack.unpackb(frame)[0]
        socket.send_multipart([peer, msgpack.packb([["Status", query, [], []]])])


def _raise(peer: str, error: Exception) -> None:
    raise error

"""The scheduler alone: its socket, its codec and its core, under many workers and a steady rate of events.

A request makes four events (Submit, Started, Ended, Concluded) and one command (Start). Besides, a probe asks for an
answer a hundred times a second (a request that is refused): its round trip holds all the waiting that a burst of other
events causes.
"""

import asyncio
import resource
import statistics
import sys
import tempfile
import time
from array import array
from collections import deque
from functools import partial
from pathlib import Path

from forebay.bench.figures import Figure, write_figures
from forebay.bench.other_process import OtherProcess
from forebay.runtime.loop import run
from forebay.sched.central import CentralCore
from forebay.sched.central_events import CentralSettings, Placement, Received, Send, Tick
from forebay.transport.codec import read_to_front_door, read_to_scheduler, read_to_worker
from forebay.transport.messages import (
    PROTOCOL_VERSION,
    Concluded,
    DeviceSettings,
    Ended,
    Join,
    Load,
    ModelReady,
    ModelSpec,
    Open,
    Sampling,
    Start,
    Started,
    Submit,
    ToFrontDoor,
    ToScheduler,
    ToWorker,
)
from forebay.transport.zeromq import ZmqHub, ZmqLink

REPLICAS = 4
"""Workers that hold a model; as many models as fill all workers."""
EVENTS_A_REQUEST = 4
TURN_S = 0.002
SERVICE_S = 0.05
"""How long a fake worker runs a request."""
PROBES_PER_S = 100
WARM_UP_S = 5.0
"""Not counted: all workers join at once, and what was to be submitted meanwhile comes in one burst."""
PROMPT_TOKENS = 128
PAGE_KIB = resource.getpagesize() // 1024


def measure(workers: int, rate: float, seconds: float, json: Path | None, arguments: list[str] | None) -> int:
    """Runs it, prints a line each second and the result, writes the figures; returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="fb-") as folder:
        figures = run(_load(folder, workers, rate, seconds))
    for name, figure in figures.items():
        baseline = "" if figure.baseline is None else f"  (of {figure.baseline:,.6g})"
        print(f"{name:24}{figure.value:>14,.6g} {figure.unit}{baseline}")
    if json is not None:
        write_figures(json, "bench.scheduler", ["python", "-m", "bench.scheduler", *(arguments or [])], figures)
    return 0


def _settings(workers: int) -> CentralSettings:
    models = max(1, workers // REPLICAS)
    return CentralSettings(
        tuple(
            Placement(
                ModelSpec(f"m{m}", "/m", max_sequences=1000), tuple(f"cpu:{w}" for w in range(m, workers, models))
            )
            for m in range(models)
        ),
        {f"cpu:{w}": DeviceSettings(1) for w in range(workers)},
        queue_bound=1_000_000,
        silence_s=30.0,
    )


async def _load(folder: str, workers: int, rate: float, seconds: float) -> dict[str, Figure]:
    settings = _settings(workers)
    core = CentralCore(settings)
    loop = asyncio.get_running_loop()
    handling: list[float] = []
    events = 0

    def decide(peer: str, messages: list[ToScheduler]) -> None:
        nonlocal events
        began = time.perf_counter()
        now = loop.time()
        for message in messages:
            for command in core.handle(now, Received(peer, message)):
                assert isinstance(command, Send), f"a well-behaved peer was dismissed: {command}"
                hub.send(command.peer, command.message)
        took = time.perf_counter() - began
        handling.extend([took] * len(messages))
        events += len(messages)

    hub: ZmqHub[ToWorker | ToFrontDoor, ToScheduler] = ZmqHub(
        f"ipc://{folder}/control", read_to_scheduler(), decide, _raise
    )
    probe = _Probe(hub.endpoint)
    models = [place.spec.name for place in settings.models]
    with OtherProcess(_play, hub.endpoint, workers, models, rate):
        memory: list[int] = []
        p99: list[float] = []
        rates: list[float] = []
        begin = loop.time()
        last = begin
        warm = False
        while loop.time() - begin < WARM_UP_S + seconds:
            await asyncio.sleep(1.0)
            core.handle(loop.time(), Tick())
            now = loop.time()
            if not warm:
                warm = now - begin >= WARM_UP_S
                probe.reset()
            elif handling:
                handling.sort()
                p99.append(handling[int(0.99 * len(handling))])
                rates.append(events / (now - last))
                memory.append(_resident_kib())
                if sys.stderr.isatty() or len(rates) % 10 == 1:
                    print(
                        f"{now - begin:5.0f} s  {rates[-1]:8,.0f} events/s  handling p99 {1e3 * p99[-1]:.2f} ms  "
                        f"probe p99 {1e3 * probe.percentile(0.99):.2f} ms  {memory[-1] / 1024:,.0f} MiB",
                        file=sys.stderr,
                    )
            handling.clear()
            events, last = 0, now
    probe.close()
    hub.close()
    settled = memory[len(memory) // 5 :]
    return {
        "events_per_s": Figure(statistics.median(rates), "events/s", rate),
        "handling_p99_s": Figure(statistics.median(p99), "s"),
        "handling_p99_worst_second_s": Figure(max(p99), "s"),
        "probe_p99_s": Figure(probe.percentile(0.99), "s"),
        "memory_first_kib": Figure(float(settled[0]), "KiB"),
        "memory_last_kib": Figure(float(settled[-1]), "KiB", float(settled[0])),
    }


def _resident_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_KIB


class _Probe:
    """Round trips through the same socket, beside the load."""

    def __init__(self, endpoint: str) -> None:
        self._times: deque[float] = deque(maxlen=100_000)
        self._sent: dict[int, float] = {}
        self._number = 0
        self._loop = asyncio.get_running_loop()
        self._link: ZmqLink[ToScheduler, ToFrontDoor] = ZmqLink(
            endpoint, "probe", read_to_front_door(), self._arrived, _raise
        )
        self._link.send(Open(PROTOCOL_VERSION, 1, 2, "ipc:///probe", ""))
        # The cheapest answer that the core gives: to a request for a model that is not there.
        self._ask()

    def _ask(self) -> None:
        self._number += 1
        self._sent[self._number] = time.perf_counter()
        self._link.send(Submit(self._number, 0, "none", b"\0\0\0\0", 1, Sampling(1)))
        self._timer = self._loop.call_later(1 / PROBES_PER_S, self._ask)

    def _arrived(self, messages: list[ToFrontDoor]) -> None:
        for message in messages:
            sent = self._sent.pop(getattr(message, "request", -1), None)
            if sent is not None:
                self._times.append(time.perf_counter() - sent)

    def reset(self) -> None:
        """Forgets the times measured so far."""
        self._times.clear()

    def percentile(self, share: float) -> float:
        ordered = sorted(self._times)
        return ordered[int(share * len(ordered))] if ordered else float("nan")

    def close(self) -> None:
        self._timer.cancel()
        self._link.close()


async def _play(endpoint: str, workers: int, models: list[str], rate: float) -> None:
    """The other process: all fake workers, and a front door that submits at the rate."""
    loop = asyncio.get_running_loop()
    tokens = array("I", range(PROMPT_TOKENS)).tobytes()
    sampling = Sampling(16)
    running: deque[tuple[float, ZmqLink[ToScheduler, ToWorker], int]] = deque()
    ready = 0
    all_ready = asyncio.Event()

    def at_worker(index: int, messages: list[ToWorker]) -> None:
        nonlocal ready
        link = links[index]
        for message in messages:
            match message:
                case Load(model):
                    link.send(ModelReady(model.name, 1 << 20, 1, 1))
                    ready += 1
                    if ready == workers:
                        all_ready.set()
                case Start(request):
                    link.send(Started(request, 0))
                    running.append((loop.time() + SERVICE_S, link, request))
                case _:
                    pass

    links: list[ZmqLink[ToScheduler, ToWorker]] = []
    for index in range(workers):
        arrived = partial(at_worker, index)
        link: ZmqLink[ToScheduler, ToWorker] = ZmqLink(endpoint, f"w{index}", read_to_worker(), arrived, _raise)
        links.append(link)
        link.send(Join(PROTOCOL_VERSION, 1, f"cpu:{index}", index, "host"))
    door: ZmqLink[ToScheduler, ToFrontDoor] = ZmqLink(endpoint, "door", read_to_front_door(), lambda _: None, _raise)
    door.send(Open(PROTOCOL_VERSION, 1, 1, "ipc:///sink", "http://"))
    await all_ready.wait()
    number, begin = 1 << 33, loop.time()
    submitted = 0
    while True:
        due = int((loop.time() - begin) * rate / EVENTS_A_REQUEST)
        for _ in range(due - submitted):
            number += 1
            door.send(Submit(number, 0, models[number % len(models)], tokens, PROMPT_TOKENS, sampling))
        submitted = due
        while running and running[0][0] <= loop.time():
            _, worker, request = running.popleft()
            worker.send(Ended(request, 0, "length", 16))
            door.send(Concluded(request))
        await asyncio.sleep(TURN_S)


def _raise(peer: str, error: Exception) -> None:
    raise error

"""The other processes of a lending measurement: a real scheduler, and lenders that do as they are told."""

import json
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import zmq

from forebay.bench.errors import BenchError
from forebay.runtime.client import Lender

START_S = 60.0
END_S = 20.0
ANSWER_S = 300.0
LOG_LINES = 20
POLL_S = 0.0005


class SchedulerProcess:
    """`python -m runtime.scheduler` without a configuration, with a folder of its own for its sockets and those of its
    parties, from entry to exit. Raises BenchError if it has not started all of itself within START_S, or ends before
    it is asked to."""

    endpoint: str

    def __enter__(self) -> Self:
        self._temporary = tempfile.TemporaryDirectory(prefix="fb-")
        self.folder = Path(self._temporary.name)
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._seen: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "forebay.runtime.scheduler", "--port", "0"],
            env={**os.environ, "XDG_RUNTIME_DIR": str(self.folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stderr,), daemon=True)
        self._reader.start()
        try:
            self.endpoint = self._started()
        except BaseException:
            self._stop()
            raise
        return self

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._lines.put(line)
        self._lines.put(None)

    def _started(self) -> str:
        """Its endpoint, once its front door has started too: what starts would be measured."""
        deadline, endpoint = time.monotonic() + START_S, ""
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                line = None
            if line is None:
                raise self._problem("did not start")
            self._seen.append(line.rstrip())
            with suppress(ValueError):
                match json.loads(line):
                    case {"event": "the scheduler listens", "endpoint": str(found)}:
                        endpoint = found
                    case {"event": "requests can be sent"}:
                        return endpoint

    def _problem(self, what: str) -> BenchError:
        return BenchError("\n".join([f"the scheduler {what}; its log ends with", *self._seen[-LOG_LINES:]]))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        ended = self._process.poll() is not None
        self._stop()
        if ended:
            while line := self._lines.get():
                self._seen.append(line.rstrip())
            raise self._problem("ended in the middle of a measurement") from error

    def kill(self) -> None:
        """By force; returns when it has ended."""
        self._process.kill()
        self._process.wait()

    def _stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(END_S)
        self._temporary.cleanup()


class LenderProcess:
    """A lender of `device` (GPU number `gpu`), with slabs of `slab_bytes`. Its methods are those of `_Lending`, in its
    process. Raises BenchError if it says that it cannot, or nothing within ANSWER_S."""

    def __init__(self, scheduler: SchedulerProcess, gpu: int, device: str, slab_bytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, scheduler.endpoint, gpu, device, slab_bytes, scheduler.folder), daemon=True
        )
        self._process.start()
        theirs.close()

    def offer(self, size: int) -> None:
        """`size` bytes more; returns when the scheduler may lend them."""
        self._ask("offer", size)

    def await_free(self, size: int) -> None:
        """Until `size` bytes are offered that nobody has, and the scheduler knows it."""
        self._ask("await_free", size)

    def take_back(self, size: int) -> float:
        """Seconds until `size` bytes were back."""
        return float(self._ask("take_back", size))

    def echo(self, endpoint: str) -> None:
        """From now on answers each message at that endpoint with itself, by a plain blocking socket."""
        self._ask("echo", endpoint)

    def compute(self) -> None:
        """Begins with products on its device."""
        self._ask("compute")

    def computed(self) -> float:
        """Ends them: how many a second there were."""
        return float(self._ask("computed"))

    def _ask(self, name: str, *given: object) -> Any:
        try:
            self._ours.send((name, given))
            if not self._ours.poll(ANSWER_S):
                raise BenchError(f"the lender did not answer {name} within {ANSWER_S:g} s")
            answer, problem = self._ours.recv()
        except (EOFError, OSError):
            raise BenchError(f"the lender ended during {name}; its error is above") from None
        if problem:
            raise BenchError(f"the lender could not {name}: {problem}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ours.close()
        self._process.join(END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def _serve(pipe: Connection, endpoint: str, gpu: int, device: str, slab_bytes: int, folder: Path) -> None:
    """The lender's process: until the other end of the pipe is closed."""
    with Lender(endpoint, gpu, device, slab_bytes=slab_bytes, folder=folder) as lender:
        served = _Lending(lender, device)
        with suppress(EOFError):
            while True:
                name, given = pipe.recv()
                try:
                    answer = getattr(served, name)(*given), ""
                except Exception as error:
                    answer = None, repr(error)
                pipe.send(answer)


class _Lending:
    def __init__(self, lender: Lender, device: str) -> None:
        self._lender = lender
        self._device = device
        self._products: Any = None

    def offer(self, size: int) -> None:
        if not self._lender.ready(START_S):
            raise BenchError(self._lender.status().reason)
        free = self._lender.status().free
        offered = self._lender.offer(size)
        if offered < size:
            raise BenchError(f"there are only {offered} bytes of {self._device} to be lent, not {size}")
        self.await_free(free + size)

    def await_free(self, size: int) -> None:
        deadline = time.monotonic() + ANSWER_S / 2
        while self._lender.status().free < size:
            if time.monotonic() > deadline:
                raise BenchError(f"{size} bytes are not free again: {self._lender.status()}")
            time.sleep(POLL_S)
        # A party is heard in order: once it has a slab back, the scheduler knows of all that it offered before.
        self._lender.offer(self._lender.slab_bytes)
        self.take_back(self._lender.slab_bytes)

    def take_back(self, size: int) -> float:
        begin = time.perf_counter()
        taken = self._lender.take_back(size, ANSWER_S / 2)
        elapsed = time.perf_counter() - begin
        if taken.missing or taken.bytes < size:
            raise BenchError(f"{taken.missing} bytes did not come back, held by {taken.holders}")
        return elapsed

    def echo(self, endpoint: str) -> None:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        socket.bind(endpoint)

        def serve() -> None:
            while data := socket.recv():
                socket.send(data)
            socket.close()

        threading.Thread(target=serve, daemon=True).start()

    def compute(self) -> None:
        from forebay.bench.products import Products

        if self._products is None:
            self._products = Products(self._device)
        self._products.__enter__()

    def computed(self) -> float:
        self._products.__exit__(None, None, None)
        return float(self._products.rate)

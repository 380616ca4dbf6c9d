"""Lenders and borrowers as processes, for tests that kill them."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from tests.runtime.lending_hub import until
from tests.system.server import Server

PROGRAM = Path(__file__).with_name("lending_party.py")
ANSWER_S = 60.0


class PartyProcess:
    """`ask("method", ...)` calls a method of lending_party.py's class there and waits for its answer."""

    def __init__(self, role: str, runtime: Path, **options: Any) -> None:
        self.role = role
        self.alive = True
        self.stopped = False
        self.log: list[str] = []
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), role, json.dumps(options)],
            env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, self._answers.put), daemon=True),
            threading.Thread(target=self._read, args=(self.process.stderr, self.log.append), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(stream: Any, put: Callable[[str], object]) -> None:
        for line in stream:
            put(line)

    def ask(self, name: str, **given: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, given]) + "\n")
        self.process.stdin.flush()
        try:
            answer = json.loads(self._answers.get(timeout=ANSWER_S))
        except queue.Empty:
            raise AssertionError(f"{self.role} does not answer {name}; its log:\n{''.join(self.log)}") from None
        assert "error" not in answer, f"{self.role}.{name}: {answer}\n{''.join(self.log)}"
        return answer["answer"]

    def until(self, name: str, condition: Callable[[Any], object], timeout_s: float = 20.0) -> Any:
        """Asks until the answer satisfies the condition."""
        try:
            return until(lambda: self.ask(name), condition, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{self.role}.{name}: {error}\n{''.join(self.log)}") from None

    def kill(self) -> None:
        self.alive = False
        self.process.kill()
        self.process.wait(30)

    def stop(self) -> None:
        self.stopped = True
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.stopped = False
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """A party that lives says goodbye."""
        if self.stopped:
            self.go_on()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(30)
        for reader in self._readers:
            reader.join(30)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def endpoint_of(scheduler: Server) -> str:
    """The control endpoint of a server that has started."""
    lines = [line for line in scheduler.lines if line["event"] == "the scheduler listens"]
    return str(lines[0]["endpoint"])

"""The programs in examples/lending/ say what docs/lending.md says they say."""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.runtime.lending_hub import until
from tests.system.server import ROOT, Server

pytestmark = [pytest.mark.system, pytest.mark.timeout(150)]

MIB = 1 << 20


class Program:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.said: list[str] = []
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip())

    def until(self, pattern: str) -> "re.Match[str]":
        while True:
            try:
                line = self._lines.get(timeout=40)
            except queue.Empty:
                raise AssertionError(f"no {pattern!r} in {self.said}") from None
            self.said.append(line)
            if (found := re.fullmatch(pattern, line)) is not None:
                return found

    def end(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(30)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)
        self._reader.join(30)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def example(name: str, server: Server, *arguments: str) -> Iterator[Program]:
    program = Program(
        subprocess.Popen(
            [sys.executable, str(ROOT / "examples" / "lending" / name), "--slab", "4", *arguments],
            env={**os.environ, "XDG_RUNTIME_DIR": str(server.runtime)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    )
    try:
        yield program
    finally:
        program.close()


def test_what_the_page_shows_happens(tmp_path: Path) -> None:
    with Server({"lending": {"ttl": 2.0}, "timeouts": {"stop": 2}, "devices": []}, tmp_path) as server:
        pair = {"producer": 0, "consumer": 2}
        answer = httpx.post(f"{server.url}/mapping", json=pair, timeout=30)
        assert answer.json() == {"mapping": [pair]}
        with example("lender.py", server, "--gpu", "0", "--mebibytes", "16") as lender:
            (name,) = lender.until(r"(lender-gpu0-\d+-\w+) offers 16 MiB of GPU 0; Ctrl-C takes it back").groups()
            with example("borrower.py", server, "--gpu", "2", "--mebibytes", "8") as borrower:
                (taker,) = borrower.until(r"(borrower-gpu2-\d+-\w+) asks for 8 MiB").groups()
                borrower.until(f"8 MiB on {name}: every byte is there")
                lender.until(rf"lease \d+: 8 MiB lent to {taker}")
                (lease,) = until(lambda: server.get("/leases").json(), len)
                assert (lease["lender"], lease["borrower"], lease["state"]) == (name, taker, "active")
                revoked = httpx.post(f"{server.url}/leases/{lease['id']}/revoke", json={"deadline_s": 5}, timeout=30)
                assert revoked.json() == {"lease": lease["id"], "deadline_s": 5.0, "note": ""}
                borrower.until("8 MiB in host memory: every byte is there")
                for _ in range(2):
                    lender.until(rf"lease \d+: 4 MiB came back from {taker}")
                assert borrower.end() == 0
                borrower.until("gave it all back")
            with example("borrower.py", server, "--gpu", "2", "--mebibytes", "8") as borrower:
                borrower.until(f"8 MiB on {name}: every byte is there")
                lender.process.kill()
                borrower.until("8 MiB in host memory: every byte is there")
                assert server.get("/leases").json() == []
                assert borrower.end() == 0
        with example("lender.py", server, "--gpu", "0", "--mebibytes", "16") as lender:
            lender.until("lender-.*takes it back")
            with example("borrower.py", server, "--gpu", "2", "--mebibytes", "8") as borrower:
                borrower.until("8 MiB on lender-.*: every byte is there")
                body = {"gpu": 0, "bytes": 16 * MIB, "deadline_s": 5}
                reclaimed = httpx.post(f"{server.url}/reclaim", json=body, timeout=30).json()
                assert (reclaimed["yielded"], reclaimed["missing"], reclaimed["holders"]) == (16 * MIB, 0, [])
                borrower.until("8 MiB in host memory: every byte is there")
                lender.until(r"\d+ MiB were asked back by an operator, and are offered no longer")
                assert borrower.end() == 0
            assert lender.end() == 0
            lender.until("took back 0 MiB")

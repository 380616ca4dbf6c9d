"""What the contract suites of memory and of copies share: which devices there are, processes, and how memory is
counted."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.gpu.backend import Arena, MemoryBackend, MemorySlab, memory_backend
from forebay.gpu.errors import DeviceError
from tests.gpu.test_memory import descriptors, mappings

CHILD = Path(__file__).with_name("lending_child.py")


def why_not(device: str) -> str:
    """Empty where the device is there."""
    try:
        memory_backend(device).close()
    except DeviceError as error:
        return str(error)
    return ""


WANTED = [("cpu:0", "cpu:1"), ("cuda:0", "cuda:0"), ("cuda:0", "cuda:1")]
PAIRS = [pair for pair in WANTED if not any(map(why_not, pair))]
"""Devices of a lender and its borrower, those that are here."""


@dataclass(frozen=True)
class Lending:
    lender: MemoryBackend
    borrower: MemoryBackend
    slab_bytes: int

    @property
    def cuda(self) -> bool:
        return self.lender.device.kind == "cuda"

    def slab(self) -> MemorySlab:
        return self.lender.slab(self.slab_bytes)

    def arena(self, slots: int, *, full: bool = False) -> Arena:
        """The borrower's; `full`: with slabs of the lender in every slot."""
        arena = self.borrower.arena(self.slab_bytes, slots)
        for slot in range(slots if full else 0):
            with self.slab() as slab, adopted(self, slab) as ours:
                arena.map(slot, ours)
        return arena

    def holdings(self) -> tuple[int, int, int]:
        """Descriptors, bytes of mapped memfds, and MiB taken of the lender's device."""
        info = self.lender.memory()
        return descriptors(), mappings(), (info.total - info.free) >> 20 if self.cuda else 0


@contextmanager
def adopted(lending: Lending, slab: MemorySlab) -> Iterator[MemorySlab]:
    """The borrower's own handle on a lender's slab, by way of a descriptor."""
    with lending.borrower.adopt(os.dup(slab.fileno()), slab.size) as ours:
        yield ours


@pytest.fixture(params=PAIRS, ids=lambda pair: "-".join(pair).replace(":", ""))
def lending(request: pytest.FixtureRequest) -> Iterator[Lending]:
    lender, borrower = request.param
    with memory_backend(lender) as lends, memory_backend(borrower) as borrows:
        yield Lending(lends, borrows, max(lends.granularity, 64 << 10))


class Child:
    """The other process, on one device."""

    def __init__(self, device: str) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(50)
        with theirs:
            command = [sys.executable, str(CHILD), device, str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])

    def ask(self, *command: Any, descriptor: int = -1) -> Any:
        """The answer, and the descriptor that came with it where one did."""
        socket.send_fds(self._socket, [json.dumps(command).encode()], [descriptor] if descriptor >= 0 else [])
        data, received, _, _ = socket.recv_fds(self._socket, 1 << 20, 1)
        assert data, f"the other process died at {command}"
        return received[0] if received else json.loads(data)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        assert self.process.wait(timeout=30) == -signal.SIGKILL

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *error: Any) -> None:
        self._socket.close()
        try:
            self.process.wait(timeout=30)
        finally:
            self.process.kill()
            self.process.wait()


def noise(size: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)

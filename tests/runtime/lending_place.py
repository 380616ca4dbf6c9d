"""A hub with lenders and borrowers in the test's own process, and a gate that sees what they leave behind."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forebay.runtime.client import Borrower, Lender, Loan
from tests.runtime.lending_hub import LendingHub, until

SLAB = 64 << 10


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    return Path("/proc/self/maps").read_text(encoding="ascii").count("forebay-slab")


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("lender-", "borrower-", "hub"))]


def filled(loan: Loan) -> bytes:
    """What it has been filled with."""
    data = os.urandom(loan.bytes)
    loan.write(0, data)
    return data


class Place:
    """A hub, and parties that are closed at its end."""

    def __init__(self, **more: Any) -> None:
        self.hub = LendingHub(**more)
        self._parties: list[Lender | Borrower] = []

    @property
    def folder(self) -> Path:
        return self.hub.folder

    def lender(self, gpu: int = 0, slabs: int = 0, **more: Any) -> Lender:
        made = Lender(self.hub.endpoint, gpu, slab_bytes=more.pop("slab_bytes", SLAB), folder=self.folder, **more)
        self._parties.append(made)
        if slabs:
            made.offer(slabs * SLAB)
            self.until_free(made, slabs)
        return made

    def borrower(self, gpu: int = 9, **more: Any) -> Borrower:
        made = Borrower(self.hub.endpoint, gpu, slab_bytes=SLAB, **more)
        self._parties.append(made)
        assert made.ready()
        return made

    def free(self, lender: str) -> int:
        """Slabs of a lender that the scheduler may lend."""
        stocks = self.hub.core.book.ledger.stocks
        found: int = self.hub.call(lambda: len(stocks[lender].free) if lender in stocks else 0)
        return found

    def until_free(self, lender: Lender, slabs: int) -> None:
        until(lambda: self.free(lender.name), slabs.__eq__)

    def start_again(self, *, forgetful: bool = False, absent: Callable[[], object] = lambda: None) -> None:
        """The hub ends without a word; another one takes its place."""
        records = self.hub.stop()
        absent()
        self.hub = LendingHub(self.folder, records=() if forgetful else records)

    def close(self) -> None:
        for party in self._parties:
            party.close()
        self.hub.stop()


def libraries_are_up() -> None:
    """ZeroMQ and uvloop have descriptors of their own, which stay."""
    made = Place()
    made.lender(), made.borrower()
    made.close()
    made.folder.rmdir()


@contextmanager
def a_place(**more: Any) -> Iterator[Place]:
    """At its end no descriptor, mapping, thread or file is left."""

    def held() -> tuple[int, int, list[str]]:
        return descriptors(), mappings(), threads()

    before = held()
    made = Place(**more)
    try:
        yield made
    finally:
        made.close()
    made.folder.rmdir()

    def as_before(found: tuple[int, int, list[str]]) -> bool:
        return found <= before or gc.collect() < 0  # an exception that was caught may keep a frame

    until(held, as_before)  # a closed socket may go on for a second to deliver what it was given

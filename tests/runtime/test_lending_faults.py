"""Lenders that lie, borrowers that race, other users, mappings that change: what parties to a loan are safe from."""

import asyncio
import fcntl
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import pytest

from forebay.gpu.memory import Slab
from forebay.runtime.background import Background
from forebay.runtime.client import HandoverFailed, Lender
from forebay.runtime.fetching import fetch
from forebay.runtime.handover import HandoverServer, socket_path
from forebay.runtime.party import Identity, Party
from forebay.sched.lending_events import Wish
from forebay.transport.messages import Lend, Map, Returned, ToParty, Unmap
from forebay.transport.messages.handover import Ask
from tests.runtime.lending_hub import until
from tests.runtime.lending_place import SLAB, Place, a_place, filled, libraries_are_up


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    libraries_are_up()


@pytest.fixture
def place() -> Iterator[Place]:
    with a_place() as made:
        yield made


class LyingLender:
    """Offers two slabs and hands over something else."""

    def __init__(self, place: Place, lie: str) -> None:
        self.name = f"liar-{lie}"
        self.returned: list[Returned] = []
        self._lie = lie
        self._open: list[Any] = []
        self._background = Background(self.name)

        async def start() -> None:
            self._server = HandoverServer(socket_path(place.folder), 0o600, {os.getuid()}, lambda text: None)
            identity = Identity(self.name, 0, "", self._server.endpoint, SLAB)
            self._party = Party(place.hub.endpoint, identity, lambda: ((1, 2), (), ()), self._hear, lambda: None)

        self._background.run_first(start())

    def _hear(self, message: ToParty) -> None:
        match message:
            case Lend() if self._lie != "silent":
                lent = {number: self._instead() for number in message.slabs}
                if self._lie == "fewer":
                    lent.pop(2)
                self._server.admit(message.lease, message.epoch, message.token, lent)
            case Returned():
                self.returned.append(message)

    def _instead(self) -> int:
        match self._lie:
            case "smaller":
                self._open.append(Slab(SLAB // 2))
            case "larger":
                self._open.append(Slab(SLAB * 2))
            case "no memory":
                self._open.append(socket.socket())
            case "not sealed" | "not writable":
                descriptor = os.memfd_create("liar", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                os.ftruncate(descriptor, SLAB)
                if self._lie == "not writable":
                    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
                self._open.append(os.fdopen(descriptor))
            case _:
                self._open.append(Slab(SLAB))
        number: int = self._open[-1].fileno()
        return number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        async def end() -> None:
            self._party.close("the test ends")
            await self._server.aclose()

        self._background.close(end())
        for each in self._open:
            each.close()


@pytest.mark.parametrize(
    ("lie", "problem"),
    [
        ("smaller", f"{SLAB // 2} bytes"),
        ("larger", f"{SLAB * 2} bytes"),
        ("no memory", "slab"),
        ("not sealed", "not sealed"),
        ("not writable", "sealed against writing"),
        ("fewer", "did not hand over slabs [2]"),
        ("silent", "did not hand over anything within 0.3 s"),
    ],
)
def test_a_lender_that_lies_is_complained_about_and_lends_no_more(place: Place, lie: str, problem: str) -> None:
    borrower = place.borrower(handover_s=0.3)
    with LyingLender(place, lie) as liar:
        until(lambda: place.free(liar.name), (2).__eq__)
        with borrower.allocate(2 * SLAB) as loan:
            assert (loan.bytes, loan.where) == (2 * SLAB, "host")
            assert problem in loan.reason
            data = filled(loan)
            assert loan.read(0, loan.bytes) == data
            (reason,) = until(place.hub.complaints, len)
            assert problem in reason
            # Nobody knows what became of the slabs: they are not taken for clean.
            assert [message.released for message in until(lambda: liar.returned, len)] == [False]
        with borrower.allocate(SLAB) as again:
            assert again.where == "host"
        assert borrower.status().complaints == 1
        place.hub.until(lambda status: not status.leases)


def test_a_lease_is_nobodys_but_its_borrowers(place: Place) -> None:
    """Its token, its number and its epoch belong together, and with no other lease's."""
    lender = place.lender(0, 2)
    first, second = place.borrower(8), place.borrower(9)
    with first.allocate(SLAB), second.allocate(SLAB):
        mine, theirs = (borrower._leasing.leases[0] for borrower in (first, second))

        async def steal() -> dict[int, int]:
            return await fetch(theirs.endpoint, Ask(theirs.number, theirs.epoch, mine.token), {os.getuid()}, 5.0)

        with pytest.raises(HandoverFailed, match="not known here with that token"):
            asyncio.run(steal())
    place.until_free(lender, 2)


def test_of_borrowers_that_race_for_the_last_slab_one_has_it(place: Place) -> None:
    lender = place.lender(0, 1)
    borrowers = [place.borrower(gpu) for gpu in range(5, 9)]
    ready = threading.Barrier(len(borrowers))

    def race(number: int) -> tuple[int, str]:
        ready.wait(10)
        loan = borrowers[number].allocate(SLAB, host=False)
        got = loan.bytes, loan.where
        loan.release()
        return got

    for _ in range(5):
        with ThreadPoolExecutor(len(borrowers)) as pool:
            got = list(pool.map(race, range(len(borrowers))))
        assert set(got) <= {(SLAB, "peer"), (0, "nowhere")}
        assert got.count((SLAB, "peer")) >= 1
        place.until_free(lender, 1)
    with borrowers[0].allocate(SLAB, host=False) as one, borrowers[1].allocate(SLAB, host=False) as other:
        assert (one.where, other.where) == ("peer", "nowhere")


def test_a_lease_outlives_its_mapping_and_no_new_one_is_granted(place: Place) -> None:
    lender = place.lender(0, 2)
    place.hub.call(lambda: place.hub.decide(Wish("test", Map(1, 0, 9))))
    place.hub.call(lambda: place.hub.decide(Wish("test", Map(2, 3, 9))))
    borrower = place.borrower(9)
    with borrower.allocate(SLAB) as loan:
        data = filled(loan)
        assert loan.where == "peer"
        place.hub.call(lambda: place.hub.decide(Wish("test", Unmap(3, 0, 9))))
        with borrower.allocate(SLAB) as other:
            assert other.where == "host"
            assert "borrows from its producers only (GPU 3)" in other.reason
        assert loan.where == "peer"
        assert loan.read(0, SLAB) == data
        assert lender.take_back(2 * SLAB, 5.0).missing == 0
        assert loan.read(0, SLAB) == data


STRANGER = """
import encodings.ascii, os, sys
import forebay.gpu.memfd_backend  # while the libraries can still be read
from forebay.runtime.client import Borrower
os.setgid(65534); os.setuid(65534)
borrower = Borrower(sys.argv[1], 1, slab_bytes=int(sys.argv[2]), uids={0, 65534})
loan = borrower.allocate(int(sys.argv[2]))
loan.write(0, b"secret")
print(loan.where, loan.reason, flush=True)
sys.stdin.readline()
loan.release()
borrower.close()
"""


@pytest.mark.system
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("welcome", [True, False])
def test_what_another_user_had_is_destroyed_rather_than_zeroed(welcome: bool) -> None:
    with a_place(uids=(65534,)) as place:
        place.folder.chmod(0o755)
        replaced: list[tuple[Any, Any]] = []
        old = Slab(SLAB)
        uids = {0, 65534} if welcome else {0}
        lender = Lender(
            place.hub.endpoint,
            0,
            slab_bytes=SLAB,
            folder=place.folder,
            uids=uids,
            socket_mode=0o666,
            on_replaced=lambda before, after: replaced.append((before, after)),
        )
        with lender:
            lender.offer_slabs([old])
            place.until_free(lender, 1)
            child = subprocess.Popen(
                [sys.executable, "-c", STRANGER, place.hub.endpoint, str(SLAB)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert child.stdin is not None
            assert child.stdout is not None
            said = child.stdout.readline()
            if welcome:
                assert said.startswith("peer")
            else:
                assert said.startswith("host")
                assert "user 65534 may not borrow here (allowed: 0)" in said
            child.stdin.write("\n")
            child.stdin.close()
            assert child.wait(30) == 0
            child.stdout.close()
            # Also the one that was refused: its complaint says that nobody knows what became of the slab.
            ((before, after),) = until(lambda: list(replaced), len)
            assert before is old
            until(lambda: old.closed, bool)
            if welcome:
                place.until_free(lender, 1)
        after.close()

"""What can go wrong with a loan apart from deaths and pauses (test_lending_kills.py): lies, forged tokens, races, a
mapping that goes, a host without memory. Each among real processes, one of which then gets a real signal."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.runtime.fetching import fetch
from forebay.runtime.handover import SOCKET_PREFIX
from forebay.runtime.lending_errors import HandoverFailed
from forebay.transport.messages.handover import Ask
from tests.runtime.lending_hub import until
from tests.system.lending import PartyProcess, endpoint_of
from tests.system.server import ROOT, Server

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

SLAB = 64 << 10
CONFIGURATION: dict[str, Any] = {"lending": {"ttl": 30}, "timeouts": {"heartbeat": 0.3, "silence": 5, "stop": 2}}
SOON_S = 10.0


class Cast:
    """A scheduler, and parties as a test needs them."""

    def __init__(self, folder: Path, undo: ExitStack) -> None:
        self._undo = undo
        self.scheduler = undo.enter_context(Server(CONFIGURATION, folder))
        self.endpoint = endpoint_of(self.scheduler)

    def party(self, role: str, gpu: int, **options: Any) -> PartyProcess:
        made = PartyProcess(role, self.scheduler.runtime, scheduler=self.endpoint, slab_bytes=SLAB, gpu=gpu, **options)
        self._undo.enter_context(made)
        assert made.ask("ready")
        return made

    def lender(self, gpu: int, slabs: int) -> PartyProcess:
        lender = self.party("lender", gpu)
        lender.ask("offer", size=slabs * SLAB)
        self.until_free(gpu, slabs)
        return lender

    def until_free(self, gpu: int, slabs: int) -> None:
        """The scheduler may lend so many slabs of that GPU."""

        def free() -> int:
            return sum(found["free"] for found in self.scheduler.get("/gpus").json() if found["index"] == gpu)

        until(free, (slabs * SLAB).__eq__, 20)

    def leases(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.scheduler.get("/leases").json()
        return found

    def mapping(self, method: str, producer: int, consumer: int) -> None:
        body = {"producer": producer, "consumer": consumer}
        httpx.request(method, f"{self.scheduler.url}/mapping", json=body, timeout=20).raise_for_status()


@pytest.fixture
def cast(tmp_path: Path) -> Iterator[Cast]:
    with ExitStack() as undo:
        yield Cast(tmp_path, undo)


LIAR = """
import sys
from pathlib import Path
from types import SimpleNamespace
from tests.runtime.test_lending_faults import LyingLender
place = SimpleNamespace(hub=SimpleNamespace(endpoint=sys.argv[1]), folder=Path(sys.argv[2]))
with LyingLender(place, "smaller"):
    sys.stdin.readline()
"""


def test_a_lender_that_lies_about_its_size_costs_no_byte_and_lends_no_more(cast: Cast) -> None:
    borrower = cast.party("borrower", 1)
    command = [sys.executable, "-c", LIAR, cast.endpoint, str(cast.scheduler.runtime)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT) as liar:
        try:
            cast.until_free(0, 2)
            got = borrower.ask("allocate", size=2 * SLAB, seed=1)
            assert (got["bytes"], got["where"]) == (2 * SLAB, "host")
            assert f"{SLAB // 2} bytes" in got["reason"]
            assert borrower.ask("status")["complaints"] == 1
            assert borrower.ask("intact")
            until(cast.leases, lambda leases: leases == [], 20)
            borrower.ask("release")
            assert borrower.ask("allocate", size=SLAB, seed=2)["where"] == "host"
            assert borrower.ask("status")["complaints"] == 1, "it is not asked again"
        finally:
            liar.kill()
        assert borrower.ask("intact")
    cast.lender(3, 1)
    borrower.ask("release")
    assert borrower.ask("allocate", size=SLAB, seed=3)["where"] == "peer", "everybody else goes on"


def test_a_forged_token_gets_no_descriptor_and_harms_nobody(cast: Cast) -> None:
    lender, borrower = cast.lender(0, 2), cast.party("borrower", 1)
    assert borrower.ask("allocate", size=2 * SLAB, seed=1)["where"] == "peer"
    (lease,) = until(cast.leases, lambda leases: [each["state"] for each in leases] == ["active"], 20)
    (socket,) = cast.scheduler.runtime.rglob(f"{SOCKET_PREFIX}*.sock")
    for epoch in (lease["epoch"], lease["epoch"] - 1, 0):
        with pytest.raises(HandoverFailed, match="not known here with that token"):
            asyncio.run(fetch(str(socket), Ask(lease["id"], epoch, "f" * 64), {os.getuid()}, 5.0))
    assert borrower.ask("intact")
    lender.kill()
    borrower.until("where", "host".__eq__, SOON_S)
    assert borrower.ask("intact")


def test_of_borrowers_that_race_for_the_last_slab_one_has_it_until_it_dies(cast: Cast) -> None:
    cast.lender(0, 1)
    borrowers = [cast.party("borrower", gpu) for gpu in (1, 2, 3)]
    for seed, borrower in enumerate(borrowers):
        borrower.ask("allocating", size=SLAB, seed=seed)
    for borrower in borrowers:
        borrower.until("allocated", bool)
        assert borrower.ask("intact")
    where = [borrower.ask("where") for borrower in borrowers]
    assert sorted(where) == ["host", "host", "peer"]
    (lease,) = cast.leases()
    winner = borrowers[where.index("peer")]
    assert lease["borrower"] == winner.ask("name")
    winner.kill()
    cast.until_free(0, 1)
    losers = [borrower for borrower in borrowers if borrower.alive]
    assert all(borrower.ask("intact") for borrower in losers)
    losers[0].ask("release")
    assert losers[0].ask("allocate", size=SLAB, seed=9)["where"] == "peer"


def test_a_mapping_that_is_deleted_leaves_its_leases_and_grants_no_more(cast: Cast) -> None:
    for producer in (0, 3):
        cast.mapping("POST", producer, 1)
    lender, borrower = cast.lender(0, 2), cast.party("borrower", 1)
    assert borrower.ask("allocate", size=SLAB, seed=1)["where"] == "peer"
    cast.mapping("DELETE", 0, 1)
    assert borrower.ask("intact")
    assert [lease["state"] for lease in cast.leases()] == ["active"]
    assert borrower.ask("where") == "peer"
    lender.kill()
    borrower.until("where", "host".__eq__, SOON_S)
    assert borrower.ask("intact")
    cast.lender(0, 2)
    borrower.ask("release")
    got = borrower.ask("allocate", size=SLAB, seed=2)
    assert got["where"] == "host"
    assert "borrows from its producers only (GPU 3)" in got["reason"]


def test_a_host_without_memory_keeps_a_loan_where_it_is_and_says_who_holds_it(cast: Cast) -> None:
    lender, borrower = cast.lender(0, 3), cast.party("borrower", 1, host_bytes=SLAB)
    got = borrower.ask("allocate", size=5 * SLAB, seed=1)
    assert (got["bytes"], got["where"]) == (4 * SLAB, "mixed"), "what there is: three lent slabs and one of the host"
    assert "the host has no memory left" in got["reason"]
    lender.ask("take_back", size=3 * SLAB, deadline_s=0.5)
    result = lender.until("result", lambda found: found is not None)
    assert (result["bytes"], result["missing"], result["holders"]) == (0, 3 * SLAB, [borrower.ask("name")])
    assert borrower.ask("intact")
    borrower.kill()
    lender.until("result", lambda found: found["bytes"] + found["came"] == 3 * SLAB, SOON_S)
    until(cast.leases, lambda leases: leases == [], 20)

"""Ends are noticed when they happen, long before anybody's silence would tell: real processes, real signals."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.lending_hub import until
from tests.system.lending import PartyProcess, endpoint_of
from tests.system.server import Server

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

TTL_S = 60.0
SOON_S = 10.0
SLAB = 64 << 10
CONFIGURATION: dict[str, Any] = {"lending": {"ttl": TTL_S}, "timeouts": {"heartbeat": 0.3, "silence": 5, "stop": 2}}


def test_the_memory_of_the_dead_returns_at_once_and_idle_parties_hear_of_a_schedulers_end(tmp_path: Path) -> None:
    with Server(CONFIGURATION, tmp_path) as scheduler:
        common = {"scheduler": endpoint_of(scheduler), "slab_bytes": SLAB}
        with (
            PartyProcess("lender", scheduler.runtime, gpu=0, **common) as lender,
            PartyProcess("lender", scheduler.runtime, gpu=3, **common) as other,
            PartyProcess("borrower", scheduler.runtime, gpu=1, **common) as doomed,
            PartyProcess("borrower", scheduler.runtime, gpu=2, **common) as borrower,
        ):
            for party in (lender, other, doomed, borrower):
                assert party.ask("ready")
            lender.ask("offer", size=4 * SLAB)
            until(lambda: scheduler.get("/gpus").json()[0]["free"], (4 * SLAB).__eq__)
            assert doomed.ask("allocate", size=4 * SLAB, seed=1)["where"] == "peer"

            begin = time.monotonic()
            doomed.kill()
            lender.until("status", lambda found: (found["free"], found["lent"]) == (4 * SLAB, 0), SOON_S)
            assert scheduler.get("/leases").json() == []

            until(lambda: scheduler.get("/gpus").json()[0]["free"], (4 * SLAB).__eq__)
            assert borrower.ask("allocate", size=4 * SLAB, seed=2)["where"] == "peer"
            lender.kill()
            borrower.until("where", "host".__eq__, SOON_S)
            assert borrower.ask("intact")
            assert scheduler.get("/leases").json() == []
            assert time.monotonic() - begin < TTL_S / 2

            scheduler.stop()
            for party in (other, borrower):
                party.until("status", lambda found: found["state"] == "away", SOON_S)
                assert any("the scheduler has ended" in line for line in party.log)
            assert borrower.ask("intact")

            with Server(CONFIGURATION, tmp_path, runtime=scheduler.runtime) as next_one:
                for party in (other, borrower):
                    party.until("status", lambda found: found["state"] == "attached", 30)
                assert next_one.get("/leases").json() == []


def test_an_idle_party_notices_that_the_scheduler_is_silent(tmp_path: Path) -> None:
    quick = {**CONFIGURATION, "lending": {"ttl": 2.0}}
    with Server(quick, tmp_path) as scheduler:
        with PartyProcess(
            "borrower", scheduler.runtime, gpu=1, scheduler=endpoint_of(scheduler), slab_bytes=SLAB
        ) as borrower:
            assert borrower.ask("ready")
            scheduler.process.kill()
            borrower.until("status", lambda found: found["state"] == "away", 20)
            begin = time.monotonic()
            assert borrower.ask("allocate", size=SLAB, seed=1)["where"] == "host"
            assert time.monotonic() - begin < 0.9, "the scheduler was waited for"
            scheduler.assert_nothing_left()

"""Ten thousand leases, and nothing left of them anywhere."""

import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from forebay.runtime.client import Borrower, Loan
from tests.runtime.lending_hub import until
from tests.runtime.lending_place import SLAB, threads
from tests.system.lending import PartyProcess, endpoint_of
from tests.system.server import Server

CYCLES = 10_000
WARM = 500
"""Cycles after which every cache and pool of libraries has what it will ever have."""

MOST_GROWTH = 12 << 20
"""Bytes of memory that 10,000 cycles may add to a process; a leaked slab a cycle would be 600 MiB."""


def held(pid: int) -> dict[str, int]:
    process = psutil.Process(pid)
    with process.oneshot():
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
        return {
            "descriptors": process.num_fds(),
            "slabs": maps.count("forebay-slab"),
            "threads": process.num_threads(),
            "memory": process.memory_info().rss,
        }


@pytest.mark.system
@pytest.mark.timeout(400)
def test_ten_thousand_leases_leave_everything_as_it_was(tmp_path: Path) -> None:
    configuration: dict[str, Any] = {"timeouts": {"stop": 2}}
    with Server(configuration, tmp_path) as scheduler:
        endpoint = endpoint_of(scheduler)
        lender = PartyProcess("lender", scheduler.runtime, scheduler=endpoint, slab_bytes=SLAB, gpu=0)
        with lender, Borrower(endpoint, 1, slab_bytes=SLAB) as borrower:
            assert lender.ask("ready")
            assert borrower.ready()
            lender.ask("offer", size=8 * SLAB)
            until(lambda: scheduler.get("/gpus").json()[0]["free"], (8 * SLAB).__eq__)
            processes = {"scheduler": scheduler.process.pid, "lender": lender.process.pid, "borrower": os.getpid()}

            def whole() -> Loan | None:
                """None: the lender is still zeroing what the cycles before have had."""
                loan = borrower.allocate(2 * SLAB, host=False)
                if loan.bytes == 2 * SLAB:
                    return loan
                loan.release()  # of one slab it may be
                return None

            def cycle(number: int) -> None:
                mark = number.to_bytes(8, "little")
                loan = until(whole, lambda loan: loan is not None)
                with loan:
                    assert loan.where == "peer", loan.reason
                    assert loan.read(SLAB - 4, 8) == bytes(8), "zero, whoever had it before"
                    loan.write(SLAB - 4, mark)
                    assert loan.read(SLAB - 4, 8) == mark

            for number in range(1, WARM + 1):
                cycle(number)
            before = {name: held(pid) for name, pid in processes.items()}
            for number in range(1, CYCLES + 1):
                cycle(number)
            lender.until("status", lambda found: (found["free"], found["lent"]) == (8 * SLAB, 0))
            until(lambda: scheduler.get("/leases").json(), lambda leases: leases == [])
            after = {name: held(pid) for name, pid in processes.items()}
            for name in processes:
                for what in ("descriptors", "slabs", "threads"):
                    assert after[name][what] <= before[name][what], (name, what, before[name], after[name])
                growth = after[name]["memory"] - before[name]["memory"]
                assert growth < MOST_GROWTH, (name, before[name], after[name])
    until(threads, lambda left: left == [])

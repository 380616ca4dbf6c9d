"""The kill table: lender, borrower and scheduler killed and frozen in every state of a lease, as real processes.

Whatever happens: a living borrower's data reads back bit for bit, the memory of the dead returns, a reclaim completes
or says who holds what, and in the end nothing is lent and nothing is lost. `test_lending_kills.py` runs it on the CPU,
tests/cuda/test_kill_table.py on GPUs.
"""

import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.runtime.lending_hub import until
from tests.system.lending import PartyProcess, endpoint_of
from tests.system.server import Server

STATES = ("granted", "active", "revoking", "overdue", "stranded")
VICTIMS = ("lender", "borrower", "scheduler")
FAULTS = ("kill", "freeze")

TTL_S = 2.0
SLABS = 4
CONFIGURATION: dict[str, Any] = {"lending": {"ttl": TTL_S}, "timeouts": {"heartbeat": 0.3, "silence": 5, "stop": 2}}


class Scene:
    """A scheduler, a lender on GPU 0 and a borrower on GPU 1, each a process. `devices` are the two's names of theirs,
    `slab` is a size that both can have."""

    def __init__(
        self,
        scheduler: Server,
        folder: Path,
        undo: ExitStack,
        devices: tuple[str, str] = ("cpu:0", "cpu:0"),
        slab: int = 64 << 10,
    ) -> None:
        self._folder = folder
        self._undo = undo
        self._slab = slab
        self._size = SLABS * slab
        self.scheduler = scheduler
        self.endpoint = endpoint_of(self.scheduler)
        self.lender = self._party("lender", gpu=0, device=devices[0])
        self.borrower = self._party("borrower", gpu=1, device=devices[1], handover_s=4.0)
        assert self.lender.ask("ready")
        assert self.borrower.ask("ready")
        self.taking = False
        self.lender.ask("offer", size=self._size)
        self.until_gpu(0, "free", self._size)

    def _party(self, role: str, **options: Any) -> PartyProcess:
        made = PartyProcess(role, self.scheduler.runtime, scheduler=self.endpoint, slab_bytes=self._slab, **options)
        return self._undo.enter_context(made)

    def leases(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.scheduler.get("/leases").json()
        return found

    def until_state(self, state: str) -> None:
        until(self.leases, lambda leases: [lease["state"] for lease in leases] == [state], 20)

    def until_gpu(self, gpu: int, field: str, size: int) -> None:
        def look() -> Any:
            return {found["index"]: found for found in self.scheduler.get("/gpus").json()}.get(gpu)

        until(look, lambda found: found is not None and found[field] == size, 20)

    def take_back(self, deadline_s: float) -> None:
        self.borrower.ask("hold")
        self.lender.ask("take_back", size=self._size, deadline_s=deadline_s)
        self.taking = True

    # The states ----------------------------------------------------------------------------------------------------

    def reach(self, state: str) -> None:
        if state == "granted":
            self.lender.stop()  # so that it cannot hand over anything
            self.borrower.ask("allocating", size=self._size, seed=1)
        else:
            assert self.borrower.ask("allocate", size=self._size, seed=1)["where"] == "peer"
            self.until_state("active")
        match state:
            case "revoking":
                self.take_back(60.0)
            case "overdue":
                self.take_back(0.2)
            case "stranded":
                self.borrower.ask("hold")
                self.lender.kill()
        self.until_state(state)

    # The faults ----------------------------------------------------------------------------------------------------

    def kill(self, victim: str) -> None:
        if victim != "scheduler":
            self.party_of(victim).kill()
            return
        self.scheduler.children()
        self.scheduler.process.kill()
        self.scheduler.assert_nothing_left()
        self.scheduler = self._undo.enter_context(Server(CONFIGURATION, self._folder, runtime=self.scheduler.runtime))

    def freeze(self, victim: str) -> None:
        """For longer than a lease lives without a word, then goes on."""
        if victim == "scheduler":
            self.scheduler.process.send_signal(signal.SIGSTOP)
            threading.Event().wait(1.5 * TTL_S)  # nobody is there to tell that the time has passed
            self.scheduler.process.send_signal(signal.SIGCONT)
            return
        party = self.party_of(victim)
        party.stop()
        noticed = ("stranded",) if victim == "lender" else ()
        until(self.leases, lambda leases: all(lease["state"] in noticed for lease in leases), 20)
        party.go_on()

    def party_of(self, name: str) -> PartyProcess:
        return self.lender if name == "lender" else self.borrower

    # What must be true afterwards ----------------------------------------------------------------------------------

    def settle(self, state: str) -> None:
        lender, borrower = self.lender, self.borrower
        if lender.stopped and lender.alive:
            lender.go_on()
        if borrower.alive:
            borrower.until("allocated", bool)
            assert borrower.ask("intact")
            borrower.ask("let_go")
        # Nobody waits for anything any more: what is still lent is in use.
        until(self.leases, lambda leases: all(lease["state"] == "active" for lease in leases), 30)
        if borrower.alive:
            borrower.until("intact", bool)
        taken = 0
        if lender.alive and self.taking:
            result = lender.until("result", lambda found: found is not None, 30)
            assert result["bytes"] + result["missing"] == self._size, result
            assert bool(result["missing"]) == bool(result["holders"]), result
            result = lender.until("result", lambda found: found["bytes"] + found["came"] == self._size, 30)
            taken = self._size
        if lender.alive and not borrower.alive:
            lender.until("status", lambda found: found["free"] == self._size - taken, 20)
        if borrower.alive:
            if not lender.alive or self.taking:
                borrower.until("where", "host".__eq__)
            assert borrower.ask("intact")
            borrower.ask("release")
            status = borrower.until("status", lambda found: not found["leases"])
            assert (status["peer"], status["host"]) == (0, 0)
        until(self.leases, lambda leases: leases == [], 20)
        if lender.alive:
            lender.until(
                "status", lambda found: (found["free"], found["lent"], found["cleaning"]) == (self._size - taken, 0, 0)
            )
            self.until_gpu(0, "free", self._size - taken)
            self.until_gpu(0, "lent", 0)
        if lender.alive and borrower.alive:
            # All of it still works: what is there can be lent again, and is zero.
            lender.ask("offer", size=self._size)
            self.until_gpu(0, "free", 2 * self._size - taken)
            assert borrower.ask("allocate", size=self._size, seed=2)["where"] == "peer"
            assert borrower.ask("intact")


def run(scene: Scene, state: str, victim: str, fault: str) -> None:
    """One cell of the table."""
    scene.reach(state)
    if (state, victim) != ("stranded", "lender"):  # stranded is what its death has led to
        getattr(scene, fault)(victim)
    scene.settle(state)

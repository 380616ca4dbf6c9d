"""Random kills, of anybody at any moment: 100 of them, or as many as FOREBAY_SOAK says (`make soak`: 1,000).

FOREBAY_SOAK_SEED chooses the order of events; what a signal meets still depends on the moment.
"""

import json
import os
import random
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.lending_hub import until
from tests.system.lending import PartyProcess, endpoint_of
from tests.system.server import ROOT, Server

KILLS = int(os.environ.get("FOREBAY_SOAK", "100"))
SEED = int(os.environ.get("FOREBAY_SOAK_SEED", "0"))

SLAB = 16 << 10
TTL_S = 1.5
CONFIGURATION: dict[str, Any] = {
    "lending": {"ttl": TTL_S},
    "timeouts": {"heartbeat": 0.3, "silence": 5, "stop": 2},
}
LENDERS, BORROWERS = 2, 3


class Party:
    """A process in one of the roles, and what it was told to do so far."""

    def __init__(self, process: PartyProcess, gpu: int) -> None:
        self.process = process
        self.gpu = gpu
        self.offered = 0
        self.taking = 0
        self.borrowing = False

    @property
    def hears(self) -> bool:
        return self.process.alive and not self.process.stopped


class Soak:
    def __init__(self, folder: Path, undo: ExitStack) -> None:
        self._chance = random.Random(SEED)
        self._folder = folder
        self._undo = undo
        self._seed = 0
        self.kills = 0
        self.checks = 0
        self.scheduler = undo.enter_context(Server(CONFIGURATION, folder, "--journal", str(folder / "journal")))
        self._endpoint = endpoint_of(self.scheduler)
        self._scheduler_sleeps = 0
        self.parties = [self._party("lender", gpu) for gpu in range(LENDERS)]
        self.parties += [self._party("borrower", LENDERS + gpu) for gpu in range(BORROWERS)]

    def _party(self, role: str, gpu: int) -> Party:
        more = {} if role == "lender" else {"handover_s": 0.5}
        process = PartyProcess(role, self.scheduler.runtime, scheduler=self._endpoint, slab_bytes=SLAB, gpu=gpu, **more)
        self._undo.enter_context(process)
        return Party(process, gpu)

    def step(self) -> None:
        for position, party in enumerate(self.parties):
            if party.process.stopped and self._chance.random() < 0.2:
                party.process.go_on()
            if not party.process.alive:
                self.parties[position] = self._party(party.process.role, party.gpu)
        if self._scheduler_sleeps:
            self._scheduler_sleeps -= 1
            if not self._scheduler_sleeps:
                self.scheduler.process.send_signal(signal.SIGCONT)
        for party in self._chance.sample(self.parties, len(self.parties)):
            if party.hears:
                (self._lend if party.process.role == "lender" else self._borrow)(party)
        self._harm()

    def _lend(self, lender: Party) -> None:
        if lender.offered < 8 * SLAB:
            lender.offered += lender.process.ask("offer", size=self._chance.randint(1, 8) * SLAB)
        elif not lender.taking and self._chance.random() < 0.3:
            lender.taking = self._chance.randint(1, 8) * SLAB
            lender.process.ask("take_back", size=lender.taking, deadline_s=self._chance.choice([0.0, 0.2, 1.0]))

    def _borrow(self, borrower: Party) -> None:
        if not borrower.borrowing:
            self._seed += 1
            size = self._chance.randint(1, 6) * SLAB
            assert borrower.process.ask("allocate", size=size, seed=self._seed)["bytes"] == size
            borrower.borrowing = True
            return
        assert borrower.process.ask("intact"), f"{borrower.process.log}"
        self.checks += 1
        if self._chance.random() < 0.3:
            borrower.process.ask("release")
            borrower.borrowing = False

    def _harm(self) -> None:
        self.kills += 1
        freezes = self._chance.random() < 0.4
        if self._chance.random() < 0.06 and not self._scheduler_sleeps:
            if freezes:
                self.scheduler.process.send_signal(signal.SIGSTOP)
                self._scheduler_sleeps = self._chance.randint(1, 3)
            else:
                self._start_again()
            return
        party = self._chance.choice([party for party in self.parties if party.process.alive])
        if freezes and not party.process.stopped:
            party.process.stop()
        else:
            party.process.kill()

    def _start_again(self) -> None:
        self.scheduler.children()
        self.scheduler.process.kill()
        self.scheduler.assert_nothing_left()
        arguments = ("--journal", str(self._folder / f"journal-{self.kills}"))
        self.scheduler = self._undo.enter_context(
            Server(CONFIGURATION, self._folder, *arguments, runtime=self.scheduler.runtime)
        )

    def _leases(self) -> Any:
        return self.scheduler.get("/leases").json()

    def _story(self) -> str:
        """What the parties that live said."""
        parties = (party for party in self.parties if party.process.alive)
        return "\n".join(f"{party.process.role} on GPU {party.gpu}:\n{''.join(party.process.log)}" for party in parties)

    def settle(self) -> None:
        """Everybody who lives goes on, gives everything back, and the ledger is as if nothing had happened."""
        self.scheduler.process.send_signal(signal.SIGCONT)
        living = [party for party in self.parties if party.process.alive]
        for party in living:
            party.process.go_on()
        for party in living:
            party.process.until("ready", bool)
        for borrower in (party for party in living if party.borrowing):
            assert borrower.process.ask("intact")
            borrower.process.ask("release")
            try:
                status = borrower.process.until("status", lambda found: not found["leases"])
            except AssertionError as error:
                story = json.dumps(borrower.process.ask("story"), indent=1)
                raise AssertionError(f"{error}\n{story}\nthe ledger: {self._leases()}\n{self._story()}") from None
            assert (status["peer"], status["host"]) == (0, 0)
        try:
            until(self._leases, lambda leases: leases == [], 30)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._story()}") from None
        free = dict.fromkeys(range(LENDERS + BORROWERS), 0)
        for lender in (party for party in living if party.process.role == "lender"):
            back = 0
            if lender.taking:
                result = lender.process.until("result", lambda found: found is not None)
                back = min(result["bytes"] + result["missing"], lender.offered)
                lender.process.until("result", lambda found, back=back: found["bytes"] + found["came"] == back)
            left = lender.offered - back
            whole = (left, 0, 0)
            lender.process.until(
                "status", lambda found, whole=whole: (found["free"], found["lent"], found["cleaning"]) == whole
            )
            free[lender.gpu] = left

        def at_the_scheduler() -> dict[int, tuple[int, int, int]]:
            gpus = self.scheduler.get("/gpus").json()
            return {gpu["index"]: (gpu["free"], gpu["lent"], gpu["borrowed"]) for gpu in gpus if gpu["index"] in free}

        expected = {gpu: (size, 0, 0) for gpu, size in free.items()}
        until(at_the_scheduler, lambda found: {**dict.fromkeys(free, (0, 0, 0)), **found} == expected, 30)


@pytest.mark.system
@pytest.mark.timeout(120 + 6 * KILLS)
def test_random_kills_lose_no_byte_and_no_slab(tmp_path: Path) -> None:
    with ExitStack() as undo:
        soak = Soak(tmp_path, undo)
        while soak.kills < KILLS:
            soak.step()
        soak.settle()
        assert soak.checks > KILLS // 4, "hardly anything was looked at"
        soak.scheduler.stop()
    # The last scheduler's ledger core, fed the same events, says the same again; those before it were cut off.
    journals = sorted(tmp_path.glob("journal*/*"), key=lambda path: path.stat().st_mtime)
    replayed = subprocess.run(
        [sys.executable, "-m", "runtime.journal", *map(str, journals)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr

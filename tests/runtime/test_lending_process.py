"""The lending core's place in the scheduler process: what is kept before anybody is told, and what no journal holds."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.runtime.config_schema import Configuration, HttpSection, LendingSection
from forebay.runtime.keyring import Keyring
from forebay.runtime.known_gpus import CPU_DEVICES, known_gpus
from forebay.runtime.ledger_file import LedgerFile
from forebay.runtime.lending_process import LendingProcess, ledger_path
from forebay.runtime.recording import replay
from forebay.sched.lending_events import LeaseRecord
from forebay.transport.messages import (
    PROTOCOL_VERSION,
    Answered,
    AskLending,
    Attach,
    Attached,
    Borrow,
    Granted,
    LendingStatus,
    Map,
    Refused,
    Revoke,
)

SLAB = 4096


class Log:
    """Lines, as events."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, event: str, **how: Any) -> None:
        self.lines.append(event)

    warning = error = info


class Scheduler:
    """A lending process whose hub is a list."""

    def __init__(self, folder: Path, journal: Path | None = None, **section: Any) -> None:
        self.sent: list[tuple[str, Any]] = []
        self.log = Log()
        self.configuration = Configuration(
            http=HttpSection(token="operators-own"), lending=LendingSection(ledger=str(folder / "ledger"), **section)
        )
        keyring = Keyring.of_parties(self.configuration, "house-token")
        self.process = LendingProcess(
            self.configuration, "ipc:///x.sock", journal, lambda *sent: self.sent.append(sent), self.log, keyring, "KEY"
        )

    def attach(self, name: str, gpu: int, slabs: int = 0, credential: str = "", pid: int = 7) -> Any:
        endpoint, size = ("/l", SLAB) if slabs else ("", 0)
        self.process.hear(
            name,
            Attach(
                PROTOCOL_VERSION, 1, name, gpu, pid, 0, "here", credential, endpoint, size, tuple(range(slabs)), (), ()
            ),
        )
        return self.sent[-1][1]


async def test_what_a_party_is_told_is_on_disk_by_then(tmp_path: Path) -> None:
    scheduler = Scheduler(tmp_path)
    scheduler.attach("lender", 0, 4)
    scheduler.attach("borrower", 1)
    kept: list[int] = []

    def send(peer: str, message: Any) -> None:
        if isinstance(message, Granted):
            (row,) = scheduler.process._file._database.execute("SELECT count(*) FROM kept WHERE id = 'lease/1'")
            kept.append(row[0])

    scheduler.process._send = send
    scheduler.process.hear("borrower", Borrow(1, SLAB))
    scheduler.process.close()
    assert kept == [1]
    file = LedgerFile(tmp_path / "ledger", 1)
    leases = [record for record in file.restored if isinstance(record, LeaseRecord)]
    assert [(lease.lease, lease.state) for lease in leases] == [(1, "granted")]
    file.close()


async def test_a_ledger_that_cannot_be_written_stops_nobody_and_is_written_whole_later(tmp_path: Path) -> None:
    scheduler = Scheduler(tmp_path)
    scheduler.attach("lender", 0, 4)
    scheduler.attach("borrower", 1)
    database = scheduler.process._file._database
    database.execute("PRAGMA query_only = ON")
    for number in (1, 2):
        scheduler.process.hear("borrower", Borrow(number, SLAB))
        assert isinstance(scheduler.sent[-1][1], Granted)
    assert scheduler.log.lines.count("a restart of the scheduler would rely on what parties hold") == 1
    database.execute("PRAGMA query_only = OFF")
    scheduler.process.hear("borrower", Borrow(3, SLAB))
    assert scheduler.log.lines[-1] == "the ledger is written again"
    scheduler.process.close()
    file = LedgerFile(tmp_path / "ledger", 1)
    assert sum(isinstance(record, LeaseRecord) for record in file.restored) == 3
    file.close()


async def test_a_child_that_ends_takes_its_parties_with_it(tmp_path: Path) -> None:
    scheduler = Scheduler(tmp_path)
    scheduler.attach("lender", 0, 1, pid=50)
    scheduler.attach("borrower", 1, pid=51)
    scheduler.process.hear("borrower", Borrow(1, SLAB))
    scheduler.process.on_exit(50, "was ended by SIGKILL")
    peer, message = scheduler.sent[-1]
    assert peer == "borrower"
    assert isinstance(message, Revoke)
    assert "was ended by SIGKILL" in message.reason
    assert not scheduler.process.knows("lender")
    scheduler.process.close()


async def test_time_passes_by_itself(tmp_path: Path) -> None:
    scheduler = Scheduler(tmp_path, ttl=0.2)
    told = asyncio.Event()
    scheduler.attach("borrower", 1)
    scheduler.attach("lender", 0, 1)
    scheduler.process._send = lambda peer, message: told.set() if isinstance(message, Revoke) else None
    scheduler.process.start()
    for number in range(1, 200):
        scheduler.process.hear("borrower", Borrow(number, SLAB))
        if told.is_set():
            break
        await asyncio.wait([asyncio.create_task(told.wait())], timeout=0.05)
    assert told.is_set(), "the lender was silent"
    scheduler.process.close()


async def test_no_secret_of_a_tenant_is_in_a_journal_and_only_the_front_door_speaks_for_one(tmp_path: Path) -> None:
    scheduler = Scheduler(tmp_path, tmp_path / "journal", tokens={"red": "red-token"})
    assert isinstance(scheduler.attach("a", 0, 1, "no-token-of-ours"), Refused)
    for name, credential in (("b", "red-token"), ("c", "operators-own"), ("d", "house-token")):
        assert isinstance(scheduler.attach(name, 0, 1, credential), Attached), credential
    scheduler.process.wish("door-1-abcd", Map(3, 0, 1))
    assert isinstance(scheduler.sent[-1][1], Answered)
    assert scheduler.sent[-1][1].outcome == "forbidden"
    scheduler.process.wish("door-1-abcd-KEY", AskLending(4, "red"))
    assert isinstance(scheduler.sent[-1][1], LendingStatus)
    scheduler.process.close()
    (journal,) = (tmp_path / "journal").iterdir()
    content = journal.read_bytes()
    assert not [token for token in (b"red-token", b"operators-own", b"house-token") if token in content]
    assert replay(journal).name == "lending"


async def test_a_restart_goes_on_where_it_was_and_its_journal_replays(tmp_path: Path) -> None:
    for count in range(3):
        scheduler = Scheduler(tmp_path, tmp_path / f"journal-{count}")
        scheduler.attach("lender", 0, 4)
        scheduler.process.wish("door", Map(1, count, 5))
        scheduler.process.close()
        (journal,) = (tmp_path / f"journal-{count}").iterdir()
        assert replay(journal).note == ""
    scheduler = Scheduler(tmp_path)
    scheduler.process.wish("door", AskLending(2, ""))
    status = scheduler.sent[-1][1]
    assert status.mapping == ((0, 5), (1, 5), (2, 5))
    scheduler.process.close()


def test_where_the_ledger_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert ledger_path("", "ipc:///run/forebay/scheduler.sock", False) == Path("/run/forebay/scheduler.ledger")
    assert ledger_path("/mine", "ipc:///run/x", True) == Path("/mine")
    assert ledger_path("", "ipc:///mnt/all/hub.sock", True) == tmp_path / "forebay" / "ipc-mnt-all-hub.ledger"
    assert ledger_path("", "tcp://127.0.0.1:5555", False) == tmp_path / "forebay" / "tcp-127.0.0.1-5555.ledger"


def test_gpus_are_known_by_their_numbers_before_anybody_starts() -> None:
    named = {gpu.index: gpu.name for gpu in known_gpus(["cpu:1", "cuda:0", "cpu:7"])}
    assert named.keys() >= {0, 1, 7}
    assert len(known_gpus([])) == CPU_DEVICES or not known_gpus([])[0].name.startswith("cpu:")


def test_messages_with_credentials_reach_the_core_hashed(tmp_path: Path) -> None:
    keyring = Keyring({"red": "0" * 64})
    assert keyring.tenant("x") is None
    assert Keyring(msgspec.json.decode(keyring.variable["FOREBAY_TENANTS"])).digests == keyring.digests

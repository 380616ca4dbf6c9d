"""The ledger's file: what was written is there for the next process, whatever became of the last one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forebay.runtime.ledger_file import LedgerFile
from forebay.sched.lending_events import CountRecord, Forget, Keep, LeaseRecord, PairRecord


def lease(number: int, state: str = "active") -> LeaseRecord:
    return LeaseRecord(number, 1, "t", "lender", 0, "", "borrower", 1, "", (3, 4), 4096, "/l", state, ((3, 7.5),))


def test_the_next_process_finds_what_was_kept(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    file = LedgerFile(path, 100)
    assert (file.restored, file.epoch, file.damage) == ((), 100, "")
    file.write([Keep(lease(2)), Keep(PairRecord(0, 1)), Keep(CountRecord(3)), Keep(lease(10))])
    file.write([Keep(lease(2, "revoking")), Forget("pair/0/1"), Forget("lease/99"), Keep(PairRecord(1, 0))])
    file.close()
    again = LedgerFile(path, 50)
    assert again.restored == (CountRecord(3), PairRecord(1, 0), lease(2, "revoking"), lease(10))
    assert again.epoch == 101, "a clock that went back makes no old epoch"
    again.rewrite([lease(7)])
    again.close()
    third = LedgerFile(path, 500)
    assert (third.restored, third.epoch) == ((lease(7),), 500)
    third.close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_leases_end_with_the_boot_and_the_mapping_does_not(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    file = LedgerFile(path, 100, boot="one")
    file.write([Keep(lease(2)), Keep(PairRecord(0, 1)), Keep(CountRecord(3))])
    file.close()
    for _ in range(2):
        file = LedgerFile(path, 100, boot="two")
        assert file.restored == (CountRecord(3), PairRecord(0, 1))
        file.close()


CHILD = """
import os, sys
from pathlib import Path
from forebay.runtime.ledger_file import LedgerFile
from forebay.sched.lending_events import CountRecord, Keep
file = LedgerFile(Path(sys.argv[1]), 1)
number = 0
while True:
    number += 1
    file.write([Keep(CountRecord(number))])
    os.write(1, number.to_bytes(8, "little"))
"""


def test_a_process_that_is_killed_at_any_moment_has_written_what_it_told(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            for _ in range(50):
                told = int.from_bytes(child.stdout.read(8), "little")
            child.send_signal(signal.SIGKILL)
            while rest := child.stdout.read(8):
                told = int.from_bytes(rest, "little") if len(rest) == 8 else told
        file = LedgerFile(path, 1)
        (count,) = file.restored
        assert isinstance(count, CountRecord)
        assert count.next_lease in (told, told + 1)
        file.close()


@pytest.mark.parametrize(
    "content", [b"not a database, but long enough to be one" * 100, b"SQLite format 3\0" + b"x" * 4000]
)
def test_a_damaged_file_is_moved_aside_and_said(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(content)
    file = LedgerFile(path, 9)
    assert file.restored == ()
    assert "moved to ledger.damaged" in file.damage
    file.write([Keep(lease(1))])
    file.close()
    assert (tmp_path / "ledger.damaged").read_bytes() == content
    file = LedgerFile(path, 9)
    assert file.restored == (lease(1),)
    file.close()


def test_where_there_can_be_no_file_it_says_so(tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "ledger", tmp_path):
        with pytest.raises(OSError, match=r"the ledger cannot be kept in '.*(No such file|Is a directory)"):
            LedgerFile(path, 1)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a file of another user")
def test_another_users_file_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.touch()
    os.chown(path, 65534, 65534)
    with pytest.raises(OSError, match="belongs to user 65534"):
        LedgerFile(path, 1)


def test_two_processes_do_not_share_one(tmp_path: Path) -> None:
    first = LedgerFile(tmp_path / "ledger", 1)
    with pytest.raises(OSError, match="locked"):
        LedgerFile(tmp_path / "ledger", 1)
    first.close()


def test_a_full_disk_raises_and_what_was_there_stays() -> None:
    if not os.path.exists("/dev/shm"):
        pytest.skip("no memory file system")
    file = LedgerFile(None, 1)
    file.write([Keep(lease(1))])
    file._database.execute("PRAGMA max_page_count = 4")
    with pytest.raises(OSError, match="cannot be written: database or disk is full"):
        file.write([Keep(lease(number)) for number in range(2, 2000)])
    file.write([Keep(lease(1, "revoking"))])
    assert len(file._database.execute("SELECT id FROM kept").fetchall()) == 1
    file.close()


def test_a_grant_is_written_well_within_its_time(tmp_path: Path) -> None:
    file = LedgerFile(tmp_path / "ledger", 1)
    taken = []
    for number in range(300):
        begun = time.perf_counter()
        file.write([Keep(CountRecord(number)), Keep(lease(number))])
        taken.append(time.perf_counter() - begun)
    file.close()
    assert sorted(taken)[150] < 0.002, "half a millisecond of the five that a decision may take, with room"

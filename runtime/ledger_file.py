"""What the lending core keeps, on disk: if a scheduler is killed, the next one finds there all that anybody was told.

SQLite with a write-ahead log that is not forced to the disk: what was committed survives the death of this process, and
no more is needed. What the records tell of is memory, and where it is on loan: none of it outlives the machine's boot,
so a ledger of an earlier boot is emptied of its leases. (The mapping is kept: people made it.)
"""

import contextlib
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path

import msgspec

from forebay.sched.lending_events import Forget, Keep, LeaseRecord, Record
from forebay.transport.messages import PROTOCOL_VERSION

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


class LedgerFile:
    """One file for one scheduler at a time. Without a path it lives in this process's memory, and ends with it.

    `restored` are the records of an earlier process, `epoch` is higher than the one of any of them; `damage` says what
    was wrong with a file that could not be used and was moved aside. Raises OSError where there can be no file."""

    def __init__(self, path: Path | None, seconds: int, boot: str | None = None) -> None:
        """`seconds`: since 1970. They make the first epoch, so that it is a higher one even if the file was lost."""
        self.damage = ""
        boot = BOOT_ID.read_text(encoding="ascii").strip() if boot is None else boot
        try:
            self._open(path, seconds, boot)
        except (sqlite3.DatabaseError, msgspec.DecodeError, ValueError) as error:
            if path is None or isinstance(error, sqlite3.OperationalError):
                self.close()
                raise OSError(f"the ledger cannot be kept in {str(path)!r}: {error}") from error
            self.close()
            aside = path.with_name(f"{path.name}.damaged")
            self.damage = f"{path} is no ledger of this version ({error}); it was moved to {aside.name}"
            path.replace(aside)
            for suffix in ("-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            self._open(path, seconds, boot)

    def _open(self, path: Path | None, seconds: int, boot: str) -> None:
        if path is not None:
            _make_ours(path)
        self._database = sqlite3.connect(path or ":memory:", isolation_level=None, timeout=0.3)
        execute = self._database.execute
        # One process at a time, which then needs no shared memory beside the file.
        execute("PRAGMA locking_mode = EXCLUSIVE")
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = OFF")
        execute("BEGIN EXCLUSIVE")
        execute("CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID")
        execute("CREATE TABLE IF NOT EXISTS kept (id TEXT PRIMARY KEY, record BLOB) WITHOUT ROWID")
        about = dict(execute("SELECT name, value FROM about"))
        version = about.get("protocol", str(PROTOCOL_VERSION))
        if version != str(PROTOCOL_VERSION):
            raise ValueError(f"it is of protocol {version}, this is {PROTOCOL_VERSION}")
        self.epoch = max(int(about.get("epoch", 0)) + 1, seconds)
        records = [_decoder.decode(record) for (record,) in execute("SELECT record FROM kept")]
        if about.get("boot", boot) != boot:
            records = [record for record in records if not isinstance(record, LeaseRecord)]
            execute("DELETE FROM kept WHERE id GLOB 'lease/*'")
        self.restored = tuple(sorted(records, key=_order))
        for name, value in (("boot", boot), ("epoch", str(self.epoch)), ("protocol", str(PROTOCOL_VERSION))):
            execute("INSERT OR REPLACE INTO about VALUES (?, ?)", (name, value))
        execute("COMMIT")

    def write(self, changes: Iterable[Keep | Forget]) -> None:
        """All of them or none. Raises OSError (the disk is full, say)."""
        self._write(changes, False)

    def rewrite(self, records: Iterable[Record]) -> None:
        """These in place of all that was kept. Raises OSError."""
        self._write(map(Keep, records), True)

    def _write(self, changes: Iterable[Keep | Forget], anew: bool) -> None:
        execute = self._database.execute
        try:
            execute("BEGIN")
            if anew:
                execute("DELETE FROM kept")
            for change in changes:
                if isinstance(change, Keep):
                    execute("INSERT OR REPLACE INTO kept VALUES (?, ?)", (change.record.id, _encode(change.record)))
                else:
                    execute("DELETE FROM kept WHERE id = ?", (change.id,))
            execute("COMMIT")
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):
                execute("ROLLBACK")
            raise OSError(f"the ledger cannot be written: {error}") from error

    def close(self) -> None:
        if hasattr(self, "_database"):
            self._database.close()


def _make_ours(path: Path) -> None:
    """Secrets of leases are in it: a file that is ours, for nobody else to read. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise OSError(f"the ledger cannot be kept in {str(path)!r}: {error.strerror}") from error
    try:
        if (owner := os.fstat(descriptor).st_uid) != os.getuid():
            raise OSError(f"the ledger cannot be kept in {str(path)!r}: the file belongs to user {owner}; remove it")
        os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)


def _order(record: Record) -> tuple[bool, int]:
    """Leases last, by their numbers: the order in which a core is to learn of them is always the same."""
    return (True, record.lease) if isinstance(record, LeaseRecord) else (False, 0)

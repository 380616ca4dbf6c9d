"""The journal of a core: what entered it, when, and a digest of what it decided. Replaying one must reach the same
commands, for a core has no clock and no chance in it.

A file holds records: a header, then by turns an event (both msgpack) and the digest of its commands, each with a head.
The head is a mark, the length, its complement, and the CRC-32 of all values up to and with this one: nothing can be
changed, dropped, doubled or swapped unseen. Only the end may be missing, as after a kill.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Generic, NamedTuple, Protocol, TypeVar
from zlib import crc32

import msgspec

from forebay.sched.blocks import BlockPool
from forebay.sched.central import CentralCore
from forebay.sched.central_events import CentralEvent, CentralSettings
from forebay.sched.cost_table import CostRow
from forebay.sched.fairness import make_fairness
from forebay.sched.lane import LaneCore
from forebay.sched.lane_events import LaneEvent
from forebay.sched.lending import LendingCore
from forebay.sched.lending_events import LendingEvent, LendingSettings
from forebay.sched.partition import make_partition
from forebay.sched.policy import POLICIES
from forebay.sched.spill import SpillSpace
from forebay.transport.messages import PROTOCOL_VERSION, Message, Targets

Event = TypeVar("Event", contravariant=True)
Command = TypeVar("Command", bound=Message, covariant=True)

_HEAD = struct.Struct("<2sIII")
_MARK = b"\xf0J"
_ALL_BITS = 0xFFFFFFFF
_BAD_VALUE = (msgspec.DecodeError, ValueError, RecursionError)
_encode = msgspec.msgpack.Encoder().encode


class LaneSettings(msgspec.Struct, frozen=True, tag=True):
    """How a lane core was made. `arena_slots` is how many slabs the spill arena has addresses for, of which the first
    `host_slots` are host memory; `weights` are those of tenants, 1 where none is given; `weights_memory`
    bounds the bytes of models' weights that are there at once (0: all are); `costs` is all of the cost file; `reserve`
    bytes of the device are left free (0: nobody looks)."""

    slabs: int
    slab_bytes: int
    policy: str
    prefix_cache: bool
    fairness: str = "fcfs"
    arena_slots: int = 0
    host_slots: int = 0
    lend: bool = False
    weights: dict[str, float] = {}
    weights_memory: int = 0
    partition: str = "none"
    targets: dict[str, Targets] = {}
    costs: tuple[CostRow, ...] = ()
    reserve: int = 0


class CentralHeader(msgspec.Struct, frozen=True, tag=True):
    settings: CentralSettings


class LendingHeader(msgspec.Struct, frozen=True, tag=True):
    settings: LendingSettings


class Header(msgspec.Struct, frozen=True):
    """First value of a file. `name` says whose core it was."""

    version: int
    name: str
    core: LaneSettings | CentralHeader | LendingHeader


class JournalError(ValueError):
    """The file is no journal, it is damaged, or replaying it led elsewhere. Names the file, and where."""


class Replayed(NamedTuple):
    """Whose core it was, how many events were replayed, and what is to say of the journal's end (nothing, if it is
    whole)."""

    name: str
    events: int
    note: str


MOST_SLABS = 1 << 20
"""A header that names more is none of ours."""


class Core(Protocol[Event, Command]):
    def handle(self, now: float, event: Event) -> Sequence[Command]: ...


def prepare_folder(folder: Path) -> None:
    """Makes a folder for journals. Raises OSError that names it where no file could be made in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"journals cannot be written to {str(folder)!r}: {error.strerror}; name a folder") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OSError(f"journals cannot be written to {str(folder)!r}: user {os.getuid()} may not make files there")


class Recorder(Generic[Event, Command]):
    """A core that writes down what enters it, to a new file in `folder` that carries the core's name and this process's
    id. Without a folder it only hands on. Raises OSError where no file can be made."""

    def __init__(self, core: Core[Event, Command], header: Header, folder: Path | None) -> None:
        self._core = core
        self._file: BinaryIO | None = None
        self._checksum = 0
        self.path: Path | None = None
        if folder is not None:
            prepare_folder(folder)
            self.path, self._file = _new_file(folder, header.name)
            self._write(_encode(header))
            self._file.flush()

    def handle(self, now: float, event: Event) -> Sequence[Command]:
        if self._file is None:
            return self._core.handle(now, event)
        # The event is written before it is handled: what brings a core down is then in its journal.
        self._write(_encode((now, event)))
        commands = self._core.handle(now, event)
        self._write(digest(commands))
        return commands

    def flush(self) -> None:
        """To the operating system, so that a process that is killed later loses nothing of it."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, value: bytes) -> None:
        assert self._file is not None
        self._checksum = crc32(value, self._checksum)
        self._file.write(_HEAD.pack(_MARK, len(value), len(value) ^ _ALL_BITS, self._checksum))
        self._file.write(value)


def _new_file(folder: Path, name: str) -> tuple[Path, BinaryIO]:
    """In a container every restart may have the same process id: no journal takes the place of another."""
    stem = name.replace(":", "-")
    process = f"-{os.getpid()}"
    if not stem.endswith(process):
        stem += process
    number = 1
    while True:
        path = folder / (f"{stem}.journal" if number == 1 else f"{stem}-{number}.journal")
        try:
            # Prompts are in a journal, and secrets of leases: it is its owner's.
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            return path, os.fdopen(descriptor, "wb")
        except FileExistsError:
            number += 1


def digest(commands: Any) -> bytes:
    return blake2b(_encode(commands), digest_size=8).digest()


def make_lane_core(settings: LaneSettings) -> LaneCore:
    """Raises ValueError for settings that no core can have."""
    pool = BlockPool(settings.slabs, settings.slab_bytes)
    space = SpillSpace(settings.arena_slots, settings.host_slots, settings.slab_bytes)
    fairness = make_fairness(settings.fairness, settings.weights)
    return LaneCore(
        pool,
        POLICIES[settings.policy](),
        settings.prefix_cache,
        fairness,
        space,
        settings.lend,
        make_partition(settings.partition, settings.targets, settings.costs),
        weights_memory=settings.weights_memory,
        reserve=settings.reserve,
    )


def replay(path: Path) -> Replayed:
    """Feeds a journal's events to a fresh core. The last event is replayed, too, if its commands were not recorded: the
    core raised, or the process was killed. Raises OSError, JournalError."""
    with path.open("rb") as file:
        records = _Records(file, path)
        name, core, event_type = _open(path, next(records.values, None))
        decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(tuple.__class_getitem__((float, event_type)))
        events = 0
        for offset, record in records.values:
            try:
                now, event = decoder.decode(record)
            except _BAD_VALUE as error:
                raise JournalError(f"{path}: the record at byte {offset} is no event of {name!r}: {error}") from error
            recorded = next(records.values, None)
            events += 1
            what = f"event {events}, {type(event).__name__} at {now:.6f} s, in the record at byte {offset}"
            try:
                commands = core.handle(now, event)
            except Exception as error:  # whatever it is, it is the result
                raised = f"raises {type(error).__name__}: {error}"
                if recorded is None:
                    return Replayed(name, events, f"the commands of {what}, were not recorded: the core {raised}")
                raise JournalError(f"{path}: {what}: the core {raised}; when it was recorded it did not") from error
            if recorded is None:
                return Replayed(
                    name, events, f"the commands of {what}, were not recorded; the core does not raise there"
                )
            if digest(commands) != recorded[1]:
                raise JournalError(f"{path}: {what}, led to other commands than were recorded; now: {commands}")
        return Replayed(name, events, "the last record was cut off" if records.cut_off else "")


def _open(path: Path, first: tuple[int, bytes] | None) -> tuple[str, Core[Any, Message], Any]:
    """The name, the core as it was made, and the type of its events."""
    if first is None:
        raise JournalError(f"{path} is no journal of this program: it ends within its first record")
    try:
        header = msgspec.msgpack.decode(first[1], type=Header)
    except _BAD_VALUE as error:
        raise JournalError(f"{path} is no journal of this program: its header cannot be read: {error}") from error
    if header.version != PROTOCOL_VERSION:
        raise JournalError(f"{path} was recorded under protocol {header.version}, this is {PROTOCOL_VERSION}")
    settings = header.core
    if isinstance(settings, CentralHeader):
        return header.name, CentralCore(settings.settings), CentralEvent
    if isinstance(settings, LendingHeader):
        return header.name, LendingCore(settings.settings), LendingEvent
    if settings.policy not in POLICIES:
        raise JournalError(f"{path}: its policy {settings.policy!r} is unknown (known: {', '.join(POLICIES)})")
    if not 0 <= settings.arena_slots <= MOST_SLABS:
        raise JournalError(f"{path}: its arena has {settings.arena_slots} slots; an arena has 0 to {MOST_SLABS}")
    if not 0 < settings.slabs <= MOST_SLABS:
        raise JournalError(f"{path}: its pool has {settings.slabs} slabs; a pool has 1 to {MOST_SLABS}")
    try:
        return header.name, make_lane_core(settings), LaneEvent
    except ValueError as error:
        raise JournalError(f"{path}: its core cannot be made: {error}") from error


class _Records:
    """The records of a file, checked: `values` yields (offset, value), `cut_off` tells whether the last one was."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.cut_off = False
        self.values = self._read(file, path)

    def _read(self, file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
        offset = checksum = 0
        size = os.fstat(file.fileno()).st_size
        while head := file.read(_HEAD.size):
            if not _is_head(head):
                what = "the file is no journal of this program" if offset == 0 else "the file is damaged"
                raise JournalError(f"{path}: {what}: at byte {offset} no record begins")
            length = _HEAD.unpack(head)[1] if len(head) == _HEAD.size else 0
            if len(head) < _HEAD.size or length > size - offset - _HEAD.size:
                self.cut_off = True
                return
            value = file.read(length)
            checksum = crc32(value, checksum)
            if checksum != _HEAD.unpack(head)[3]:
                raise JournalError(f"{path}: the file is damaged: the record at byte {offset} is not what was written")
            yield offset, value
            offset += _HEAD.size + length


def _is_head(head: bytes) -> bool:
    """Whether this is the beginning of a head, or a whole one; its checksum is not looked at."""
    length, complement = head[2:6], head[6:10]
    return _MARK.startswith(head[:2]) and all(a ^ b == 0xFF for a, b in zip(length, complement, strict=False))

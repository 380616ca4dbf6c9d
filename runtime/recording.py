"""The journal of a core: what entered it, when, and a digest of what it decided. Replaying one must reach the same
commands, for a core has no clock and no chance in it.

A file holds a header and records, each a msgpack value behind its length (uint32, little-endian).
"""

import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Generic, Protocol, TypeVar

import msgspec

from forebay.sched.blocks import BlockPool
from forebay.sched.central import CentralCore
from forebay.sched.central_events import CentralEvent, CentralSettings
from forebay.sched.lane import LaneCore
from forebay.sched.lane_events import LaneEvent
from forebay.sched.policy import POLICIES
from forebay.transport.messages import PROTOCOL_VERSION, Message

Event = TypeVar("Event", contravariant=True)
Command = TypeVar("Command", bound=Message, covariant=True)

_LENGTH = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode


class LaneSettings(msgspec.Struct, frozen=True, tag=True):
    """How a lane core was made."""

    slabs: int
    slab_bytes: int
    policy: str
    prefix_cache: bool


class CentralHeader(msgspec.Struct, frozen=True, tag=True):
    settings: CentralSettings


class Header(msgspec.Struct, frozen=True):
    """First value of a file. `name` says whose core it was."""

    version: int
    name: str
    core: LaneSettings | CentralHeader


class JournalError(ValueError):
    """The file is no journal, or replaying it led elsewhere."""


class Core(Protocol[Event, Command]):
    def handle(self, now: float, event: Event) -> Sequence[Command]: ...


class Recorder(Generic[Event, Command]):
    """A core that writes down what enters it. Without a path it only hands on."""

    def __init__(self, core: Core[Event, Command], header: Header, folder: Path | None) -> None:
        self._core = core
        self._file: BinaryIO | None = None
        self.path: Path | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.path = folder / f"{header.name.replace(':', '-')}.journal"
            self._file = self.path.open("wb")
            self._write(_encode(header))

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
        self._file.write(_LENGTH.pack(len(value)))
        self._file.write(value)


def digest(commands: Any) -> bytes:
    return blake2b(_encode(commands), digest_size=8).digest()


def make_lane_core(settings: LaneSettings) -> LaneCore:
    pool = BlockPool(settings.slabs, settings.slab_bytes)
    return LaneCore(pool, POLICIES[settings.policy](), settings.prefix_cache)


def replay(path: Path) -> tuple[str, int, bool]:
    """(whose core, events replayed, whether the last record was cut off, as after a kill). Raises JournalError."""
    with path.open("rb") as file:
        values = _values(file)
        try:
            header = msgspec.msgpack.decode(next(values, b""), type=Header)
        except msgspec.DecodeError as error:
            raise JournalError(f"{path} is no journal of this program: {error}") from error
        if header.version != PROTOCOL_VERSION:
            raise JournalError(f"{path} was recorded under protocol {header.version}, this is {PROTOCOL_VERSION}")
        core: Core[Any, Message]
        event_type: Any
        if isinstance(header.core, CentralHeader):
            core, event_type = CentralCore(header.core.settings), CentralEvent
        else:
            core, event_type = make_lane_core(header.core), LaneEvent
        decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(tuple.__class_getitem__((float, event_type)))
        count = 0
        for record in values:
            now, event = decoder.decode(record)
            expected = next(values, None)
            if expected is None:
                return header.name, count, True
            commands = core.handle(now, event)
            count += 1
            if digest(commands) != expected:
                raise JournalError(
                    f"{path}: event {count} ({type(event).__name__} at {now:.6f}) led to other commands than were "
                    f"recorded; now: {commands}"
                )
        return header.name, count, False


def _values(file: BinaryIO) -> Iterator[bytes]:
    """The values of a file, up to a last one that was cut off."""
    while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
        (length,) = _LENGTH.unpack(head)
        value = file.read(length)
        if len(value) < length:
            return
        yield value

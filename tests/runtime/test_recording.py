"""Journals: a whole one replays to the same commands, a cut one says so, and no damage goes unseen."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.runtime import journal
from forebay.runtime.recording import (
    CentralHeader,
    Header,
    JournalError,
    LaneSettings,
    Recorder,
    make_lane_core,
    replay,
)
from forebay.sched.central import CentralCore
from forebay.sched.central_events import CentralCommand, CentralEvent, CentralSettings, PeerGone, Received, Tick
from forebay.sched.lane_events import LaneCommand, LaneEvent, ModelOpened
from forebay.transport.messages import PROTOCOL_VERSION, Join, Sampling, Start

SETTINGS = CentralSettings()
LANE = LaneSettings(4, 1 << 16, "adbs", True)
EVENTS: tuple[CentralEvent, ...] = (
    Tick(),
    Received("worker", Join(PROTOCOL_VERSION, 1, "cpu:0", 7, "here")),
    PeerGone("worker", "its process was ended by SIGKILL"),
)
LANE_EVENTS: tuple[LaneEvent, ...] = (
    ModelOpened("llm", 4096, 4, 64),
    Start(1, 0, "llm", b"\x01\x00\x00\x00", 1, Sampling(40), "ipc:///sink"),
)
HEAD_BYTES = 14


class Raising:
    """A core that breaks at its last event."""

    def __init__(self, core: CentralCore) -> None:
        self._core = core

    def handle(self, now: float, event: CentralEvent) -> Sequence[CentralCommand]:
        if isinstance(event, PeerGone):
            raise RuntimeError("broken")
        return self._core.handle(now, event)


def record_central(folder: Path, name: str = "central") -> Path:
    core: Recorder[CentralEvent, CentralCommand] = Recorder(
        CentralCore(SETTINGS), Header(PROTOCOL_VERSION, name, CentralHeader(SETTINGS)), folder
    )
    for index, event in enumerate(EVENTS):
        core.handle(index / 4, event)
    core.close()
    assert core.path is not None
    return core.path


def record_lane(folder: Path, settings: LaneSettings = LANE, name: str = "lane-cpu:0") -> Path:
    """The header says `settings`, whatever they are; the core is a sound one."""
    core: Recorder[LaneEvent, LaneCommand] = Recorder(
        make_lane_core(LANE), Header(PROTOCOL_VERSION, name, settings), folder
    )
    for event in LANE_EVENTS:
        core.handle(0.0, event)
    core.close()
    assert core.path is not None
    return core.path


def records(content: bytes) -> list[bytes]:
    """The records of a journal, heads included."""
    found = []
    while content:
        length = HEAD_BYTES + int.from_bytes(content[2:6], "little")
        found.append(content[:length])
        content = content[length:]
    return found


@pytest.mark.parametrize(
    ("record", "events"), [(record_central, len(EVENTS)), (record_lane, len(LANE_EVENTS))], ids=["central", "lane"]
)
def test_a_whole_journal_replays(
    tmp_path: Path, record: Callable[[Path], Path], events: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = record(tmp_path)
    assert replay(path)[1:] == (events, "")
    assert journal.main([str(path)]) == 0
    assert capsys.readouterr().out.endswith(f"{events} events, the same commands\n")


@pytest.mark.parametrize("flipped", [0x01, 0xFF])
@pytest.mark.parametrize("record", [record_central, record_lane], ids=["central", "lane"])
def test_no_changed_byte_passes(tmp_path: Path, record: Callable[[Path], Path], flipped: int) -> None:
    path = record(tmp_path)
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= flipped
        path.write_bytes(damaged)
        with pytest.raises(JournalError, match=r"byte \d+"):
            replay(path)


@pytest.mark.parametrize("record", [record_central, record_lane], ids=["central", "lane"])
def test_a_cut_at_any_byte_loses_the_end_alone_and_is_told(tmp_path: Path, record: Callable[[Path], Path]) -> None:
    path = record(tmp_path)
    whole = path.read_bytes()
    sizes = [len(part) for part in records(whole)]
    ends = [sum(sizes[: count + 1]) for count in range(len(sizes))]
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        if length < ends[0]:
            with pytest.raises(JournalError, match="is no journal of this program: it ends within its first record"):
                replay(path)
            continue
        complete = sum(end <= length for end in ends) - 1
        result = replay(path)
        assert result.events == -(-complete // 2), length
        if complete % 2:
            assert "were not recorded; the core does not raise there" in result.note
        else:
            assert result.note == ("" if length in ends else "the last record was cut off")


def drop(index: int) -> Callable[[bytes], bytes]:
    return lambda content: b"".join(part for n, part in enumerate(records(content)) if n != index)


def swap(content: bytes) -> bytes:
    header, first, first_digest, *rest = records(content)
    return b"".join([header, *rest[:2], first, first_digest, *rest[2:]])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda whole: b"", "is no journal of this program"),
        (lambda whole: b"PK\x03\x04 something else entirely", "no journal of this program: at byte 0"),
        (lambda whole: b"\x00" * 4096, "no journal of this program: at byte 0"),
        (lambda whole: whole + b"garbage", r"damaged: at byte \d+ no record begins"),
        (lambda whole: whole + b"\x00", r"damaged: at byte \d+ no record begins"),
        (lambda whole: whole + whole, r"damaged: the record at byte \d+ is not what was written"),
        (lambda whole: whole + records(whole)[-1], r"damaged: the record at byte \d+ is not what was written"),
        (lambda whole: whole[:-3] + whole, r"damaged: the record at byte \d+ is not what was written"),
        (lambda whole: whole[5:], "no journal of this program: at byte 0"),
        (drop(0), "is not what was written"),
        (drop(1), "is not what was written"),
        (drop(2), "is not what was written"),
        (swap, "is not what was written"),
    ],
)
def test_what_is_no_journal_or_a_damaged_one_is_told_in_one_line(
    tmp_path: Path, damage: Callable[[bytes], bytes], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = record_central(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(JournalError, match=words):
        replay(path)
    assert journal.main([str(path)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.count(str(path)) == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"slabs": 0}, "0 slabs"),
        ({"slabs": -1}, "-1 slabs"),
        ({"slabs": 1 << 60}, "slabs; a pool has 1 to"),
        ({"slab_bytes": 0}, "its core cannot be made"),
        ({"policy": "random"}, "policy 'random' is unknown .known: adbs, "),
        ({"slabs": "four"}, "its header cannot be read"),
        ({"slabs": 1, "slab_bytes": 2048}, "event 1, ModelOpened .* the core raises ValueError"),
    ],
)
def test_a_header_that_no_core_can_be_made_of_is_told(tmp_path: Path, settings: Any, words: str) -> None:
    path = record_lane(tmp_path, msgspec.structs.replace(LANE, **settings))
    with pytest.raises(JournalError, match=words):
        replay(path)
    assert journal.main([str(path)]) == 1


def test_another_cores_events_are_told(tmp_path: Path) -> None:
    core: Recorder[Any, Any] = Recorder(
        make_lane_core(LANE), Header(PROTOCOL_VERSION, "central", CentralHeader(SETTINGS)), tmp_path
    )
    core.handle(0.0, LANE_EVENTS[0])
    core.close()
    assert core.path is not None
    with pytest.raises(JournalError, match=r"the record at byte \d+ is no event of 'central'"):
        replay(core.path)


def test_a_journal_that_led_elsewhere_is_told(tmp_path: Path) -> None:
    path = record_lane(tmp_path, msgspec.structs.replace(LANE, slabs=1, slab_bytes=4096))
    with pytest.raises(
        JournalError, match=r"event 2, Start at 0\.0+ s, in the record at byte .* led to other commands"
    ):
        replay(path)


def test_the_event_at_which_the_core_raised_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = Header(PROTOCOL_VERSION, "central", CentralHeader(SETTINGS))
    core: Recorder[CentralEvent, CentralCommand] = Recorder(Raising(CentralCore(SETTINGS)), header, tmp_path)
    core.handle(0.0, EVENTS[0])
    with pytest.raises(RuntimeError):
        core.handle(1.0, EVENTS[2])
    core.close()
    assert core.path is not None
    result = replay(core.path)
    assert result.events == 2
    assert "event 2, PeerGone at 1.000000 s" in result.note
    assert result.note.endswith("were not recorded; the core does not raise there")

    monkeypatch.setattr("forebay.runtime.recording.CentralCore", lambda settings: Raising(CentralCore(settings)))
    result = replay(core.path)
    assert result.note.endswith("were not recorded: the core raises RuntimeError: broken")
    assert journal.main([str(core.path)]) == 0

    whole = record_central(tmp_path / "whole")
    with pytest.raises(JournalError, match=r"event 3, .* the core raises RuntimeError: broken; when it was recorded"):
        replay(whole)


def test_no_journal_takes_the_place_of_another(tmp_path: Path) -> None:
    """Also where a restart has the same process id, as in a container."""
    pid = os.getpid()
    first = record_central(tmp_path)
    before = first.read_bytes()
    names = [path.name for path in (first, record_central(tmp_path), record_central(tmp_path))]
    assert names == [f"central-{pid}.journal", f"central-{pid}-2.journal", f"central-{pid}-3.journal"]
    assert record_lane(tmp_path).name == f"lane-cpu-0-{pid}.journal"
    assert record_lane(tmp_path / "named", name=f"lane-cpu:0-{pid}").name == f"lane-cpu-0-{pid}.journal"
    assert first.read_bytes() == before
    assert replay(first).name == "central"


def test_a_journal_can_be_read_from_its_first_moment(tmp_path: Path) -> None:
    core: Recorder[CentralEvent, CentralCommand] = Recorder(
        CentralCore(SETTINGS), Header(PROTOCOL_VERSION, "central", CentralHeader(SETTINGS)), tmp_path
    )
    assert core.path is not None
    assert replay(core.path) == ("central", 0, "")
    core.close()


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/forebay"])
def test_a_place_where_no_journal_can_be_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="journals cannot be written to"):
        record_central(tmp_path / place)

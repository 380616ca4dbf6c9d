"""What people see of a running measurement."""

import io
import re

import pytest

from forebay.bench.progress import ProgressDisplay


class Terminal(io.StringIO):
    """Keeps what a terminal of 80 columns would be sent."""

    def isatty(self) -> bool:
        return True

    def last_screen(self, lines: int) -> list[str]:
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.getvalue()).replace("\r", "\n")
        return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def test_an_activity_that_is_over_is_whole_and_its_clock_stands_still(terminal: Terminal) -> None:
    clock = Clock()
    with ProgressDisplay(terminal, clock) as progress:
        progress.start("server", None)
        progress.update(0, "loading models")
        clock.now += 12
        progress.update(1, "ready at http://127.0.0.1:40001 after 12.0 s", last=True)
        progress.start("replay", 76)
        progress.update(30, "41/76 sent, 11 running, 30 done, 0 failed")
        clock.now += 61
        progress.update(76, "76/76 sent, 0 running, 76 done, 0 failed", last=True)
        clock.now += 100
    server, replay = terminal.last_screen(2)
    assert re.fullmatch(r"server ━{12} +0:00:12 ready at http://127\.0\.0\.1:40001 after 12\.0 s", server)
    assert re.fullmatch(r"replay ━{12} 76/76 0:01:01 76/76 sent, 0 running, 76 done, 0 failed", replay)
    assert "?" not in terminal.getvalue().replace("\x1b[?", ""), "of an unknown number of parts none is told"


def test_an_activity_that_was_broken_off_stays_where_it_was(terminal: Terminal) -> None:
    clock = Clock()
    with ProgressDisplay(terminal, clock) as progress:
        progress.start("baseline", 12)
        progress.update(3, "3/12 lone requests (llm-0)")
        clock.now += 7
        progress.start("server", None)
        progress.update(0, "stopping")
        clock.now += 5
    baseline, server = terminal.last_screen(2)
    assert "3/12 0:00:07" in baseline
    assert "━" * 12 not in baseline
    assert "0:00:05 stopping" in server


def test_long_details_are_folded_not_cut(terminal: Terminal) -> None:
    detail = "43 of 80 requests: as many as 2 devices can do one after the other in 75 s, by their measured speed"
    with ProgressDisplay(terminal) as progress:
        progress.start("workload", None)
        progress.update(1, detail, last=True)
    assert "…" not in terminal.getvalue()
    lines = [line[25:].strip() for line in terminal.last_screen(3)]
    assert "".join(lines).replace(" ", "").endswith(detail.replace(" ", ""))


def test_plain_lines_come_now_and_then_and_always_at_the_end() -> None:
    clock, stream = Clock(), io.StringIO()
    with ProgressDisplay(stream, clock) as progress:
        progress.start("replay", 9)
        for done in range(1, 10):
            progress.update(done, f"{done}/9", last=done == 9)
            clock.now += 1
    assert stream.getvalue().splitlines() == ["replay: 1/9", "replay: 6/9", "replay: 9/9"]

"""Who is started again and who is given up, with real processes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from forebay.runtime import supervisor
from forebay.runtime.child import EXIT_UNUSABLE
from forebay.runtime.supervisor import UNUSABLE, Child, Supervisor
from forebay.sched.backoff import LONGEST_S, LONGEST_UNUSABLE_S
from tests.runtime import supervised
from tests.runtime.lending_hub import until

MODULE = "tests.runtime.supervised"


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def _keep(self, event: str, **fields: object) -> None:
        self.lines.append((event, str(fields["child"])))

    info = warning = error = _keep


class Watched:
    """A supervisor whose children are watched, with pauses that are noted and cut short."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.log = Log()
        self.exits: list[tuple[str, str]] = []
        self.hopeless: list[str] = []
        self.pauses: list[tuple[int, float]] = []
        monkeypatch.setattr(supervisor, "restart_delay", self._pause)
        self.supervisor = Supervisor(self.log, self._exited, self.hopeless.append)

    def _pause(self, deaths: int, longest_s: float) -> float:
        self.pauses.append((deaths, longest_s))
        return 0.01

    def _exited(self, child: Child, pid: int, reason: str) -> None:
        self.exits.append((child.name, reason))

    def file(self, name: str) -> Path:
        return self.folder / name

    def pids(self, name: str) -> list[int]:
        """Of the instances that worked, in order."""
        return [int(line) for line in self.file(name).read_text().split()] if self.file(name).exists() else []

    async def until(self, condition: Callable[[], bool]) -> None:
        await asyncio.to_thread(until, condition, bool, 40)

    async def start(self, name: str, there: bool = True) -> Child:
        """Adds a child; gives it once it works, if it does."""
        if there:
            self.file(name).touch()
        self.supervisor.add(name, MODULE, [str(self.file(name))])
        if not there:
            return self.supervisor._children[name]
        await self.until(lambda: bool(self.pids(name)))
        child = self.supervisor.by_pid(self.pids(name)[-1])
        assert child is not None
        child.ready()
        return child


@pytest.fixture
async def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    found = Watched(tmp_path, monkeypatch)
    yield found
    await found.supervisor.stop(lambda: None, 0.1)


def test_the_status_is_the_one_that_children_use() -> None:
    assert supervised.EXIT_UNUSABLE == EXIT_UNUSABLE


async def test_what_never_worked_is_given_up_at_once(watched: Watched) -> None:
    await watched.start("wrong", there=False)
    await watched.until(lambda: bool(watched.hopeless))
    assert watched.hopeless == [
        "wrong exited with status 78 (it cannot work as configured); its last log lines above say more"
    ]
    assert watched.exits == [("wrong", "exited with status 78")]


async def test_what_joined_but_never_worked_is_given_up_too(watched: Watched) -> None:
    child = await watched.start("wrong")
    watched.file("wrong").unlink()
    assert child.pid is not None
    watched.supervisor.kill(child.pid)
    await watched.until(lambda: bool(watched.hopeless))
    assert watched.pauses == [(1, LONGEST_S)]


async def test_what_has_worked_is_tried_until_it_works_again_and_nobody_else_notices(watched: Watched) -> None:
    child, other = await watched.start("gpu"), await watched.start("other")
    child.works()
    for episode in (1, 2):
        watched.file("gpu").unlink()
        assert child.pid is not None
        before = len(watched.exits)
        watched.supervisor.kill(child.pid)
        await watched.until(lambda before=before: len(watched.exits) >= before + 4)
        assert [reason for _, reason in watched.exits[before : before + 3]] == [
            "was ended by SIGKILL", "exited with status 78", "exited with status 78",
        ]  # fmt: skip
        watched.file("gpu").touch()
        await watched.until(lambda: watched.pids("gpu")[-1:] == [child.pid])
        child.ready()
        child.works()
        assert watched.log.lines.count((UNUSABLE, "gpu")) == episode, "said once an episode"
    assert watched.hopeless == []
    assert watched.pids("other") == [other.pid]
    kinds = {longest for _, longest in watched.pauses}
    assert kinds == {LONGEST_S, LONGEST_UNUSABLE_S}
    deaths = [number for number, _ in watched.pauses]
    assert deaths == list(range(1, len(deaths) + 1)), "pauses grow until it has been well for a while"

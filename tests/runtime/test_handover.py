"""How descriptors change hands, and who gets none."""

import asyncio
import os
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from forebay.gpu.memory import Slab
from forebay.runtime import handover
from forebay.runtime.fetching import fetch
from forebay.runtime.handover import HandoverServer, socket_path
from forebay.runtime.lending_errors import HandoverFailed
from forebay.transport.messages.handover import LONGEST_ASK, Ask
from tests.runtime.lending_hub import short_folder

SLAB = 4096
OURS = {os.getuid()}


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Desk:
    """A server with one lease: number 7, epoch 3, token "secret"."""

    def __init__(self, folder: Path, slabs: int, uids: set[int]) -> None:
        self.reports: list[str] = []
        self.slabs = [Slab(SLAB) for _ in range(slabs)]
        self.server = HandoverServer(socket_path(folder), 0o600, uids, self.reports.append)
        self.path = self.server.endpoint

    def admit(self) -> None:
        self.server.admit(7, 3, "secret", {10 + n: slab.fileno() for n, slab in enumerate(self.slabs)})

    async def ask(
        self, lease: int = 7, epoch: int = 3, token: str = "secret", timeout_s: float = 5.0
    ) -> dict[int, int]:
        return await fetch(self.path, Ask(lease, epoch, token), OURS, timeout_s)

    async def close(self) -> None:
        await self.server.aclose()
        for slab in self.slabs:
            slab.close()


@pytest.fixture
async def desk(request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    before = descriptors()
    folder = short_folder()
    made = Desk(folder, getattr(request, "param", 3), OURS)
    yield made
    await made.close()
    assert not list(folder.iterdir())
    folder.rmdir()
    assert descriptors() == before


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "ASK_S", 0.3)
    monkeypatch.setattr(handover, "UNKNOWN_WAIT_S", 0.2)


def give_back(got: dict[int, int]) -> None:
    for descriptor in got.values():
        os.close(descriptor)


@pytest.mark.parametrize("desk", [1, 253, 254, 400], indirect=True)
async def test_all_slabs_of_a_lease_arrive_however_many(desk: Desk) -> None:
    desk.admit()
    for n, slab in enumerate(desk.slabs):
        os.pwrite(slab.fileno(), n.to_bytes(4, "little"), 0)
    got = await desk.ask()
    try:
        assert sorted(got) == [10 + n for n in range(len(desk.slabs))]
        for number, descriptor in got.items():
            assert int.from_bytes(os.pread(descriptor, 4, 0), "little") == number - 10
            assert not os.get_inheritable(descriptor)
    finally:
        give_back(got)


async def test_only_the_owner_may_look_at_the_socket(desk: Desk) -> None:
    assert stat.S_IMODE(os.stat(desk.path).st_mode) == 0o600


async def test_a_borrower_that_comes_before_the_schedulers_word_waits_for_it(desk: Desk) -> None:
    asking = asyncio.create_task(desk.ask())
    while not desk.server._callers:  # noqa: ASYNC110
        await asyncio.sleep(0)
    desk.admit()
    give_back(await asking)


async def test_a_forged_token_an_old_epoch_and_an_unknown_lease_get_nothing(desk: Desk) -> None:
    desk.admit()
    wrong = [
        desk.ask(token="forged"),
        desk.ask(token=""),
        desk.ask(token="sécret"),
        desk.ask(epoch=2),
        desk.ask(lease=8),
    ]
    for outcome in await asyncio.gather(*wrong, return_exceptions=True):
        assert isinstance(outcome, HandoverFailed), outcome
        assert outcome.lender_fault
        assert "is not known here with that token" in str(outcome)
    assert len(desk.reports) == len(wrong)


async def test_what_came_back_is_not_handed_over_again(desk: Desk) -> None:
    desk.admit()
    desk.server.withdraw(7, [11])
    got = await desk.ask()
    assert sorted(got) == [10, 12]
    give_back(got)
    assert desk.server.fetched_by(7) == OURS
    desk.server.withdraw(7, [10, 12])
    assert desk.server.fetched_by(7) == set()
    with pytest.raises(HandoverFailed):
        await desk.ask()


def connect(path: str) -> socket.socket:
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    caller.connect(path)
    return caller


async def test_callers_that_say_nothing_or_garbage_are_rid_of_and_do_not_keep_others_waiting(desk: Desk) -> None:
    desk.admit()
    silent = [connect(desk.path) for _ in range(20)]
    garbage = [connect(desk.path) for _ in range(2)]
    garbage[0].send(b"\xc1garbage")
    garbage[1].send(bytes(LONGEST_ASK + 1))
    give_back(await desk.ask(timeout_s=handover.ASK_S))
    while desk.server._callers:
        await asyncio.wait(set(desk.server._callers), timeout=10)
    for caller in (*silent, *garbage):
        caller.settimeout(10)
        try:
            answer = caller.recv(1000)
        except ConnectionResetError:
            answer = b""
        assert answer == b"" or b"more than 4096 bytes" in answer
        caller.close()
    assert sum("silent for too long" in report for report in desk.reports) == 20


async def test_there_is_a_bound_to_callers_and_the_next_gets_its_turn_when_they_are_gone(desk: Desk) -> None:
    desk.admit()
    crowd = [connect(desk.path) for _ in range(handover.MOST_CALLERS)]
    while len(desk.server._callers) < handover.MOST_CALLERS:  # noqa: ASYNC110
        await asyncio.sleep(0)
    late = connect(desk.path)
    late.settimeout(10)
    assert b"callers are being served" in await asyncio.to_thread(late.recv, 1000)
    late.close()
    asking = asyncio.create_task(desk.ask())
    for caller in crowd:
        caller.close()
    give_back(await asking)


CALLER = """
import asyncio, os, sys
from forebay.runtime.fetching import fetch
from forebay.runtime.lending_errors import HandoverFailed
from forebay.transport.messages.handover import Ask
os.setgid(65534); os.setuid(65534)
try:
    print(len(asyncio.run(fetch(sys.argv[1], Ask(7, 3, "secret"), {0, 65534}, 5.0))))
except HandoverFailed as error:
    print(error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("allowed", [False, True])
async def test_another_user_gets_something_only_where_it_is_allowed_to(allowed: bool) -> None:
    folder = short_folder()
    folder.chmod(0o755)
    desk = Desk(folder, 2, OURS | ({65534} if allowed else set()))
    desk.admit()
    os.chmod(desk.path, 0o666)
    try:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CALLER, desk.path), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err = await asyncio.wait_for(child.communicate(), 30)
        said = out.decode()
        if allowed:
            assert said.strip() == "2", (said, err)
            assert desk.server.fetched_by(7) == {65534}
        else:
            assert "user 65534 may not borrow here (allowed: 0)" in said, (said, err)
            assert desk.server.fetched_by(7) == set()
    finally:
        await desk.close()
        folder.rmdir()


async def test_a_lender_that_never_answers_is_waited_for_no_longer_than_told() -> None:
    folder = short_folder()
    before = descriptors()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as frozen:
        frozen.bind(str(folder / "lender"))
        frozen.listen(1)
        with pytest.raises(HandoverFailed, match=r"did not hand over anything within 0\.2 s"):
            await fetch(str(folder / "lender"), Ask(1, 1, ""), OURS, 0.2)
        idle = [connect(str(folder / "lender"))]  # its queue is full now
        with pytest.raises(HandoverFailed, match=r"within 0\.1 s"):
            await fetch(str(folder / "lender"), Ask(1, 1, ""), OURS, 0.1)
        for caller in idle:
            caller.close()
    assert descriptors() == before
    with pytest.raises(HandoverFailed, match="cannot be asked: Connection refused"):
        await fetch(str(folder / "lender"), Ask(1, 1, ""), OURS, 0.2)
    (folder / "lender").unlink()
    with pytest.raises(HandoverFailed, match="cannot be asked: No such file"):
        await fetch(str(folder / "lender"), Ask(1, 1, ""), OURS, 0.2)
    folder.rmdir()


@pytest.mark.parametrize(
    ("packet", "count", "problem"),
    [
        (handover._encode(handover.Handed((1, 2), 0)), 1, "sent 1 descriptors and named slabs"),
        (handover._encode(handover.Handed((1, 1), 0)), 2, "sent 2 descriptors and named slabs"),
        (handover._encode(handover.Handed((), 5)), 0, "sent 0 descriptors and named slabs"),
        (handover._encode(handover.Denied("no")), 1, "sent 1 descriptors and named slabs"),
        (handover._encode(handover.Denied("no")), 0, "refused: no"),
        (b"\xc1", 3, "does not speak the protocol"),
        (b"", 0, "hung up"),
    ],
)
async def test_a_lender_that_breaks_the_protocol_is_found_out_and_nothing_leaks(
    packet: bytes, count: int, problem: str
) -> None:
    folder = short_folder()
    path = str(folder / "lender")
    before = descriptors()

    def lie() -> None:
        connection, _ = listener.accept()
        with connection, Slab(SLAB) as slab:
            connection.recv(10_000)
            if packet:
                socket.send_fds(connection, [packet], [slab.fileno()] * count)

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(1)
        lying = asyncio.create_task(asyncio.to_thread(lie))
        with pytest.raises(HandoverFailed, match=problem):
            await fetch(path, Ask(1, 1, ""), OURS, 5.0)
        await lying
    assert descriptors() == before
    os.unlink(path)
    folder.rmdir()


FEW = """
import asyncio, resource, sys
from forebay.runtime.fetching import fetch
from forebay.runtime.lending_errors import HandoverFailed
from forebay.transport.messages.handover import Ask
resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
try:
    asyncio.run(fetch(sys.argv[1], Ask(7, 3, "secret"), {int(sys.argv[2])}, 5.0))
except HandoverFailed as error:
    print(error, error.lender_fault)
"""


@pytest.mark.parametrize("desk", [40], indirect=True)
async def test_a_borrower_out_of_descriptors_does_not_blame_the_lender(desk: Desk) -> None:
    desk.admit()
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", FEW, desk.path, str(os.getuid())), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await asyncio.wait_for(child.communicate(), 30)
    assert out.decode().strip() == "this process has no room for more open files (ulimit -n) False", err


async def test_sockets_that_killed_lenders_left_are_removed_and_those_of_living_ones_stay(desk: Desk) -> None:
    folder = Path(desk.path).parent
    stale = folder / "lend-1-dead.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(stale))
    assert socket_path(folder).parent == folder
    assert not stale.exists()
    assert os.path.basename(desk.path) in os.listdir(folder)

"""Processes of other users at a hub: locked out unless they are allowed, and known for what they are by the kernel's
word. Needs root, to become somebody else."""

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from forebay.transport.codec import read_to_scheduler
from forebay.transport.messages import Heartbeat, Query, ToScheduler
from forebay.transport.zeromq import ZmqHub, ZmqLink

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")

NOBODY = 65534
PATIENCE_S = 20.0

CHILD = """
import os, sys, zmq
from forebay.transport.codec import encode
from forebay.transport.messages import Heartbeat
endpoint, name = sys.argv[1:]
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
socket = zmq.Context().socket(zmq.DEALER)
socket.setsockopt(zmq.ROUTING_ID, name.encode())
socket.setsockopt(zmq.LINGER, 0)
socket.connect(endpoint)
socket.send(encode([Heartbeat()]))
sys.exit(0 if socket.poll(int(sys.stdin.readline())) else 3)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that everybody can enter; pytest's own is ours alone."""
    made = Path(tempfile.mkdtemp(prefix="fb-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


class Hub:
    """A hub that answers everybody."""

    def __init__(self, folder: Path, uids: tuple[int, ...]) -> None:
        self.heard: asyncio.Queue[tuple[str, bool]] = asyncio.Queue()
        self.hub: ZmqHub[Query, ToScheduler] = ZmqHub(
            f"ipc://{folder}/hub", read_to_scheduler(), self._hear, lambda peer, error: None, uids
        )

    def _hear(self, peer: str, messages: list[ToScheduler]) -> None:
        self.heard.put_nowait((peer, self.hub.foreign))
        self.hub.send(peer, Query(1))


@pytest.fixture
async def link(folder: Path) -> AsyncIterator[ZmqLink[ToScheduler, Query]]:
    link: ZmqLink[ToScheduler, Query] = ZmqLink(
        f"ipc://{folder}/hub", "mine", read_to_scheduler(), lambda messages: None, lambda peer, error: None
    )  # type: ignore[arg-type]
    yield link
    link.close()


async def foreigner(folder: Path, name: str, patience_ms: int) -> int:
    """What becomes of a process of nobody's that speaks up: 0 if it was answered, 3 if not."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, f"ipc://{folder}/hub", name, stdin=asyncio.subprocess.PIPE
    )
    await asyncio.wait_for(child.communicate(f"{patience_ms}\n".encode()), PATIENCE_S * 2)
    assert child.returncode is not None
    return child.returncode


async def test_another_user_is_locked_out(folder: Path, link: ZmqLink[ToScheduler, Query]) -> None:
    hub = Hub(folder, ())
    (folder / "hub").chmod(0o666)  # even if the file's mode let it in
    assert await foreigner(folder, "theirs", 300) == 3
    link.send(Heartbeat())
    assert await asyncio.wait_for(hub.heard.get(), PATIENCE_S) == ("mine", False)
    assert hub.heard.empty()
    hub.hub.close()


async def test_an_allowed_user_is_foreign(folder: Path, link: ZmqLink[ToScheduler, Query]) -> None:
    hub = Hub(folder, (NOBODY,))
    link.send(Heartbeat())
    assert await asyncio.wait_for(hub.heard.get(), PATIENCE_S) == ("mine", False)
    assert await foreigner(folder, "theirs", 20_000) == 0
    assert hub.heard.get_nowait() == ("theirs", True)
    # Nobody takes the place of another's link.
    assert await foreigner(folder, "mine", 300) == 3
    link.send(Heartbeat())
    assert await asyncio.wait_for(hub.heard.get(), PATIENCE_S) == ("mine", False)
    assert hub.heard.empty()
    hub.hub.close()

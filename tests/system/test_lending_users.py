"""Processes of another user at a real scheduler: they may lend and borrow where the configuration says so, and nothing
else. Needs root, to become somebody else."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.server import Server

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user"),
]

NOBODY = 65534

CHILD = """
import os, sys, zmq
from forebay.transport.codec import encode, read_to_party
from forebay.transport.messages import Attach, Attached, Heartbeat, Join, Open, PROTOCOL_VERSION
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
socket = zmq.Context().socket(zmq.DEALER)
socket.setsockopt(zmq.ROUTING_ID, b"theirs")
socket.setsockopt(zmq.LINGER, 0)
socket.connect(sys.argv[1])
# Neither is answered, nor does it make a front door or a worker of this process.
socket.send(encode([Open(PROTOCOL_VERSION, 1, 1, "ipc:///x", "http://x"), Join(PROTOCOL_VERSION, 1, "cpu:9", 1, "h")]))
story = PROTOCOL_VERSION, 1, "nobody", 1, 1, 65534, "here", "", "/x", 4096, (0, 1), (), ()
socket.send(encode([Attach(*story)]))
if not socket.poll(20_000):
    sys.exit(3)
answers = read_to_party()(socket.recv())
sys.exit(0 if [type(answer) for answer in answers] == [Attached] else 4)
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that everybody can enter; pytest's own are ours alone."""
    folder = Path(tempfile.mkdtemp(prefix="fb-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_another_user_lends_where_it_may_and_serves_nothing(tmp_path: Path, shared: Path) -> None:
    configuration = {"endpoint": f"ipc://{shared}/hub.sock", "lending": {"uids": [NOBODY]}}
    with Server(configuration, tmp_path, ready=False) as server:
        server.until("the scheduler listens")
        server.start(configuration)
        child = subprocess.run([sys.executable, "-c", CHILD, configuration["endpoint"]], timeout=60, check=False)
        assert child.returncode == 0
        assert {gpu["index"]: gpu["free"] for gpu in server.get("/gpus").json()}[1] == 8192
        assert server.workers() == []
        assert [path.name for path in shared.iterdir() if path.suffix == ".ledger"] == []
        assert server.stop() == 0
        server.assert_nothing_left()

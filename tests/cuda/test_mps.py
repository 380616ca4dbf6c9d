"""A real MPS daemon of an ordinary user: processes share the GPU through it, each within its percentage."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from forebay.runtime import mps
from forebay.runtime.mps import MpsError
from tests.cuda.mps_processes import end_all

if not torch.cuda.is_available() or shutil.which(mps.CONTROL) is None:
    pytest.skip("there is no CUDA device, or no MPS", allow_module_level=True)

pytestmark = [pytest.mark.timeout(200)]

CLIENT = """
import torch, time
a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
for _ in range(3):
    a @ a
torch.cuda.synchronize()
begin = time.perf_counter()
for _ in range(200):
    a @ a
torch.cuda.synchronize()
print(2 * 4096**3 * 200 / (time.perf_counter() - begin) / 1e12)
"""


def client(folder: Path, percentage: int) -> float:
    """TFLOP/s of a process under the daemon."""
    environment = {**os.environ, **mps.environment(folder, percentage)}
    ended = subprocess.run(
        [sys.executable, "-c", CLIENT], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 0, ended.stderr + mps._log(folder)
    return float(ended.stdout)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fb-mps-") as name:  # pytest's own are too long for a socket's address
        place = Path(name)
        yield place
        end_all(place)


def test_a_percentage_bounds_a_process(folder: Path) -> None:
    pid = mps.start(folder)
    print(f"\ndaemon {pid}: {sorted(path.name for path in (folder / 'pipe').iterdir())}")
    assert mps.running(folder) == pid
    rates = {percentage: client(folder, percentage) for percentage in (100, 50, 25)}
    print(f"TFLOP/s by percentage: {rates}")
    assert rates[100] > 1.3 * rates[50] > 1.3 * 1.3 * rates[25]
    with pytest.raises(MpsError, match="already"):
        mps.start(folder)
    assert mps.stop(folder) == pid
    assert mps.running(folder) is None


def test_a_daemon_that_died_is_found_dead_and_replaced(folder: Path) -> None:
    pid = mps.start(folder)
    client(folder, 100)
    servers = mps.servers(folder)
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while mps.running(folder) is not None:
        assert time.monotonic() < deadline, f"process {pid} lives on after SIGKILL"
        os.sched_yield()
    orphans = mps.servers(folder)
    print(f"\na dead daemon leaves: {sorted(path.name for path in (folder / 'pipe').iterdir())}")
    print(f"its servers were {servers}, now {orphans}")
    if orphans:
        with pytest.raises(MpsError, match="its servers live on"):
            mps.start(folder)
        with pytest.raises(MpsError, match="was dead; what it left was removed"):
            mps.stop(folder)
        assert mps.servers(folder) == []
    assert mps.start(folder) != pid
    assert client(folder, 100) > 0


OPEN = """
from forebay.gpu.device import open_device
from forebay.gpu.errors import DeviceError
from forebay.transport.messages import DeviceSettings
try:
    open_device("cuda:0", DeviceSettings(1 << 28, 1 << 25)).close()
except DeviceError as error:
    print(f"refused: {error}")
else:
    print("opened, without MPS")
"""


@pytest.mark.parametrize("stale", [False, True])
def test_what_cuda_says_to_a_client_without_a_daemon(folder: Path, stale: bool) -> None:
    """Whatever it is (printed), it is said in order: a worker asks for the daemon first (mps.require)."""
    (folder / "pipe").mkdir()
    if stale:
        os.kill(mps.start(folder), signal.SIGKILL)
    environment = {**os.environ, **mps.environment(folder)}
    ended = subprocess.run(
        [sys.executable, "-c", OPEN], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    print(f"\nstale pipes: {stale}: {ended.stdout}{ended.stderr[-2000:]}")
    assert ended.stdout.startswith(("refused: cuda:0 cannot be opened: ", "opened")), ended.stdout + ended.stderr

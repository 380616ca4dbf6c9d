"""Another process takes a GPU's memory: the pool gives slabs back to the GPU while it serves, and has them again after.

python -m pytest -q -s tests/cuda/test_neighbour.py
"""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.cuda.test_lost_workers import Answers, configured
from tests.system.server import Server
from tests.system.test_neighbour import TAKEN

pytestmark = [pytest.mark.system, pytest.mark.model, pytest.mark.timeout(300)]

HOG = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
taken = torch.empty(free - (1 << 30), dtype=torch.uint8, device="cuda")
print("taken", taken.numel(), flush=True)
sys.stdin.read()
"""


def free() -> str:
    return f"{torch.cuda.mem_get_info()[0] / 2**30:.2f} GiB free"


def test_a_neighbour_gets_memory_from_the_pool_while_it_serves(smollm2: Path, tmp_path: Path) -> None:
    raw = configured(smollm2, memory="8GiB", reserve="3GiB")
    with Server(raw, tmp_path) as server, ThreadPoolExecutor(16) as pool:
        print(f"\nserving: {free()}")
        answers = Answers(server, pool)
        answers.until_all_decode()
        with subprocess.Popen([sys.executable, "-c", HOG], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as hog:
            assert hog.stdout is not None
            print(f"the neighbour: {hog.stdout.readline()!r}, {free()}")
            said = server.until(TAKEN)
            deadline = time.monotonic() + 20
            while (given := server.workers()[0]["given"]) < 1 << 30:
                assert time.monotonic() < deadline, f"{given} bytes given\n{server.log}"
                time.sleep(0.1)
            print(f"{said}\ngiven {given / 2**30:.2f} GiB, {free()}")
            answers.check()
            more = Answers(server, pool)
            more.check()
            hog.communicate(timeout=30)
        began = time.monotonic()
        server.until(lambda line: "is there again" in line["event"])
        print(f"the neighbour is gone: all is back after {time.monotonic() - began:.1f} s, {free()}")
        assert server.workers()[0]["given"] == 0
        last = Answers(server, pool)
        last.check()
        assert server.stop() == 0, server.log
        server.assert_nothing_left()

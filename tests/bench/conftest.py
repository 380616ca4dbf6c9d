"""Servers to replay against, and workloads to replay."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from forebay.bench.workload_file import Workload, WorkloadInfo, WorkloadRequest

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def running_server() -> Iterator[str]:
    """The base URL of a server process of its own, ended on the way out."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.server"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    with running_server() as url:
        yield url


@pytest.fixture
def mortal_server() -> Iterator[str]:
    """A server that a test may kill."""
    with running_server() as url:
        yield url


RequestRow = tuple[str, float, int, int]
"""(model, arrival in s, prompt tokens, output tokens)"""


@pytest.fixture
def make_workload() -> Callable[[Sequence[RequestRow]], Workload]:
    def make(rows: Sequence[RequestRow]) -> Workload:
        return Workload(
            WorkloadInfo(),
            [arrival for _, arrival, _, _ in rows],
            [
                WorkloadRequest(model, index, (list(range(100, 100 + prompt)), prompt, output))
                for index, (model, _, prompt, output) in enumerate(rows)
            ],
        )

    return make

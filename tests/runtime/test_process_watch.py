"""The end of a process is told at once, whoever had started it."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from forebay.runtime.process_watch import ProcessWatch, pid_namespace

PROGRAM = [sys.executable, "-c", "input()"]


@contextmanager
def process() -> "Iterator[subprocess.Popen[bytes]]":
    with subprocess.Popen(PROGRAM, stdin=subprocess.PIPE) as made:
        try:
            yield made
        finally:
            made.kill()


async def test_an_end_is_told_once_and_nothing_is_left() -> None:
    ended: asyncio.Queue[str] = asyncio.Queue()
    before = len(os.listdir("/proc/self/fd"))
    watch = ProcessWatch(ended.put_nowait)
    with process() as one, process() as two:
        assert watch.watch("one", one.pid)
        assert watch.watch("one", one.pid), "again, as at another Attach"
        assert watch.watch("link of one", one.pid)
        assert watch.watch("two", two.pid)
        assert watch.watch("forgotten", one.pid)
        watch.forget("forgotten")
        one.kill()
        async with asyncio.timeout(20):
            assert {await ended.get(), await ended.get()} == {"one", "link of one"}
        one.wait()
        assert not watch.watch("one", one.pid), "there is no such process any more"
        watch.keep_only("nobody".__eq__)
    assert ended.empty()
    watch.close()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_number_that_cannot_be_is_not_watched() -> None:
    watch = ProcessWatch(lambda name: None)
    for pid in (0, -1, 1 << 40, 1 << 80):
        assert not watch.watch("x", pid)
    watch.close()


def test_processes_of_one_host_have_the_same_numbers() -> None:
    code = "from forebay.runtime.process_watch import pid_namespace; print(pid_namespace())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert pid_namespace()
    assert other.stdout.strip() == pid_namespace()

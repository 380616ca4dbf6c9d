"""Replays on a machine that misbehaves: a clock that jumps, too few descriptors, a workload as large as memory."""

import ast
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from forebay.bench.baseline import Baseline, ModelBaseline, write_baseline
from forebay.bench.client import CompletionClient, Outcome
from forebay.bench.workload_file import Workload, write_workload
from tests.bench.conftest import ROOT, RequestRow

Make = Callable[[Sequence[RequestRow]], Workload]

JUMPING_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
/* The wall clock is an hour further on, then a day back, each time that it is looked at. */
static time_t jump(void) { static int looks; return looks++ % 2 ? -86400 : 3600 * (time_t)looks; }
int clock_gettime(clockid_t clock, struct timespec *out) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, out);
    if (clock == CLOCK_REALTIME) out->tv_sec += jump();
    return status;
}
int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    struct timespec now;
    int status = clock_gettime(CLOCK_REALTIME, &now);
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return status;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
"""


def replay(url: str, folder: Path, workload: Workload, prefix: Sequence[str] = (), **environment: str) -> "Replayed":
    """Replays in a process of its own, with a known baseline."""
    write_workload(folder / "workload.json", workload)
    write_baseline(folder / "known.json", Baseline({name: ModelBaseline(10.0, 0.0, 0.0) for name in workload.models}))
    files = ["--baseline", str(folder / "known.json"), "--output", str(folder / "report.json")]
    return subprocess.run(
        [*prefix, sys.executable, "-m", "bench.replay", str(folder / "workload.json"), "--base-url", url, *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, **environment},
    )


Replayed = subprocess.CompletedProcess[str]


def test_a_wall_clock_that_jumps_changes_nothing(server: str, make_workload: Make, tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to make a wall clock that jumps")
    source, library = tmp_path / "clock.c", tmp_path / "clock.so"
    source.write_text(JUMPING_CLOCK)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, timeout=50)
    looks = "import time; a, b, c = time.time(), time.time(), time.time(); print(abs(b - a) > 80000 < abs(c - b))"
    shown = subprocess.run(
        [sys.executable, "-c", looks],
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
        env={**os.environ, "LD_PRELOAD": str(library)},
    )
    assert shown.stdout == "True\n"
    rows = [("steady", 0.1 * index, 3, 4) for index in range(6)]
    done = replay(server, tmp_path, make_workload(rows), LD_PRELOAD=str(library))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["total"]["completed"] == 6
    assert 0.5 <= report["duration_s"] < 20
    for key in ("ttft_s", "tpot_s", "latency_s", "send_delay_s"):
        assert 0 <= report["total"][key]["p50"] <= report["total"][key]["p99"] < 20


def test_nothing_is_timed_by_the_wall_clock() -> None:
    for path in sorted((ROOT / "bench").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                name = ast.unparse(node)
                assert name not in ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow"), f"{path}: {name}"
            if isinstance(node, ast.ImportFrom):
                assert node.module != "time", f"{path}: import time as a whole, so that this test sees which clock"


@pytest.mark.system
def test_more_requests_than_descriptors_are_refused_before_any_is_sent(
    server: str, make_workload: Make, tmp_path: Path
) -> None:
    workload = make_workload([("steady", 0, 3, 2)] * 100)
    few = replay(server, tmp_path, workload, ["sh", "-c", 'ulimit -n 128 && exec "$@"', "sh"])
    assert few.returncode == 1
    assert "100 requests may be in flight at once and need 164 descriptors, the hard limit is 128" in few.stderr
    assert "--max-requests 64" in few.stderr
    assert not (tmp_path / "report.json").exists()
    # A soft limit is raised.
    soft = replay(server, tmp_path, workload, ["sh", "-c", 'ulimit -Sn 64 && exec "$@"', "sh"])
    assert soft.returncode == 0, soft.stderr
    assert json.loads((tmp_path / "report.json").read_text())["total"]["completed"] == 100


async def test_running_out_of_descriptors_is_no_fault_of_the_server(server: str) -> None:
    """However the limit was passed: the request fails by its own kind, and the server does not count as gone."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with CompletionClient(server) as client:
        outcome, later = Outcome("steady", 1, 2, scheduled=0.0), Outcome("steady", 1, 2, scheduled=0.0)
        # Every free number below the limit is taken, so that no connection gets one.
        taken: list[int] = []
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, before[1]))
            while True:
                try:
                    taken.append(os.open(os.devnull, os.O_RDONLY))
                except OSError:
                    break
            await client.complete(outcome, [1])
            still_there = await client.is_listening()
        finally:
            for descriptor in taken:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (outcome.failure, still_there) == ("descriptors", True)
    async with CompletionClient(server) as client:
        await client.complete(later, [1])
    assert later.failure is None


MEMORY = """
import resource, sys
from pathlib import Path
from forebay.bench.workload_file import read_workload
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
workload = read_workload(Path(sys.argv[1]))
print(len(workload.requests), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_reading_a_workload_takes_no_multiple_of_its_size(make_workload: Make, tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    # Token ids above 256, as nearly all are: below, Python shares its objects and the test would see nothing.
    rows = [("steady", float(index), 2000, 5) for index in range(2500)]
    one = make_workload(rows[:1]).requests[0]
    workload = make_workload([(name, arrival, 1, 5) for name, arrival, _, _ in rows])
    ids = [1000 + token % 30000 for token in range(2000)]
    requests = [type(one)("steady", index, (ids, 2000, 5)) for index in range(len(rows))]
    write_workload(path, Workload(workload.info, workload.arrivals, requests))
    size = path.stat().st_size
    assert size > 20_000_000
    child = subprocess.run(
        [sys.executable, "-c", MEMORY, str(path)], cwd=ROOT, capture_output=True, text=True, check=True, timeout=50
    )
    count, extra = map(int, child.stdout.split())
    assert count == len(rows)
    assert extra < 2.5 * size

"""Goodput against a real server: probes, what is kept of them, going on after a stop."""

import asyncio
import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from forebay.bench import goodput
from forebay.bench.baseline import Baseline, ModelBaseline, write_baseline
from forebay.bench.errors import BenchError
from forebay.bench.goodput_run import Goodput, GoodputPlan, find_goodput, goodput_figures
from forebay.bench.measure import Plan, measure
from forebay.bench.probes import ProbeFile, ProbeFolder, Setup, by_time_scale, mean_rate, relabelled
from forebay.bench.progress import ProgressDisplay
from forebay.bench.report import Report
from forebay.bench.search import Search
from forebay.bench.workload_file import Workload, read_workload, write_workload
from tests.bench.conftest import ROOT, RequestRow
from tests.bench.server import MODELS

Make = Callable[[Sequence[RequestRow]], Workload]

GENEROUS = Baseline({name: ModelBaseline(10.0, 0.0, 0.0) for name in MODELS})


def test_rate_and_time_scale(make_workload: Make) -> None:
    workload = make_workload([("steady", 10 + 0.5 * index, 3, 2) for index in range(5)])
    assert mean_rate(workload, "w") == 2.0
    same, time_scale = by_time_scale(workload, "w")(8.0)
    assert (same, time_scale) == (workload, 0.25)
    with pytest.raises(BenchError, match="workload w: its 3 requests all arrive at once"):
        mean_rate(make_workload([("steady", 1, 3, 2)] * 3), "w")


def test_relabelled_prompts_share_what_they_shared_and_nothing_more(make_workload: Make) -> None:
    workload = make_workload([("steady", 0, 40, 2), ("other", 1, 60, 3)])
    first, second = relabelled(workload, 1), relabelled(workload, 2)
    assert first.requests[0].prompt == first.requests[1].prompt[:40]
    assert first.requests[0].prompt[:16] != second.requests[0].prompt[:16] != workload.requests[0].prompt[:16]
    assert set(first.requests[1].prompt) == set(workload.requests[1].prompt)
    assert [(r.model_name, r.prompt_tokens, r.output_tokens) for r in first.requests] == [
        ("steady", 40, 2),
        ("other", 60, 3),
    ]
    assert relabelled(workload, 1) == first
    assert first.arrivals == workload.arrivals


async def search(
    url: str, workload: Workload, folder: Path, limits: Search, stop: asyncio.Event | None = None
) -> Goodput:
    setup = Setup(url, "w")
    plan = GoodputPlan(
        url, by_time_scale(workload, "w"), setup, ["test"], limits, 5.0, ProbeFolder(folder), GENEROUS, 20.0
    )
    with ProgressDisplay(io.StringIO()) as progress:
        return await find_goodput(plan, progress, stop or asyncio.Event())


async def test_a_server_that_keeps_up_ends_at_the_highest_rate(
    server: str, make_workload: Make, tmp_path: Path
) -> None:
    workload = make_workload([("steady", 0.1 * index, 3, 2) for index in range(6)])
    result = await search(server, workload, tmp_path, Search(0.99, 10.0, 1.0, 40.0, 0.1))
    assert [(one.rate, one.attainment) for one in result.seen] == [(10, 1), (20, 1), (40, 1)]
    assert "at least 40 requests/s, the highest rate allowed: 99 % of the requests within 5 x" in result.sentence
    # 0.5 s of arrivals at 10 requests/s take an eighth of that at 80.
    assert result.probes[2].report.time_scale == pytest.approx(0.25)
    assert goodput_figures(result)["goodput_per_s"].value == 40
    kept = ProbeFolder(tmp_path).open(Setup(server, "w"))
    assert [probe.rate for probe in kept] == [10, 20, 40]


async def test_failed_requests_are_missed(server: str, make_workload: Make, tmp_path: Path) -> None:
    workload = make_workload([("error500", 0.05 * index, 3, 2) for index in range(3)])
    result = await search(server, workload, tmp_path, Search(0.99, 20.0, 10.0, 40.0, 0.1))
    assert [(one.rate, one.attainment) for one in result.seen] == [(10, 0), (20, 0)]
    assert result.rate is None
    assert "no goodput down to 10 requests/s" in result.sentence
    assert goodput_figures(result)["goodput_per_s"].value == 0


async def probed(server: str, workload: Workload, model: str) -> Report:
    with ProgressDisplay(io.StringIO()) as progress:
        plan = Plan(server, workload, "w", ["test"], scales=[5.0], baseline=GENEROUS)
        return await measure(plan, progress, asyncio.Event())


async def test_a_search_goes_on_from_what_is_kept(
    server: str, make_workload: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = await probed(server, make_workload([("steady", 0, 3, 2)]), "steady")
    bad = await probed(server, make_workload([("error500", 0, 3, 2)]), "error500")
    folder = ProbeFolder(tmp_path)
    assert folder.open(Setup(server, "w")) == []
    for rate, report in ((16.0, bad), (8.0, good)):
        folder.write(ProbeFile(rate, report))
    assert [probe.rate for probe in folder.open(Setup(server, "w"))] == [8, 16]
    workload = make_workload([("steady", 0.05 * index, 3, 2) for index in range(4)])
    result = await search(server, workload, tmp_path, Search(0.99, 8.0, 1.0, 40.0, 0.5))
    # Only what is between the two was tried: the geometric mean, which a server this fast keeps.
    assert [(one.rate, one.attainment) for one in result.seen] == [(8, 1), (11.31, 1), (16, 0)]
    assert result.rate == 11.31
    assert "goodput 11.31 requests/s: 99 % of the requests within 5 x alone, and no longer at 16" in result.sentence
    with pytest.raises(BenchError, match=r"holds probes of another search \(w against .*this is other"):
        folder.open(Setup(server, "other"))
    folder.path(8.0).write_text("{")
    with pytest.raises(BenchError, match=r"probe-8\.json: not a file of this search .*delete it"):
        folder.open(Setup(server, "w"))
    capsys.readouterr()


async def test_a_server_that_dies_leaves_the_probes_before(
    mortal_server: str, make_workload: Make, tmp_path: Path
) -> None:
    good = await probed(mortal_server, make_workload([("steady", 0, 3, 2)]), "steady")
    folder = ProbeFolder(tmp_path)
    folder.open(Setup(mortal_server, "w"))
    folder.write(ProbeFile(8.0, good))
    workload = make_workload([("fatal", 0, 3, 2), ("steady", 1, 3, 2)])
    with pytest.raises(BenchError, match=r"gone in the probe at 16 requests/s; 1 probes are kept"):
        await search(mortal_server, workload, tmp_path, Search(0.99, 8.0, 1.0, 40.0, 0.5))
    assert [probe.rate for probe in folder.open(Setup(mortal_server, "w"))] == [8]


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "bench.goodput", *map(str, arguments)]


@pytest.mark.system
def test_command_with_a_generated_workload(server: str, tmp_path: Path) -> None:
    write_baseline(tmp_path / "known.json", GENEROUS)
    folder, plots, figures = tmp_path / "probes", tmp_path / "plots", tmp_path / "figures.json"
    options = ["--base-url", server, "--folder", folder, "--plots", plots, "--json", figures, "--baseline"]
    options += [tmp_path / "known.json", "--first", "20", "--highest", "40"]
    generator = ["--models", "steady:3,cached", "--duration", "0.5", "--prompt-lengths", "fixed:4"]
    generator += ["--output-lengths", "fixed:2"]
    done = subprocess.run(command(*options, "--", *generator), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "goodput at least 40 requests/s" in done.stdout
    assert (plots / "goodput.png").read_bytes().startswith(b"\x89PNG")
    content = json.loads(figures.read_text())
    assert content["benchmark"] == "goodput"
    assert content["figures"]["goodput_per_s"] == {"value": 40.0, "unit": "1/s", "baseline": None}
    requests = [
        json.loads((folder / f"probe-{rate}.json").read_text())["report"]["total"]["requests"] for rate in (20, 40)
    ]
    assert requests[0] < requests[1]  # as long as before, with more requests
    # All is kept: the same command sends nothing more.
    again = subprocess.run(command(*options, "--", *generator), cwd=ROOT, capture_output=True, text=True)
    assert (again.returncode, again.stdout, again.stderr) == (0, done.stdout, "")


def test_command_stops_at_a_signal_and_keeps_its_probes(server: str, tmp_path: Path, make_workload: Make) -> None:
    write_baseline(tmp_path / "known.json", GENEROUS)
    write_workload(tmp_path / "w.json", make_workload([("steady", 0, 3, 2), ("stuck", 0.5, 3, 2)]))
    assert len(read_workload(tmp_path / "w.json").requests) == 2
    options = ["--base-url", server, "--folder", tmp_path / "probes", "--baseline", tmp_path / "known.json"]
    process = subprocess.Popen(
        command(tmp_path / "w.json", *options), cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    while not process.stderr.readline().startswith("replay: "):
        pass
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "interrupted in the probe at 2 requests/s; 0 probes are kept" in errors
    assert "the same command goes on from here" in errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--base-url", "http://u"], "exactly one of WORKLOAD and --"),
        (["w.json", "--base-url", "http://u", "--", "--duration", "3"], "exactly one of WORKLOAD and --"),
        (["w.json", "--base-url", "http://u", "--target", "1.5"], "a share above 0 and at most 1"),
        (["w.json"], "--base-url"),
    ],
)
def test_usage_errors(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        goodput.main(arguments)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_errors_before_the_start(tmp_path: Path, make_workload: Make, capsys: pytest.CaptureFixture[str]) -> None:
    write_workload(tmp_path / "w.json", make_workload([("steady", 0, 3, 2), ("steady", 1, 3, 2)]))
    arguments = [str(tmp_path / "w.json"), "--base-url", "http://127.0.0.1:9", "--folder", str(tmp_path / "probes")]
    assert goodput.main([*arguments, "--lowest", "5", "--highest", "4"]) == 1
    assert "--lowest 5 is above --highest 4" in capsys.readouterr().err
    assert goodput.main(arguments) == 1
    assert "is the server running there" in capsys.readouterr().err

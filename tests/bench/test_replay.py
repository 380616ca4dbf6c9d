"""Replays against a real server process, well-behaved and not."""

import asyncio
import base64
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from forebay.bench import replay
from forebay.bench.baseline import Baseline, ModelBaseline, read_baseline, write_baseline
from forebay.bench.client import CompletionClient, Outcome
from forebay.bench.errors import BenchError, Interrupted
from forebay.bench.measure import Plan, measure
from forebay.bench.progress import ProgressDisplay
from forebay.bench.replayer import reserve_descriptors
from forebay.bench.report import Report
from forebay.bench.workload_file import Workload, write_workload
from tests.bench.conftest import ROOT, RequestRow
from tests.bench.server import MODELS, TOGETHER

Make = Callable[[Sequence[RequestRow]], Workload]

KNOWN = Baseline({name: ModelBaseline(10.0, 0.0, 0.0) for name in MODELS})
"""Saves measuring; every request that ends within 10 s meets scale 1."""


async def run(plan: Plan, stop: asyncio.Event | None = None) -> Report:
    with ProgressDisplay(io.StringIO()) as progress:
        return await measure(plan, progress, stop or asyncio.Event())


async def replay_rows(url: str, workload: Workload, timeout_s: float = 20.0, time_scale: float = 1.0) -> Report:
    return await run(Plan(url, workload, "test", ["test"], baseline=KNOWN, timeout_s=timeout_s, time_scale=time_scale))


async def received(url: str) -> list[dict[str, Any]]:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/received") as response:
            bodies: list[dict[str, Any]] = await response.json()
            return bodies


async def test_exact_lengths_are_asked_for_and_counted(server: str, make_workload: Make) -> None:
    report = await replay_rows(f"{server}/v1/", make_workload([("other", 0, 7, 5)]))
    assert (report.total.completed, report.total.failed, report.total.output_tokens) == (1, 0, 5)
    [body] = [body for body in await received(server) if body["model"] == "other"]
    assert body == {
        "model": "other",
        "prompt": [100, 101, 102, 103, 104, 105, 106],
        "max_tokens": 5,
        "min_tokens": 5,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_requests_leave_without_waiting_for_others(server: str, make_workload: Make) -> None:
    # The server answers nobody before all of them are there: one at a time would run into the time-out.
    report = await replay_rows(server, make_workload([("together", 0, 3, 2)] * TOGETHER))
    assert report.total.completed == TOGETHER


async def test_arrivals_are_kept_and_scaled(server: str, make_workload: Make) -> None:
    rows = [("steady", index * 10.0, 3, 2) for index in range(4)]
    report = await replay_rows(server, make_workload(rows), time_scale=0.01)
    assert report.total.completed == 4
    assert 0.3 <= report.duration_s < 3
    assert report.total.send_delay_s.p50 is not None
    assert 0 <= report.total.send_delay_s.p50 < 0.1


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        ("error500", "http_500", "out of order"),
        ("error_event", "server_error", "the worker was lost"),
        ("truncated", "truncated", "without [DONE] after 1 chunks"),
        ("short", "wrong_length", "asked for 4 tokens, the server reports 3 tokens"),
        ("uncounted", "wrong_length", "the server reports no count"),
        ("garbage", "bad_stream", "nonsense"),
        ("silent", "bad_stream", "no completion"),
        ("stuck", "timeout", "not finished after 1 s"),
    ],
)
async def test_every_misbehaviour_is_a_failure_of_its_kind(
    server: str, make_workload: Make, model: str, kind: str, message: str
) -> None:
    workload = make_workload([(model, 0, 3, 4), ("steady", 0, 3, 4)])
    report = await replay_rows(server, workload, timeout_s=1.0 if model == "stuck" else 20.0)
    assert report.ended == "complete"
    assert report.total.failures == {kind: 1}
    assert message in report.errors[kind]
    assert (report.models["steady"].completed, report.models[model].failed) == (1, 1)
    assert report.total.slo_attainment["1"] == 0.5
    assert report.models[model].ttft_s.mean is None


async def test_a_refused_connection_is_told_apart(make_workload: Make) -> None:
    outcome = Outcome("steady", 1, 1, scheduled=0.0)
    async with CompletionClient("http://127.0.0.1:9") as client:
        await client.complete(outcome, [1])
        assert outcome.failure == "connect"
        assert not await client.is_listening()
        with pytest.raises(BenchError, match=r"127\.0\.0\.1:9/v1/models: .*is the server running there"):
            await client.models()
    with pytest.raises(BenchError):
        await replay_rows("127.0.0.1:9", make_workload([("steady", 0, 3, 2)]))


async def test_a_server_that_dies_leaves_a_partial_report(mortal_server: str, make_workload: Make) -> None:
    rows = [("steady", 0, 3, 2), ("stuck", 0, 3, 2), ("fatal", 0.3, 3, 2), *[("steady", 3600.0, 3, 2)] * 5]
    report = await replay_rows(mortal_server, make_workload(rows), timeout_s=600)
    assert report.ended == "server_lost"
    assert (report.total.requests, report.total.completed, report.total.failed) == (8, 1, 7)
    assert report.total.failures == {"truncated": 2, "not_sent": 5}
    assert report.duration_s < 30


async def test_a_missing_model_is_named_before_anything_is_sent(server: str, make_workload: Make) -> None:
    before = len(await received(server))
    with pytest.raises(BenchError, match=r"does not serve 'llm-9', which .* serves 'cached', 'error500', .*'steady'"):
        await replay_rows(server, make_workload([("steady", 0, 3, 2), ("llm-9", 0, 3, 2)]))
    assert len(await received(server)) == before
    baseline = Baseline({"steady": ModelBaseline(1, 0, 0)})
    with pytest.raises(BenchError, match="nothing on the model 'other'; it knows steady"):
        await run(Plan(server, make_workload([("other", 0, 3, 2)]), "test", [], baseline=baseline))


async def test_stop_cuts_off_what_runs(server: str, make_workload: Make) -> None:
    stop = asyncio.Event()
    rows = [("steady", 0, 3, 2), ("stuck", 0, 3, 2), ("steady", 3600.0, 3, 2)]
    asyncio.get_running_loop().call_later(0.7, stop.set)
    report = await run(Plan(server, make_workload(rows), "test", [], baseline=KNOWN), stop)
    assert report.ended == "interrupted"
    assert report.total.failures == {"interrupted": 1, "not_sent": 1}
    assert report.total.completed == 1
    with pytest.raises(Interrupted):
        await run(Plan(server, make_workload(rows), "test", []), stop)


async def test_baseline_comes_from_lone_requests_of_the_workloads_lengths(
    mortal_server: str, make_workload: Make
) -> None:
    rows = [("steady", 0.0, prompt, output) for prompt, output in ((10, 1), (20, 40), (30, 40), (400, 40))] + [
        ("other", 0.0, 6, 3)
    ] * 2
    report = await run(Plan(mortal_server, make_workload(rows), "test", []))
    samples = {name: model.samples for name, model in report.baseline.models.items()}
    assert [(s.prompt_tokens, s.output_tokens) for s in samples["steady"]] == [(10, 16), (20, 16), (30, 16), (400, 16)]
    assert [(s.prompt_tokens, s.output_tokens) for s in samples["other"]] == [(6, 3), (6, 3)]
    bodies = await received(mortal_server)
    # One more to each model to warm it up; they come one model after the other, before all of the replay.
    assert [body["model"] for body in bodies[:8]] == ["other"] * 3 + ["steady"] * 5
    prompts = [tuple(body["prompt"]) for body in bodies]
    assert len(prompts) == 8 + 6
    assert not set(prompts[:8]) & set(prompts[8:])  # a prefix cache must not help
    assert all(100 <= token < 500 for prompt in prompts for token in prompt)


async def test_a_failing_baseline_request_is_an_error(server: str, make_workload: Make) -> None:
    with pytest.raises(BenchError, match=r"lone request to 'error500' with 3 prompt .* http_500: out of order"):
        await run(Plan(server, make_workload([("error500", 0, 3, 2)]), "test", []))


def test_baseline_file(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    write_baseline(path, KNOWN)
    assert read_baseline(path) == KNOWN
    path.write_text("{}")
    with pytest.raises(BenchError, match=r"baseline\.json: not a baseline file"):
        read_baseline(path)


def test_descriptors_are_raised_or_refused() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        reserve_descriptors(1000)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        with pytest.raises(BenchError, match=rf"hard limit is {hard}: .*--max-requests {hard - 64}"):
            reserve_descriptors(hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "bench.replay", *map(str, arguments)]


@pytest.fixture
def files(tmp_path: Path, make_workload: Make) -> Callable[[Sequence[RequestRow]], list[str | Path]]:
    """Arguments for a replay of these rows, with a known baseline and a report in tmp_path."""

    def write(rows: Sequence[RequestRow]) -> list[str | Path]:
        write_workload(tmp_path / "workload.json", make_workload(rows))
        write_baseline(tmp_path / "known.json", KNOWN)
        baseline: list[str | Path] = ["--baseline", tmp_path / "known.json"]
        return [tmp_path / "workload.json", *baseline, "--output", tmp_path / "report.json"]

    return write


Files = Callable[[Sequence[RequestRow]], list[str | Path]]


def test_command_reports_and_exits_with_0(server: str, files: Files, tmp_path: Path) -> None:
    arguments = [*files([("steady", 0, 3, 2)] * 9), "--base-url", server, "--max-requests", "8", "--scales", "4,1.5"]
    done = subprocess.run(command(*arguments), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["total"]["requests"] == 8
    assert report["total"]["slo_attainment"] == {"1.5": 1.0, "4": 1.0}
    assert set(report["total"]["ttft_s"]) == {"mean", "p50", "p90", "p99"}
    assert set(report["models"]) == {"steady"}
    assert set(report["baseline"]["models"]) == set(MODELS)
    assert report["command"][1:] == ["-m", "forebay.bench.replay", *map(str, arguments)]
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", report["commit"] or "0" * 40)
    # Plain lines where standard error is not a terminal: no bar, no escape codes.
    assert "\x1b" not in done.stderr + done.stdout
    assert done.stderr.splitlines()[-1] == "replay: 8/8 sent, 0 running, 8 done, 0 failed"
    assert "TTFT" in done.stdout
    assert str(tmp_path / "report.json") in done.stdout


def test_fresh_prompts_share_only_with_each_other(mortal_server: str, files: Files) -> None:
    arguments = [*files([("steady", 0, 40, 2), ("steady", 0.2, 60, 2)]), "--base-url", mortal_server]
    for _ in range(2):
        assert replay.main([*map(str, arguments), "--fresh-prompts"]) == 0
    first, second, again, _ = (body["prompt"] for body in asyncio.run(received(mortal_server)))
    assert first == second[:40]
    assert first[:16] != again[:16] != list(range(100, 116)) != first[:16]
    assert set(second) == set(range(100, 160))


def test_command_exits_with_1_if_a_request_failed(server: str, files: Files, tmp_path: Path) -> None:
    arguments = files([("steady", 0, 3, 2), ("error500", 0, 3, 2)])
    done = subprocess.run(command(*arguments, "--base-url", server), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "1 http_500, first: error500: out of order" in done.stdout
    assert json.loads((tmp_path / "report.json").read_text())["total"]["failed"] == 1


@pytest.mark.system
def test_command_exits_with_1_if_the_server_dies(mortal_server: str, files: Files, tmp_path: Path) -> None:
    arguments = files([("fatal", 0, 3, 2), ("steady", 3600, 3, 2)])
    done = subprocess.run(command(*arguments, "--base-url", mortal_server), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "the server is gone; the report is partial" in done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["ended"], report["total"]["failed"]) == ("server_lost", 2)


@pytest.mark.system
def test_command_draws_plots_and_a_page_and_writes_figures(server: str, files: Files, tmp_path: Path) -> None:
    rows = [(model, 0.02 * index, 4, 5) for index, model in enumerate(["steady", "cached", "error500"] * 4)]
    plots, figures_file = tmp_path / "new" / "plots", tmp_path / "figures.json"
    arguments = [*files(rows), "--base-url", server, "--plots", plots, "--json", figures_file]
    done = subprocess.run(command(*arguments), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1  # four requests failed
    assert str(plots / "index.html") in done.stdout
    names = ["attainment.png", "timeline.png", "tpot.png", "ttft.png"]
    assert sorted(file.name for file in plots.iterdir()) == [*names[:1], "index.html", *names[1:]]
    page = (plots / "index.html").read_text()
    for name in names:
        image = (plots / name).read_bytes()
        assert image.startswith(b"\x89PNG")
        assert f"data:image/png;base64,{base64.b64encode(image).decode()}" in page
    assert "8 of 12 requests finished" in page
    assert "error500: out of order" in page
    content = json.loads(figures_file.read_text())
    assert content["benchmark"] == "replay"
    assert content["figures"]["requests"] == {"value": 12, "unit": "1", "baseline": None}
    assert content["figures"]["failed_requests"]["value"] == 4
    # Eight finished requests, of which four say that 2 of their 4 prompt tokens came from the cache.
    assert content["figures"]["prefix_cache_hit_rate"]["value"] == 0.5
    assert content["figures"]["slo_attainment_at_20"]["value"] == pytest.approx(8 / 12)
    assert content["figures"]["ttft_p50_s"]["baseline"] == 10.0
    assert 0 < content["figures"]["ttft_p50_s"]["value"] < 10


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_leave_a_partial_report(
    server: str, files: Files, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    arguments = files([("steady", 0, 3, 2), ("steady", 3600, 3, 2)])
    process = subprocess.Popen(
        command(*arguments, "--base-url", server),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("replay: ")
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == code
    assert "interrupted; the report is partial" in errors
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ended"] == "interrupted"
    assert report["total"]["requests"] == 2


def test_a_terminal_gets_a_bar(server: str, files: Files) -> None:
    terminal, other_end = os.openpty()
    arguments = command(*files([("steady", 0, 3, 2)] * 3), "--base-url", server)
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "140"}
    process = subprocess.Popen(arguments, cwd=ROOT, stderr=other_end, stdout=subprocess.DEVNULL, env=environment)
    os.close(other_end)
    seen = b""
    try:
        while data := os.read(terminal, 4096):
            seen += data
    except OSError:
        pass  # Linux: how the end of a terminal whose other side is closed reads
    finally:
        os.close(terminal)
    assert process.wait(timeout=20) == 0
    assert "━".encode() in seen
    assert b"3/3 sent, 0 running, 3 done, 0 failed" in seen


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["w.json"], "--base-url"), (["w.json", "--base-url", "http://u", "--scales", "1,0"], "'0' is not allowed")],
)
def test_usage_errors(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        replay.main(arguments)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_errors_before_the_start(server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main([str(tmp_path / "none.json"), "--base-url", server]) == 1
    assert "none.json: cannot be read" in capsys.readouterr().err

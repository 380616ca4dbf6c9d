"""Hand-computed percentiles, SLO attainment and baselines."""

import io
import subprocess
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from forebay.bench.baseline import Baseline, ModelBaseline, Sample, fit
from forebay.bench.client import Outcome
from forebay.bench.report import Report, Summary, commit_of, examples, print_report, summarize, write_report

BASELINE = Baseline({"a": ModelBaseline(0.1, 0.01, 0.05), "b": ModelBaseline(0.2, 0.0, 0.1)})


def outcome(model: str, first: float, last: float, output_tokens: int = 10, prompt_tokens: int = 40) -> Outcome:
    """Scheduled at 100 s, sent half a second late; the token times are relative to the schedule."""
    return Outcome(
        model,
        prompt_tokens,
        output_tokens,
        scheduled=100.0,
        sent=100.5,
        chunk_times=[100 + first, 100 + last],
        tokens=output_tokens,
    )


def failed(model: str, kind: str = "http_500") -> Outcome:
    lost = Outcome(model, 40, 10, scheduled=100.0, sent=100.25)
    lost.fail(kind, f"{kind} happened")
    return lost


def test_summary_is_of_pooled_values_with_linear_percentiles() -> None:
    # 1 .. 11: the p-th percentile lies at 1 + p / 10.
    summary = Summary.of([float(value) for value in range(11, 0, -1)])
    assert (summary.mean, summary.p50) == (6, 6)
    assert (summary.p90, summary.p99) == pytest.approx((10, 10.9))
    assert Summary.of([]) == Summary(None, None, None, None)


def test_times_count_from_the_schedule_and_tpot_leaves_the_first_token_out() -> None:
    group = summarize(
        [outcome("a", first=2, last=6.5), outcome("a", first=3, last=3, output_tokens=1)], BASELINE, [1], 10
    )
    assert (group.ttft_s.mean, group.latency_s.mean) == (2.5, 4.75)
    assert group.tpot_s.mean == 0.5  # 4.5 s over 9 steps; one token alone has no step
    assert group.send_delay_s.mean == 0.5
    assert (group.output_tokens, group.output_tokens_per_s) == (11, 1.1)


def test_attainment_counts_failed_requests_as_missed() -> None:
    # Alone, a takes 0.1 + 40 x 0.01 + 10 x 0.05 = 1.0 s and b 0.2 + 10 x 0.1 = 1.2 s.
    outcomes = [outcome("a", 0.5, 1.0), outcome("a", 0.5, 1.5), outcome("b", 0.5, 2.5), outcome("a", 1, 8), failed("b")]
    total = summarize(outcomes, BASELINE, [1, 2, 2.5, 8], 10)
    assert total.slo_attainment == {"1": 1 / 5, "2": 2 / 5, "2.5": 3 / 5, "8": 4 / 5}
    assert (total.requests, total.completed, total.failed) == (5, 4, 1)
    assert total.failures == {"http_500": 1}
    alone = summarize(outcomes[2:3] + outcomes[4:], BASELINE, [1, 2.5], 10)
    assert alone.slo_attainment == {"1": 0, "2.5": 0.5}
    nothing = summarize([failed("a")], BASELINE, [1], 10)
    assert (nothing.ttft_s.p99, nothing.tpot_s.mean, nothing.latency_s.mean) == (None, None, None)
    assert nothing.slo_attainment == {"1": 0}


def test_hit_rate_is_over_the_prompts_of_which_the_server_tells() -> None:
    outcomes = [outcome("a", 1, 2, prompt_tokens=tokens) for tokens in (100, 300, 600)]
    outcomes[0].cached_tokens, outcomes[1].cached_tokens = 16, 64
    assert summarize(outcomes, BASELINE, [1], 10).prefix_cache_hit_rate == 80 / 400
    assert summarize(outcomes[2:], BASELINE, [1], 10).prefix_cache_hit_rate is None
    assert summarize([failed("a")], BASELINE, [1], 10).prefix_cache_hit_rate is None


def test_baseline_fit() -> None:
    # On the line 0.1 + 0.002 x prompt, plus +1, -2, +1 hundredths that a least-squares line leaves where it was.
    samples = [Sample(0, 5, 0.11, 0.51), Sample(100, 5, 0.28, 0.68), Sample(200, 3, 0.51, 0.61)]
    model = fit(samples)
    assert (model.prefill_base_s, model.prefill_token_s) == pytest.approx((0.1, 0.002))
    assert model.decode_step_s == pytest.approx(0.9 / 10)
    assert model.latency_s(50, 4) == pytest.approx(0.1 + 0.1 + 0.36)
    flat = fit([Sample(10, 1, 0.3, 0.3), Sample(20, 1, 0.1, 0.1)])
    assert (flat.prefill_base_s, flat.prefill_token_s, flat.decode_step_s) == pytest.approx((0.2, 0, 0))
    steep = fit([Sample(10, 2, 0.0, 0.0), Sample(20, 2, 0.5, 0.5)])
    assert (steep.prefill_base_s, steep.prefill_token_s) == pytest.approx((0, 10 / 500))


def make_report(outcomes: list[Outcome]) -> Report:
    total = summarize(outcomes, BASELINE, [1, 2], 10)
    return Report(
        total=total,
        models={name: summarize([o for o in outcomes if o.model == name], BASELINE, [1, 2], 10) for name in "ab"},
        commit=None,
        command=["replay"],
        baseline=BASELINE,
        ended="complete",
        duration_s=10,
        base_url="http://127.0.0.1:1",
        workload="w.json",
        time_scale=1,
        errors=examples(outcomes),
        machine={},
    )


def test_table_shows_every_model_all_and_what_failed() -> None:
    stream = io.StringIO()
    print_report(make_report([outcome("a", 0.25, 1.0), failed("b"), failed("b")]), Console(file=stream, width=140))
    lines = {line.split()[0]: line for line in stream.getvalue().splitlines() if line.strip()}
    text = stream.getvalue()
    assert "0.25 / 0.25 / 0.25" in text
    assert "83.3 / 83.3 / 83.3" in text  # 0.75 s over 9 steps
    assert text.count("- / - / -") == 3  # nothing of b completed
    assert lines["all"].split() == ["all", "33.3", "33.3"]
    assert "2 of 3 requests failed" in text
    assert "2 http_500, first: b: http_500 happened" in text


def test_many_scales_are_printed_in_tables_that_fit_a_terminal() -> None:
    outcomes = [outcome("a", 0.5, 1.0 + 0.75 * (index % 20)) for index in range(40)]
    scales = [float(scale) for scale in range(1, 21)]
    report = msgspec.structs.replace(make_report([]), models={}, total=summarize(outcomes, BASELINE, scales, 10))
    stream = io.StringIO()
    print_report(report, Console(file=stream, width=140))
    lines = [line.split() for line in stream.getvalue().splitlines()]
    assert ["model", *map(str, range(1, 11))] in lines
    assert ["model", *map(str, range(11, 21))] in lines
    shares = [cell for line in lines[-30:] if line[:1] == ["all"] for cell in line[1:]]
    assert shares[-20:] == [f"{100 * share:.1f}" for share in report.total.slo_attainment.values() if share is not None]


def test_tables_can_be_read_at_80_columns() -> None:
    long_name = "meta-llama/Llama-3.1-8B-Instruct [fp16]"
    outcomes = [outcome("a", 12.3 * index, 123 * index + 1) for index in range(1, 11)]
    scales = [float(scale) for scale in range(1, 21)]
    slow = summarize(outcomes, BASELINE, scales, 10)
    all_met = dict.fromkeys(slow.slo_attainment, 1.0)
    group = msgspec.structs.replace(slow, slo_attainment=all_met, requests=123456, prefix_cache_hit_rate=0.987)
    report = msgspec.structs.replace(make_report([]), models={"llm-0": group, long_name: group}, total=group)
    stream = io.StringIO()
    print_report(report, Console(file=stream, width=80))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in stream.getvalue()
    for model in ("llm-0", "all"):
        cells = [" ".join(line.split()[1:]) for line in lines if line.split()[:1] == [model]]
        assert cells == [
            "123456 0 10.0 98.7",
            "67.7 / 112 / 122 67761 / 112041 / 122004 678 / 1120 / 1220",
            " ".join(["100.0"] * 10),
            " ".join(["100.0"] * 10),
        ]
    # A name that is too long goes on in the next lines.
    column = "".join(line[:30].split("  ")[1].strip() for line in lines if line.startswith("  ") and line[2] != " ")
    assert long_name.replace(" ", "") in column.replace(" ", "")


def test_report_is_written_whole_into_a_new_folder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    write_report(path, make_report([failed("a")]))
    assert [file.name for file in path.parent.iterdir()] == ["report.json"]
    assert '"p99": null' in path.read_text()


def test_commit(tmp_path: Path) -> None:
    assert commit_of(tmp_path) is None

    def git(*arguments: str) -> str:
        names = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        done = subprocess.run(["git", *names, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message", "first")
    head = git("rev-parse", "HEAD")
    assert commit_of(tmp_path) == head
    (tmp_path / "file").touch()
    assert commit_of(tmp_path) == f"{head}-dirty"
    # What the repository says to ignore is no difference from the commit.
    (tmp_path / ".git" / "info" / "exclude").write_text("/file\n/plots/\n")
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "ttft.png").touch()
    assert commit_of(tmp_path) == head

"""Plots of odd measurements are drawn all the same; the page says what it holds and loads nothing."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from forebay.bench.baseline import Baseline, ModelBaseline
from forebay.bench.client import Outcome
from forebay.bench.measure import Measurement
from forebay.bench.page import page
from forebay.bench.plots import MOST_MODELS, draw_attainment_over_rate, draw_measurement, shown_models
from forebay.bench.replay_figures import replay_figures
from forebay.bench.replayer import Run
from forebay.bench.report import Report, examples, summarize
from forebay.bench.series import ALL


def finished(model: str, first: float, last: float, output_tokens: int = 5) -> Outcome:
    return Outcome(
        model, 40, output_tokens, 100.0, 100.0, [100 + first, 100 + last], ended=100 + last, tokens=output_tokens
    )


def failed(model: str) -> Outcome:
    lost = Outcome(model, 40, 5, scheduled=100.0, sent=100.0, ended=101.0)
    lost.fail("http_500", "<b>out of order</b>")
    return lost


def measurement(outcomes: list[Outcome]) -> Measurement:
    names = sorted({outcome.model for outcome in outcomes})
    baseline = Baseline({name: ModelBaseline(0.1, 0.01, 0.1) for name in names})
    scales = [1.0, 2.0, 5.0]
    report = Report(
        total=summarize(outcomes, baseline, scales, 10),
        models={
            name: summarize([one for one in outcomes if one.model == name], baseline, scales, 10) for name in names
        },
        commit=None,
        command=["python", "-m", "bench.replay", "a <b>.json"],
        baseline=baseline,
        ended="server_lost",
        duration_s=10,
        base_url="http://127.0.0.1:1",
        workload="a <b>.json",
        time_scale=1,
        errors=examples(outcomes),
        machine={"cpus": 2},
    )
    return Measurement(report, Run(outcomes, 100.0, 10.0, "server_lost"))


ODD: dict[str, list[Outcome]] = {
    "nothing finished": [failed("a"), failed("b")],
    "one request of one token": [finished("a", 0.5, 0.5, output_tokens=1)],
    "all alike": [finished("a", 0.5, 0.9)] * 4,
    "no time at all": [finished("a", 0.0, 0.0)] * 2,
    "more models than lines": [
        finished(f"a model with quite a long name {n:02d}", 0.1 * n, 1.0 * n) for n in range(40)
    ],
}


@pytest.mark.parametrize("name", ODD)
def test_odd_measurements_are_drawn(name: str, tmp_path: Path) -> None:
    plots = draw_measurement(measurement(ODD[name]), tmp_path / "plots")
    for plot in plots:
        assert (tmp_path / "plots" / plot.file).read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / "plots" / plot.file).stat().st_size < 100_000
    left_out = [plot for plot in plots if "12 models with the most requests of 40" in plot.caption]
    assert len(left_out) == (4 if name == "more models than lines" else 0)


def test_the_models_with_the_most_requests_are_shown() -> None:
    requests = {f"m{number:02d}": number for number in range(MOST_MODELS + 5)}
    assert shown_models(requests) == [f"m{number:02d}" for number in range(5, MOST_MODELS + 5)]
    assert shown_models({"b": 1, "a": 1}) == ["a", "b"]


def test_page_escapes_and_loads_nothing(tmp_path: Path) -> None:
    whole = measurement([finished("a", 0.5, 0.9), failed("a"), failed("x&y")])
    text = page(whole.report, draw_measurement(whole, tmp_path), tmp_path)
    assert "<b>" not in text
    assert "a &lt;b&gt;.json" in text
    assert "x&amp;y: &lt;b&gt;out of order" in text or "a: &lt;b&gt;out of order" in text
    assert "these numbers are partial" in text
    # 0.9 s against 0.1 + 40 x 0.01 + 5 x 0.1 = 1.0 s alone: one of three requests.
    assert re.search(r"<td>all models</td><td>33\.3 %</td><td>33\.3 %</td><td>33\.3 %</td>", text)
    assert all(source.startswith("data:image/png") for source in re.findall(r'src="([^"]*)"', text))
    assert "<link" not in text
    assert "<script" not in text
    # Every table is whole: as many cells in each row as in its header.
    for table in re.findall(r"<table>.*?</table>", text, re.DOTALL):
        widths = {len(row) for row in ElementTree.fromstring(table).iter("tr")}
        assert len(widths) == 1


def test_figures_stand_beside_the_requests_alone() -> None:
    figures = replay_figures(measurement([finished("a", 0.6, 2.0), finished("a", 0.8, 3.0), failed("a")]))
    assert figures["ttft_p50_s"].value == pytest.approx(0.7)
    assert figures["ttft_p50_s"].baseline == pytest.approx(0.1 + 40 * 0.01)
    assert figures["latency_p50_s"].value == pytest.approx(2.5)
    assert figures["latency_p50_s"].baseline == pytest.approx(1.0)
    assert figures["tpot_p50_s"].baseline == pytest.approx(0.1)
    assert figures["slo_attainment_at_2"].value == pytest.approx(1 / 3)
    assert (figures["failed_requests"].value, figures["prefix_cache_hit_rate"].value) == (1, None)


def test_attainment_over_rate(tmp_path: Path) -> None:
    path = tmp_path / "new" / "goodput.png"
    points = [(8.0, {"a": 0.9, ALL: 0.8}), (4.0, {"a": None, ALL: 1.0})]
    for found in (4.0, None):
        draw_attainment_over_rate(points, scale=5, target=0.99, found=found, path=path)
        assert path.read_bytes().startswith(b"\x89PNG")

"""ServeGen's rates, client windows and lengths: small files by hand, and the real ones where they are."""

import math
from collections import Counter
from pathlib import Path
from statistics import fmean

import pytest

from forebay.bench.arrivals import POISSON, Gaps
from forebay.bench.draws import Draws
from forebay.bench.errors import BenchError
from forebay.bench.lengths import Lengths, Vocabulary
from forebay.bench.servegen import LengthsByClient, convert_rates, convert_windows, window_arrivals
from forebay.bench.servegen_files import Window, parse_selections, read_clients, read_windows
from forebay.bench.trace import Slice
from forebay.bench.workload import main
from forebay.bench.workload_file import Workload, read_workload

RATES = "model,window_start_s,rate_rps,active_clients\n" + "".join(
    f"{model},{600 * window},{rate},3\n"
    for model, rates in (("large", (2, 0, 4)), ("small", (10, 10, 10)))
    for window, rate in enumerate(rates)
)
WINDOWS = (
    "model,client,window_start_s,rate_rps,cv,pattern,shape,scale\n"
    "large,0,600,0.5,1.0,Gamma,1.0,2.0\n"
    "large,0,1200,0.25,1.0,Weibull,0.5,2.0\n"
    "large,7,600,0.1,1.0,Weibull,2.0,9.0\n"
    "small,0,600,1.0,1.0,Gamma,0.2,3.0\n"
)
CLIENTS = (
    "model,client,requests,input_mean,input_p50,input_p99,output_mean,output_p50,output_p99\n"
    "large,0,300,100,80,100,50,50,50\n"
    "large,7,100,400,400,400,10,10,10\n"
    "large,8,900,,,,,,\n"
    "small,0,5,7,7,7,3,3,3\n"
)
FIXED = LengthsByClient(Lengths.parse("fixed:5"), Lengths.parse("fixed:2"))
VOCABULARY = Vocabulary(range(100, 200))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, content in (("rates", RATES), ("windows", WINDOWS), ("clients", CLIENTS)):
        (tmp_path / f"{name}.csv").write_text(content)
    return tmp_path


def by_rates(files: Path, models: str, part: Slice, gaps: Gaps = POISSON) -> Workload:
    return convert_rates(files / "rates.csv", parse_selections(models), part, gaps, FIXED, VOCABULARY, seed=2)


def by_windows(files: Path, models: str, part: Slice, lengths: LengthsByClient = FIXED) -> Workload:
    return convert_windows(files / "windows.csv", parse_selections(models), part, lengths, VOCABULARY, seed=2)


def counts(workload: Workload, width: float = 600.0) -> Counter[tuple[str, int]]:
    pairs = zip(workload.arrivals, workload.requests, strict=True)
    return Counter((request.model_name, int(arrival // width)) for arrival, request in pairs)


def test_rates_hold_window_by_window(files: Path) -> None:
    workload = by_rates(files, "large=a,small=b", Slice())
    found = counts(workload)
    for model, rates in (("a", (2, 0, 4)), ("b", (10, 10, 10))):
        for window, rate in enumerate(rates):
            assert found[model, window] == pytest.approx(600 * rate, abs=4 * math.sqrt(600 * rate))
    assert found["a", 1] == 0
    scaled = by_rates(files, "large=a", Slice(scale_rate=0.1))
    assert counts(scaled)["a", 2] == pytest.approx(240, abs=4 * math.sqrt(240))
    assert scaled.arrivals[-1] < 1800  # as many seconds as before


def test_a_slice_of_rates_begins_within_a_window(files: Path) -> None:
    workload = by_rates(files, "large=a", Slice(start=900.0, duration=400.0))
    assert min(workload.arrivals) >= 300  # 900 to 1,200 s is silent
    assert len(workload.requests) == pytest.approx(400, abs=80)
    assert max(workload.arrivals) < 400
    assert workload.info.duration == 400


def test_a_client_has_as_many_requests_in_a_window_as_its_rate_says() -> None:
    # 0.105/s is 63 in 600 s; a rate that float arithmetic leaves a little off still is a whole number.
    window = Window("m", "0", 1200.0, 0.105, "Gamma", 0.3, 4.0)
    for seed in range(20):
        times = window_arrivals(window, 1.0, Draws(seed, "test"))
        assert len(times) == 63
        assert all(1200 <= time < 1800 for time in times)
    # 6.3 on average: never fewer than 6 or more than 7.
    few = [len(window_arrivals(window, 0.1, Draws(seed, "test"))) for seed in range(2000)]
    assert set(few) == {6, 7}
    assert fmean(few) == pytest.approx(6.3, abs=0.05)


def test_gaps_in_a_window_are_the_fitted_laws_stretched_to_fill_it() -> None:
    window = Window("m", "0", 0.0, 0.01, "Weibull", 0.7, 3.0)
    draws, again = Draws(1, "test"), Draws(1, "test")
    times = sorted(window_arrivals(window, 1.0, draws))
    again.uniform()  # the chance of one more request
    drawn = [window.draw_gap(again) for _ in range(6)]
    stretched = [600 * gap / sum(drawn) for gap in drawn]
    between = [later - earlier for earlier, later in zip(times, [*times[1:], times[0] + 600], strict=True)]
    start = min(range(6), key=lambda turn: abs(between[turn] - stretched[0]))
    assert between[start:] + between[:start] == pytest.approx(stretched)


def test_gaps_of_clients_have_the_mean_of_their_law() -> None:
    draws = Draws(0, "gaps")
    gamma, weibull = Window("", "", 0, 1, "Gamma", 0.5, 3.0), Window("", "", 0, 1, "Weibull", 2.0, 3.0)
    assert fmean(gamma.draw_gap(draws) for _ in range(20000)) == pytest.approx(1.5, rel=0.05)
    assert fmean(weibull.draw_gap(draws) for _ in range(20000)) == pytest.approx(3 * math.gamma(1.5), rel=0.05)


def test_a_slice_of_windows_is_a_part_of_the_whole(files: Path) -> None:
    whole = by_windows(files, "large=a,small=b", Slice(start=600.0))
    assert counts(whole) == {("a", 0): 360, ("a", 1): 150, ("b", 0): 600}
    part = by_windows(files, "large=a,small=b", Slice(start=700.0, duration=600.0))
    assert part.arrivals == pytest.approx([time - 100 for time in whole.arrivals if 100 <= time < 700])
    one = by_windows(files, "large/7=c", Slice(start=600.0))
    assert counts(one) == {("c", 0): 60}
    # Clients do not all begin anew at a border between windows.
    assert min(whole.arrivals) > 0


def test_lengths_are_lognormals_with_the_clients_means(files: Path) -> None:
    lengths = LengthsByClient.read(FIXED.prompt, FIXED.output, files / "clients.csv")
    draws = Draws(0, "lengths")

    def drawn(model: str, client: str | None) -> list[tuple[int, int]]:
        source = lengths.of(model, client)
        return [lengths.draw(source, draws) for _ in range(8000)]

    prompts = sorted(prompt for prompt, _ in drawn("large", "0"))
    # The 99th percentile lies ln(100 / 80) above the median in logarithms, around the mean of 100.
    assert fmean(prompts) == pytest.approx(100, rel=0.01)
    assert math.log(prompts[7920] / prompts[4000]) == pytest.approx(math.log(100 / 80), abs=0.02)
    assert {output for _, output in drawn("large", "0")} == {50}
    assert set(drawn("large", "7")) == {(400, 10)}
    for client in ("8", None):
        # Not known, or any: the clients of the model, 300 requests of one to 100 of the other.
        outputs = Counter(output for _, output in drawn("large", client))
        assert outputs[10] / 8000 == pytest.approx(0.25, abs=0.02)
    with pytest.raises(BenchError, match="no lengths for the model 'mid'; it knows large, small"):
        lengths.of("mid", None)
    assert lengths.draw(LengthsByClient(FIXED.prompt, FIXED.output).of("large", "0"), draws) == (5, 2)
    scaled = by_windows(files, "large/7=c", Slice(start=600.0, scale_tokens=0.5, max_output=4), lengths)
    assert {(r.prompt_tokens, r.output_tokens) for r in scaled.requests} == {(200, 4)}


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("windows", "shape", "form", "column shape is missing; its columns are model, client, .*form"),
        ("windows", "0.25", "-1", "line 3: rate_rps is '-1'; a number of 0 or more"),
        ("windows", "Weibull,0.5", "Weibull,0", "line 3: shape is '0'; a number of 0.01 or more"),
        ("windows", "1.0,Gamma,0.2", "1.0,Pareto,0.2", "line 5: pattern is 'Pareto'; Gamma and Weibull"),
        ("windows", ",9.0", "", "line 4: has 7 cells for 8 columns"),
        ("rates", "rate_rps", "rate", "column rate_rps is missing"),
        ("rates", "large,1200,4", "large,1200,four", "line 4: rate_rps is 'four'"),
        ("clients", "input_p99", "input_p95", "column input_p99 is missing"),
        ("clients", "large,7,100,400", "large,7,100,nan", "line 3: input_mean is 'nan'"),
    ],
)
def test_bad_files_are_explained(files: Path, name: str, old: str, new: str, words: str) -> None:
    path = files / f"{name}.csv"
    path.write_text(path.read_text().replace(old, new))
    read = {
        "windows": lambda: list(read_windows(path, parse_selections("large=a,small=b"), 0, math.inf)),
        "rates": lambda: by_rates(files, "large=a", Slice()),
        "clients": lambda: read_clients(path),
    }[name]
    with pytest.raises(BenchError, match=rf"{name}\.csv(,|:) {words}"):
        read()


def test_what_the_file_does_not_have_is_named(files: Path) -> None:
    with pytest.raises(BenchError, match="knows no 'mid'; its models are large, small"):
        by_windows(files, "mid=a", Slice())
    with pytest.raises(BenchError, match="knows no 'large/99'"):
        by_windows(files, "large/99=a", Slice())
    with pytest.raises(BenchError, match=r"nothing of 'small' from 1200 s.*windows from 600 s up to 1200 s"):
        by_windows(files, "large=b,small=a", Slice(start=1200.0))
    with pytest.raises(BenchError, match="knows no 'mid'"):
        by_rates(files, "mid=a", Slice())
    with pytest.raises(BenchError, match=r"no request of large arrives from 600 s up to 1200 s"):
        by_rates(files, "large=a", Slice(start=600.0, duration=600.0))
    with pytest.raises(BenchError, match=r"large/0: .*rates of whole models"):
        by_rates(files, "large/0=a", Slice())
    with pytest.raises(BenchError, match=r"none\.csv: cannot be read"):
        list(read_windows(files / "none.csv", parse_selections("large=a"), 0, 1))


@pytest.mark.parametrize("text", ["", "large", "large=", "=a", "large/=a", "large=a,small=a"])
def test_bad_selections(text: str) -> None:
    with pytest.raises(BenchError, match=r"MODEL/CLIENT=NAME|names must differ"):
        parse_selections(text)


def test_real_models_keep_their_ratios(traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "servegen.json"
    arguments = ["--models", "m-large=llm-0,m-mid=llm-1,m-small=llm-2", "--start", "180000", "--duration", "1200"]
    arguments += ["--servegen-clients", str(traces / "servegen_multimodel_clients.csv"), "--output", str(output)]
    scale = ["--scale-rate", "0.001", "--scale-tokens", "0.05", "--max-prompt", "100", "--max-output", "20"]
    windows = ["--servegen-windows", str(traces / "servegen_multimodel_client_windows_1day.csv")]
    rates = ["--servegen-rates", str(traces / "servegen_multimodel_rates.csv")]
    totals = []
    for source in (windows, rates):
        assert main([*source, *arguments, *scale]) == 0
        once = output.read_bytes()
        assert main([*source, *arguments, *scale]) == 0
        assert output.read_bytes() == once
        totals.append(Counter(request.model_name for request in read_workload(output).requests))
    # Rates x 1,200 s x 0.001, summed with awk over the two windows of both files.
    for found in totals:
        for model, expected in REAL.items():
            assert found[model] == pytest.approx(expected, abs=4 * math.sqrt(expected))
    capsys.readouterr()


REAL = {"llm-0": 227.43, "llm-1": 1463.83, "llm-2": 783.57}

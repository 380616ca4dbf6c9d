"""Options of `bench.workload` for arrivals and traces: rates, what goes with what."""

from pathlib import Path

import pytest

from forebay.bench.workload import main
from forebay.bench.workload_file import read_workload

MODELS_YAML = "models: [{name: a, rate: 12}, {name: b, rate: 5}, {name: c, rate: 3}]"


@pytest.fixture
def models_yaml(tmp_path: Path) -> str:
    path = tmp_path / "models.yaml"
    path.write_text(MODELS_YAML)
    return str(path)


def rates(output: Path, *arguments: str) -> dict[str, float]:
    assert main([*arguments, "--output", str(output)]) == 0
    return dict(read_workload(output).info.rates)


def test_rates_by_power_law_weights_and_file(
    models_yaml: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, when = tmp_path / "w.json", ["--num-requests", "3"]
    assert rates(output, models_yaml, *when) == pytest.approx({"a": 12, "b": 5, "c": 3})
    assert rates(output, models_yaml, *when, "--total-rate", "2") == pytest.approx({"a": 1.2, "b": 0.5, "c": 0.3})
    law = ["--power-law", "1"]
    assert rates(output, models_yaml, *when, *law) == pytest.approx({"a": 120 / 11, "b": 60 / 11, "c": 40 / 11})
    named = ["--models", "x,y,z", "--total-rate", "11"]
    assert rates(output, *named, *when, *law) == pytest.approx({"x": 6, "y": 3, "z": 2})
    assert rates(output, *named, *when) == pytest.approx({"x": 11 / 3, "y": 11 / 3, "z": 11 / 3})
    weighted = ["--models", "x:3,y", "--total-rate", "2"]
    assert rates(output, *weighted, *when) == pytest.approx({"x": 1.5, "y": 0.5})
    capsys.readouterr()


def test_gaps_and_drift_repeat_bit_for_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--models", "x:3,y", "--total-rate", "8", "--duration", "60", "--gaps", "weibull:3", "--drift", "20"]
    for name in ("first", "second"):
        assert main([*arguments, "--output", str(tmp_path / name)]) == 0
    assert main([*arguments, "--seed", "1", "--output", str(tmp_path / "third")]) == 0
    first, second, third = ((tmp_path / name).read_bytes() for name in ("first", "second", "third"))
    assert first == second
    assert first != third
    assert read_workload(tmp_path / "first").info.distribution == "weibull"
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--azure", "a", "--mooncake", "b", "--models", "x"], "--azure does not go with --mooncake"),
        (["--mooncake", "b"], "--mooncake needs --models name[:weight],..."),
        (["--servegen-rates", "b"], "--servegen-rates needs --models SOURCE=NAME,..."),
        (["--servegen-windows", "b", "--models", "x:3"], "allowed is MODEL=NAME or MODEL/CLIENT=NAME"),
        (["--servegen-windows", "b", "--models", "x=y", "--gaps", "poisson"], "--gaps does not go with --servegen-w"),
        (["--mooncake", "b", "--models", "x", "--drift", "3"], "--drift does not go with --mooncake"),
        (["--azure", "b", "--models", "x", "--total-rate", "3"], "--total-rate does not go with --azure"),
        (["--azure", "b", "--models", "x", "--servegen-clients", "c"], "--servegen-clients goes with"),
        (["m.yaml", "--models", "x", "--duration", "3"], "not with MODELS_YAML"),
        (["--models", "x", "--duration", "3"], "needs --total-rate"),
        (["--models", "x:2", "--total-rate", "3", "--power-law", "1", "--duration", "3"], "does not go with weights"),
        (["m.yaml", "--duration", "3", "--turns"], "--turns needs --dataset"),
        (["m.yaml", "--duration", "3", "--think-time", "3"], "go with --turns only"),
        (["m.yaml", "--duration", "3", "--gaps", "gamma"], "gamma:CV"),
        (["m.yaml", "--duration", "3", "--drift", "0"], "'0' is not allowed"),
    ],
)
def test_what_does_not_go_together_is_said(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())

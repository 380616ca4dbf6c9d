"""The profiler on a real runner: steps by hand, which settings are measured, and the cost file that comes of it."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from forebay.bench import profile as command
from forebay.bench.arithmetic import Ceilings
from forebay.bench.cost_file import Setting, read_cost_file
from forebay.bench.errors import BenchError
from forebay.bench.profile_run import Profile, Row, check_names, print_profile, profile, save_costs, save_figures
from tests.bench.conftest import ROOT
from tests.gpu.driver import write_tiny

CEILINGS = Ceilings(1e10, 1e11)


def tiny_profile(folder: Path, **changes: object) -> Profile:
    settings: dict[str, object] = {
        "models": [("tiny", write_tiny("llama", folder))], "device": "cpu:0", "dtype": "float32", "load_format": "auto",
        "batches": [1, 3], "lengths": [5, 40], "shares": [100], "seconds": 20.0, "memory": 1 << 20, "slab": 1 << 18,
        "step_tokens": 16, "threads": 1,
    }  # fmt: skip
    return Profile(**{**settings, **changes})  # type: ignore[arg-type]


def by_setting(rows: list[Row]) -> dict[tuple[int, int, str], Row]:
    return {(row.setting.batch, row.setting.sequence_length, row.phase): row for row in rows}


def test_all_that_fits_is_measured_and_written(tmp_path: Path) -> None:
    lines: list[str] = []
    ceilings, rows = profile(tiny_profile(tmp_path / "m"), lines.append)
    assert ceilings.bytes_per_s > 1e8
    assert ceilings.operations_per_s > 1e8
    assert len(rows) == 8
    for row in rows:
        assert row.took is not None, row
        assert row.limit_s > 0
        assert 0 < row.took.device_s <= 1.2 * row.took.wall_s
    assert "8 of 8 times measured" in lines[-1]
    # 3 prompts of 40 tokens in steps of 16 cost more than one prompt of 5.
    found = by_setting(rows)
    assert found[3, 40, "prefill"].took.wall_s > found[1, 5, "prefill"].took.wall_s  # type: ignore[union-attr]

    save_costs(tmp_path / "cost.json", rows)
    costs = read_cost_file(tmp_path / "cost.json")
    assert costs.settings("tiny") == [Setting(1, 100, batch, length) for batch in (1, 3) for length in (5, 40)]
    milliseconds = costs.milliseconds("tiny", Setting(1, 100, 3, 40), "decoding")
    assert milliseconds == pytest.approx(1e3 * found[3, 40, "decoding"].took.wall_s, abs=1e-4)  # type: ignore[union-attr]

    out = io.StringIO()
    print_profile(rows, Console(file=out, width=140))
    assert "tiny: measured time beside its limit" in out.getvalue()
    save_figures(tmp_path / "figures.json", ["test"], ceilings, rows)
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert figures["tiny_decoding_100_3_40"]["baseline"] == found[3, 40, "decoding"].limit_s


def test_what_does_not_fit_is_not_measured_and_says_why(tmp_path: Path) -> None:
    # A pool of 256 KiB holds 42 blocks of 6,144 bytes.
    plan = tiny_profile(tmp_path / "m", memory=1 << 18, batches=[1, 10], lengths=[40, 300, 600])
    _, rows = profile(plan, lambda line: None, CEILINGS)
    found = by_setting(rows)
    assert found[1, 40, "decoding"].took is not None
    assert found[10, 40, "decoding"].why == "the KV pool holds 672 tokens"
    assert found[1, 600, "prefill"].why == "the model takes 512 tokens"
    assert found[1, 300, "prefill"].why == "more than 16 steps of prompt"
    save_costs(tmp_path / "cost.json", rows)
    costs = read_cost_file(tmp_path / "cost.json")
    assert costs.milliseconds("tiny", Setting(1, 100, 10, 600), "decoding") is None

    _, rows = profile(tiny_profile(tmp_path / "m", seconds=1e-6), lambda line: None, CEILINGS)
    assert {row.why for row in rows} == {"1e-06 s were over"}


def test_names_must_differ(tmp_path: Path) -> None:
    check_names([("a", tmp_path), ("b", tmp_path)])
    with pytest.raises(BenchError, match="two models are called 'a'"):
        check_names([("a", tmp_path), ("a", tmp_path)])


def test_shares_need_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(tmp_path), "--shares", "50", "--output", str(tmp_path / "c.json")]) == 1
    assert capsys.readouterr().err == "error: --shares 50: cpu:0 has no SMs; leave it out\n"


@pytest.mark.model
@pytest.mark.timeout(200)
def test_a_real_model_from_the_command_line(smollm2: Path, tmp_path: Path) -> None:
    words = ["--batches", "1,4", "--lengths", "32,64", "--dtype", "float32", "--threads", "1", "--memory", "512MiB"]
    ended = subprocess.run(
        [sys.executable, "-m", "bench.profile", f"smollm2={smollm2}", *words, "--output", str(tmp_path / "c.json"),
         "--json", str(tmp_path / "f.json")],
        cwd=ROOT, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "smollm2: measured time beside its limit" in ended.stdout
    costs = read_cost_file(tmp_path / "c.json")
    assert costs.models == ["smollm2"]
    step = {batch: costs.milliseconds("smollm2", Setting(1, 100, batch, 64), "decoding") for batch in (1, 4)}
    assert step[1] is not None
    assert step[4] is not None
    assert 0 < step[1] < 4 * step[4]
    assert json.loads((tmp_path / "f.json").read_text())["benchmark"] == "bench.profile"

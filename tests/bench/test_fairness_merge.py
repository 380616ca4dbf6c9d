"""Runs of one workload each, merged."""

import json
from pathlib import Path

import pytest

from forebay.bench import fairness
from forebay.bench.figures import Figure, write_figures


def run_of(path: Path, ttft: float, failed: float = 0, seeds: float = 1, **more: Figure) -> Path:
    figures = {
        "seeds": Figure(seeds, "1"),
        "fcfs_ttft_p99": Figure(2 * ttft, "s"),
        "fcfs_failed": Figure(0, "1"),
        "cfs-peer_ttft_p99": Figure(ttft, "s", 2 * ttft),
        "cfs-peer_failed": Figure(failed, "1", 0),
        "vtc_tenants_ratio": Figure(1 + ttft / 100, "1", 1.0),
        **more,
    }
    write_figures(path, "bench.fairness", [path.stem], figures)
    return path


def test_every_figure_has_its_mean_and_its_range(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [run_of(tmp_path / f"{ttft}.json", ttft) for ttft in (1.0, 2.0, 6.0)]
    out = tmp_path / "merged.json"
    assert fairness.main(["--merge", *map(str, files), "--json", str(out)]) == 0
    figures = json.loads(out.read_text())["figures"]
    assert figures["cfs-peer_ttft_p99"] == {"value": 3.0, "unit": "s", "baseline": 6.0}
    assert (figures["cfs-peer_ttft_p99_least"]["value"], figures["cfs-peer_ttft_p99_largest"]["value"]) == (1.0, 6.0)
    assert figures["seeds"]["value"] == 3
    printed = capsys.readouterr().out
    assert "3 (1 to 6)" in printed
    assert "1.03 (1.01 to 1.06)" in printed
    run_of(files[0], 1.0, failed=1)
    assert fairness.main(["--merge", *map(str, files)]) == 1, "requests failed"


def test_what_does_not_belong_together_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = run_of(tmp_path / "good.json", 1.0)
    several = run_of(tmp_path / "several.json", 1.0, seeds=3)
    others = run_of(tmp_path / "others.json", 1.0, vtc_failed=Figure(0, "1"))
    garbage = tmp_path / "garbage.json"
    garbage.write_text("{}")
    for arguments, problem in (
        (["--merge", good, several], "'several' is no run of bench.fairness with --seeds 1"),
        (["--merge", good, others], "'others' and 'good' have different figures"),
        (["--merge", good, garbage], "garbage.json: holds no figures"),
        (["--merge", tmp_path / "none.json"], "none.json: cannot be read"),
        (["--merge", good, "--first", "x"], "--first"),
        ([tmp_path, "--first", "-1"], "workloads are counted from 0"),
        ([], "give a MODEL to run, or --merge"),
    ):
        with pytest.raises(SystemExit) as ended:
            fairness.main(list(map(str, arguments)))
        assert ended.value.code == 2
        assert problem in capsys.readouterr().err

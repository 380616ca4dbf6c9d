"""What bench.interference measures: every mode over the CUDA runner on its stand-in, and the command on a CPU."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forebay.bench.errors import BenchError
from forebay.bench.interference_figures import print_table
from forebay.bench.interference_run import Bench, Plan, slabs_for
from forebay.gpu.movable import describe
from forebay.runtime.step_trace import StepTrace
from forebay.sched.partition import PARTITIONS, SPLITS
from tests.bench.conftest import ROOT
from tests.gpu.cuda_stand_in import StandIn, standing_in
from tests.gpu.driver import write_tiny

SLAB = 1 << 20


@pytest.fixture
def plan(tmp_path: Path) -> Iterator[Plan]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    modes = ("none", "streams", "green", "auto")
    yield Plan(
        write_tiny("llama", tmp_path / "m"), "float32", "cuda:0", "auto", modes, models=2, decodes=2, context=5,
        tokens=120, steps=6, prompt=70, prompts=2, step_tokens=32,
    )  # fmt: skip
    torch.set_num_threads(threads)


@pytest.mark.parametrize("models", [1, 2])
def test_every_mode(plan: Plan, models: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = replace(plan, models=models)
    plan.check(list(PARTITIONS))
    described = describe(plan.specs()[0])
    slabs = slabs_for(plan, described, SLAB)
    with standing_in():
        device = StandIn(slabs * SLAB, SLAB)
        try:
            runners = {spec.name: device.load(spec, ("mixed", "decode", "prefill")) for spec in plan.specs()}
            bench = Bench(plan, runners, described.vocabulary, slabs, SLAB)
            bench.warm_up()
            trace = StepTrace(tmp_path / "trace.json", plan.device)
            found = [bench.mode(mode, trace if mode == "green" else None) for mode in plan.modes]
            trace.close()
        finally:
            device.close()
    for one in found:
        assert one.beside.prompt_tokens == 140 or not one.beside.whole
        assert len(one.beside.gaps) >= plan.decodes
        assert len(one.alone.gaps) >= 2 * plan.decodes * plan.steps
        figures = one.figures()
        assert figures[f"tpot_p99_{one.mode}"].value >= figures[f"tpot_p50_{one.mode}"].value > 0  # type: ignore[operator]
        assert figures[f"prefill_{one.mode}"].baseline > 0  # type: ignore[operator]
    # The prompts were read beside the answers: 70 tokens are three chunks of 32.
    assert found[1].beside.chunks == {0: 6}
    assert found[2].beside.chunks.keys() <= {0, SPLITS[0]}
    assert found[2].beside.chunks[SPLITS[0]] >= 4
    steps = [one["args"] for one in json.loads((tmp_path / "trace.json").read_text()) if one["ph"] == "X"]
    assert {step["lane"] for step in steps} == {"decode", "prefill"}
    print_table(plan.title, found)
    assert "green" in capsys.readouterr().out


def test_answers_that_end_too_soon_are_told(plan: Plan) -> None:
    described = describe(plan.specs()[0])
    with standing_in():
        device = StandIn(8 * SLAB, SLAB)
        try:
            short = replace(plan, modes=("none",), tokens=12)
            with pytest.raises(BenchError, match="at least 22 are needed"):
                short.check(list(PARTITIONS))
            runners = {spec.name: device.load(spec) for spec in short.specs()}
            bench = Bench(short, runners, described.vocabulary, 8, SLAB)
            with pytest.raises(BenchError, match=r"none: the answers came to their end .*: raise --tokens"):
                bench.mode("none", None)
        finally:
            device.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modes": ("half",)}, "'half' is unknown; there is: auto, streams, green, none, and shares of the SMs"),
        ({"modes": ("100",)}, "'100' is unknown"),
        ({"modes": ("none", "none")}, "one is named twice"),
        ({"device": "cpu:0", "modes": ("green",)}, "cpu:0 has no SMs to share"),
    ],
)
def test_bad_options_are_refused(plan: Plan, changes: dict[str, object], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        replace(plan, **changes).check(list(PARTITIONS))  # type: ignore[arg-type]


@pytest.mark.model
@pytest.mark.timeout(200)
def test_the_command_on_a_cpu(smollm2: Path, tmp_path: Path) -> None:
    words = "--dtype float32 --threads 1 --decodes 2 --context 16 --tokens 60 --steps 6 --prompt 64 --prompts 2"
    files = ["--json", str(tmp_path / "f.json"), "--trace", str(tmp_path / "t.json")]
    ended = subprocess.run(
        [sys.executable, "-m", "bench.interference", str(smollm2), *words.split(), "--step-tokens", "32", *files],
        cwd=ROOT, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "2 answers after 16 tokens, while prompts of 64 are read by another model" in ended.stdout
    written = json.loads((tmp_path / "f.json").read_text())
    assert written["benchmark"] == "bench.interference"
    assert "--step-tokens 32" in written["command"]
    assert set(written["figures"]) >= {"tpot_p50_none", "tpot_p99_none", "prefill_none"}
    assert all(figure["value"] > 0 < figure["baseline"] for figure in written["figures"].values())
    steps = [one for one in json.loads((tmp_path / "t.json").read_text()) if one["ph"] == "X"]
    assert {step["name"] for step in steps} == {"a", "b"}

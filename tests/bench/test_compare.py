"""The comparison without a model: setups, arms, what is kept, what points say."""

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from forebay.bench.baseline import Baseline, ModelBaseline
from forebay.bench.client import Outcome, RoutedClient
from forebay.bench.compare_arms import ARMS, EXPLAINED, Ours, VllmOptions, configuration, vllm_launches
from forebay.bench.compare_figures import Comparison, reference_baseline
from forebay.bench.compare_folder import ArmState, ComparisonFolder, Point, Sample
from forebay.bench.compare_options import arm_names, build_parser, device_list, setup_of, split_words
from forebay.bench.compare_setup import ComparedModel, Setup, popularity
from forebay.bench.dummy_tokenizer import ensure_tokenizer
from forebay.bench.errors import BenchError
from forebay.runtime.config import load

ONE_SECOND = Baseline({"a": ModelBaseline(0.0, 0.0, 0.1), "b": ModelBaseline(0.0, 0.0, 0.1)})
"""Ten tokens take a second alone."""


def point(arm: str, rate: float, latencies: Sequence[float | None], call: str = "one", model: str = "a") -> Point:
    """Requests of ten tokens with these latencies; None for one that failed."""
    samples = [
        Sample(
            model, 5, 10, 0.0, None if latency is None else latency / 2, latency, "timeout" if latency is None else None
        )
        for latency in latencies
    ]
    return Point(arm, rate, call, 10.0, "complete", tuple(samples), {"timeout": "a: too late"})


def comparison(*points: Point) -> Comparison:
    return Comparison(points, {}, ONE_SECOND, "vllm", [2, 5], 0.9)


def setup(**changes: Any) -> Setup:
    settings: dict[str, Any] = {
        "models": (ComparedModel("llm-0", "/models/0", 2.0), ComparedModel("llm-1", "/models/1", 1.0)),
        "devices": ("cpu:0",), "dtype": "float32", "load_format": "auto", "max_context": 512, "max_sequences": 16,
        "step_tokens": 128, "kv_bytes": 1 << 28, "utilization": 0.8, "seconds": 5.0,
        "workload": ("--models", "llm-0:2,llm-1:1", "--prompt-lengths", "fixed:5", "--output-lengths", "fixed:3"),
    }  # fmt: skip
    return Setup(**{**settings, **changes})


def test_goodput_lies_on_the_line_between_the_rates() -> None:
    found = comparison(
        point("auto", 10, [1.0] * 20), point("auto", 20, [1.0] * 16 + [3.0, 3.0, 3.0, None]),
        point("vllm", 10, [9.0] * 20),
    )  # fmt: skip
    goodput = found.goodput("auto", 2)
    assert goodput is not None
    # 100 % at 10 and 80 % at 20: 90 % half way.
    assert (goodput.rate, goodput.bound) == (pytest.approx(15), "between")
    assert str(found.goodput("auto", 5)) == "≥ 20"
    assert str(found.goodput("vllm", 5)) == "< 10"
    assert found.goodput("adbs", 5) is None
    assert found.attainment(found.of("auto")[1], 5) == 0.95


def test_ratios_say_whether_one_call_measured_both() -> None:
    good, bad = [1.0] * 20, [1.0] * 10 + [9.0] * 10
    points = [
        point(arm, rate, good if rate < limit else bad, call)
        for arm, limit, call in (("auto", 30, "one"), ("vllm", 20, "one"), ("vllm-mps", 20, "two"))
        for rate in (10, 20, 30)
    ]
    found = comparison(*points)
    ratio = found.ratio("auto", "vllm", 5)
    assert ratio is not None
    assert (ratio.value, str(ratio)) == (pytest.approx(22 / 12), "1.83")
    other = found.ratio("auto", "vllm-mps", 5)
    assert other is not None
    assert str(other) == "1.83*"
    assert found.ratio("auto", "adbs", 5) is None


def test_a_ratio_of_bounds_is_a_bound() -> None:
    good, bad = [1.0] * 20, [9.0] * 20
    held = [point("auto", 10, good), point("auto", 20, good)]
    fails = [point("adbs", 10, good), point("adbs", 20, bad)]
    never = [point("vllm", 10, bad), point("vllm", 20, bad)]
    found = comparison(*held, *fails, *never)
    assert str(found.ratio("auto", "adbs", 5)) == "≥ 1.82"
    assert str(found.ratio("adbs", "auto", 5)) == "≤ 0.55"
    assert str(found.ratio("adbs", "vllm", 5)) == "≥ 1.10"
    assert str(found.ratio("vllm", "auto", 5)) == "≤ 0.50"
    assert found.ratio("vllm", "vllm", 5) is None


def test_the_yardstick_is_of_the_first_arm_that_knows_all_models() -> None:
    def state(arm: str, *models: str) -> ArmState:
        baseline = Baseline({name: ModelBaseline(0.0, 0.0, 0.1) for name in models})
        return ArmState(arm, "one", ("x",), None, None, 1.0, None, baseline)

    points = [point("auto", 10, [1.0], model="a"), point("auto", 20, [1.0], model="b")]
    arms = {"auto": state("auto", "a", "b"), "vllm": state("vllm", "a"), "adbs": state("adbs", "a", "b")}
    assert reference_baseline(points, arms)[0] == "adbs"
    with pytest.raises(BenchError, match="no arm has measured what lone requests take"):
        reference_baseline(points, {"vllm": arms["vllm"]})


def test_a_folder_goes_on_and_belongs_to_one_comparison(tmp_path: Path) -> None:
    folder = ComparisonFolder(tmp_path / "c")
    folder.open(setup())
    folder.write_point(point("auto", 12.5, [1.0, None]))
    folder.write_point(Point("auto", 20, "one", 3.0, "server_lost", (), {}))
    folder.write_arm(ArmState("auto", "one", ("x",), None, None, failure="no"))
    folder.open(setup())
    assert [folder.has("auto", rate) for rate in (12.5, 20, 30)] == [True, False, False]
    assert folder.points()[0] == point("auto", 12.5, [1.0, None])
    assert folder.points()[0].outcomes[1].failure == "timeout"
    assert folder.arms()["auto"].failure == "no"
    with pytest.raises(BenchError, match=r"holds another comparison \(dtype is 'float32' there, 'bfloat16' here\)"):
        folder.open(setup(dtype="bfloat16"))
    folder.forget("auto", [12.5, 99])
    assert not folder.has("auto", 12.5)
    (tmp_path / "c" / "points" / "auto-20.json").write_text("{")
    with pytest.raises(BenchError, match=r"auto-20\.json: not a file of this comparison"):
        folder.points()


def test_workloads_of_a_rate_are_the_same_for_every_arm() -> None:
    slow, fast = setup().build(20), setup().build(60)
    assert slow == setup().build(20)
    assert 50 < len(slow.requests) < 150 < len(fast.requests)
    assert slow.arrivals[-1] < 5
    counts = [sum(one.model_name == name for one in fast.requests) for name in ("llm-0", "llm-1")]
    assert counts[0] > 1.4 * counts[1]


def test_servegens_busiest_clients_stand_for_models(tmp_path: Path) -> None:
    windows, clients = tmp_path / "windows.csv", tmp_path / "clients.csv"
    rows = [("m", str(client), start, 0.5 + client) for client in range(4) for start in (1200, 600)]
    windows.write_text(
        "model,client,window_start_s,rate_rps,cv,pattern,shape,scale\n"
        + "".join(f"{model},{client},{start},{rate},1.0,Gamma,1.0,1.0\n" for model, client, start, rate in rows)
    )
    columns = "model,client,requests,input_mean,input_p50,input_p99,output_mean,output_p50,output_p99\n"
    clients.write_text(columns + "".join(f"m,{client},{100 + client},9,8,20,9,8,20\n" for client in range(4)))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    words = [str(folder), "--servegen", str(windows), str(clients), "--models", "2", "--seconds", "30"]
    found = setup_of(build_parser().parse_args(words), [])
    assert found.workload[:4] == ("--models", "m/3=llm-0,m/2=llm-1", "--start", "600")
    workload = found.build(20)
    assert workload.models == ["llm-0", "llm-1"]
    assert len(workload.requests) == 600
    assert workload == found.build(20)
    assert workload.arrivals == sorted(workload.arrivals)
    with pytest.raises(BenchError, match="lists 4 clients, for 5 models"):
        setup_of(build_parser().parse_args([*words, "--models", "5"]), [])


def test_popularity() -> None:
    assert popularity(3, None, None) == [12, 5, 3]
    assert popularity(2, [3, 1], None) == [3, 1]
    six = popularity(6, None, None)
    assert six[0] / six[1] == pytest.approx(2**2.1)
    even = popularity(3, None, 0.0)
    assert even[0] == even[2]
    with pytest.raises(BenchError, match="--weights names 1 for 2 models"):
        popularity(2, [1], None)


def test_the_command_line_makes_a_setup(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 300}')
    words, more = split_words(
        [str(folder), "--load-format", "dummy", "--models", "6", "--drift", "5", "--output", str(tmp_path / "o"),
         "--memory", "2GiB", "--devices", "cuda:1,cuda:0", "--", "--gaps", "gamma:2"]
    )  # fmt: skip
    found = setup_of(build_parser().parse_args(words), more)
    assert [model.name for model in found.models] == [f"llm-{place}" for place in range(6)]
    # Folders of their own: no two models share weights.
    assert len({model.folder for model in found.models}) == 6
    assert all(Path(model.folder, "tokenizer.json").exists() for model in found.models)
    assert not (folder / "tokenizer.json").exists()
    assert found.workload[-2:] == ("--gaps", "gamma:2")
    assert "--drift" in found.workload
    assert (found.devices, found.kv_bytes, found.step_tokens) == (("cuda:1", "cuda:0"), 2 << 30, 2048)
    with pytest.raises(BenchError, match=r"nowhere: holds no config\.json"):
        setup_of(build_parser().parse_args([str(tmp_path / "nowhere")]), [])
    with pytest.raises(BenchError, match="--memory: 'much' is no size"):
        setup_of(build_parser().parse_args([str(folder), "--memory", "much"]), [])
    for parse, text in ((arm_names, "vllm,best"), (device_list, "cpu:0,cuda:0"), (device_list, "tpu:0")):
        with pytest.raises(argparse.ArgumentTypeError):
            parse(text)


@pytest.mark.parametrize("arm", [arm for arm, kind in ARMS.items() if isinstance(kind, Ours)])
def test_our_arms_are_valid_configurations(arm: str, tmp_path: Path) -> None:
    kind = ARMS[arm]
    assert isinstance(kind, Ours)
    models = []
    for name in ("llm-0", "llm-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        models.append(ComparedModel(name, str(tmp_path / name), 1.0))
    found = configuration(arm, kind, setup(devices=("cpu:0", "cpu:1"), models=tuple(models)))
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps(found))
    loaded = load(path)
    assert loaded.policy == kind.policy
    assert [model.placement for model in loaded.models] == [("cpu:0",), ("cpu:1",) if kind.spread else ("cpu:0",)]
    assert len(loaded.devices) == (2 if kind.spread else 1)
    on_gpu = configuration(arm, kind, setup(devices=("cuda:0", "cuda:1"), load_format="dummy"))
    assert on_gpu["devices"][0]["partition"] == kind.partition
    assert on_gpu["models"][0]["load_format"] == "dummy"
    if kind.spread:
        with pytest.raises(BenchError, match="skipped: spatial needs a device for each of the 2 models"):
            configuration(arm, kind, setup())


def test_keys_of_our_configuration_can_be_set() -> None:
    ours = (("device.spill", "8MiB"), ("model.dtype", "bfloat16"), ("timeouts", "{stop: 3}"))
    found = configuration("auto", Ours("adbs", "auto"), setup(ours=ours))
    assert found["devices"][0]["spill"] == "8MiB"
    assert [model["dtype"] for model in found["models"]] == ["bfloat16", "bfloat16"]
    assert found["timeouts"] == {"stop": 3}
    words = ["m", "--set", "device.spill=8MiB", "--set", "costs=c.json"]
    assert build_parser().parse_args(words).set == [("device.spill", "8MiB"), ("costs", "c.json")]


def test_every_arm_is_explained() -> None:
    assert list(EXPLAINED) == list(ARMS)


def test_a_vllm_engine_gets_its_part(tmp_path: Path) -> None:
    options = VllmOptions(Path(sys.executable), more="--enforce-eager", kv_bytes=5)
    launches = vllm_launches("vllm", setup(devices=("cuda:3",)), options, tmp_path, {"A": "b"})
    words = list(launches[1].command)
    assert words[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    pairs = dict(itertools.pairwise(words))
    assert pairs["--served-model-name"] == "llm-1"
    assert pairs["--model"] == "/models/1"
    assert pairs["--gpu-memory-utilization"] == "0.4"
    assert pairs["--kv-cache-memory-bytes"] == "5"
    assert "--enforce-eager" in words
    assert launches[1].url == f"http://127.0.0.1:{pairs['--port']}"
    assert launches[0].environment["CUDA_VISIBLE_DEVICES"] == "3"
    assert launches[0].environment["A"] == "b"
    with pytest.raises(BenchError, match=r"--vllm-command .*cannot be filled in \('gpu'\); in braces may stand python"):
        vllm_launches("vllm", setup(), VllmOptions(Path(sys.executable), "serve {gpu}"), tmp_path, {})
    with pytest.raises(BenchError, match="--vllm nowhere/python: no program"):
        vllm_launches("vllm", setup(), VllmOptions(Path("nowhere/python")), tmp_path, {})


def test_a_made_up_tokenizer_knows_every_id(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    assert ensure_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 300
    assert tokenizer.decode([0, 299]) == "w0 w299"
    assert tokenizer.encode("w17 w4").ids == [17, 4]
    assert not ensure_tokenizer(tmp_path)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "config.json").write_text("{}")
    with pytest.raises(BenchError, match="no vocab_size"):
        ensure_tokenizer(tmp_path / "x")


async def test_each_models_requests_go_to_its_server(server: str, mortal_server: str) -> None:
    async with RoutedClient({"steady": server, "other": mortal_server}, 20.0) as client:
        for model in ("steady", "other"):
            outcome = Outcome(model, 2, 3, scheduled=0.0)
            await client.complete(outcome, [1, 2])
            assert outcome.failure is None
        assert await client.is_listening()
        fatal = RoutedClient({"fatal": mortal_server}, 20.0)
        async with fatal:
            await fatal.complete(Outcome("fatal", 2, 3, scheduled=0.0), [1, 2])
        assert not await client.is_listening()

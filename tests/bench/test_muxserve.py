"""MuxServe's configuration and launch command: what is honoured, noted and refused, by name; and one whole run."""

import json
import os
import select as selecting
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from forebay.bench import muxserve
from forebay.bench.errors import BenchError
from forebay.bench.muxserve_config import MuxServeConfig, MuxServeModel, read_muxserve_config, select
from forebay.bench.muxserve_translation import Target, check_models, find_target, notes, split, translate
from forebay.bench.workload_file import Workload, write_workload
from forebay.runtime.config import parse
from tests.bench.conftest import ROOT, RequestRow

Make = Callable[[Sequence[RequestRow]], Workload]

GIB = 1 << 30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Looks like a model's folder: enough for everything but serving."""
    model = tmp_path / "llama"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return model


def model(folder: Path, name: str, placement: list[list[int]], **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "model": str(folder),
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "placement": placement,
        "mps_percentage": [100, 30],
        "model_dtype": "fp16",
        **changes,
    }


def content(folder: Path) -> dict[str, Any]:
    return {
        "num_gpus": 2,
        "max_num_seqs": 256,
        "overload_threshold": 3,
        "gpu_memory_utilization": 0.4,
        "models": [model(folder, "llm-0", [[0], [1]]), model(folder, "llm-1", [[1]], max_num_seqs=7)],
        "workloads": {"workload_file": None},
    }


Write = Callable[[dict[str, Any]], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to_file(raw: dict[str, Any]) -> Path:
        path = tmp_path / "model_config.yaml"
        path.write_text(yaml.safe_dump(raw))
        return path

    return to_file


def read(path: Path, split_by_model: str | None = None) -> tuple[MuxServeConfig, list[MuxServeModel], list[str]]:
    config, remarks = read_muxserve_config(path)
    models, more = select(path, config, split_by_model)
    return config, models, remarks + more


def test_translation_is_a_configuration_of_forebays(folder: Path, write: Write, make_workload: Make) -> None:
    config, models, remarks = read(write(content(folder)))
    assert remarks == []
    workload = make_workload([("llm-0", 0, 3, 2), ("llm-0", 1, 3, 2), ("llm-0", 2, 3, 2)])
    raw = translate(config, models, workload, Target("cpu", 10 * GIB), "fcfs")
    configuration = parse(raw, "test", folder)
    assert configuration.policy == "temporal"
    assert [device.device for device in configuration.devices] == ["cpu:0", "cpu:1"]
    # 0.4 of 10 GiB, in whole slabs.
    assert {device.memory for device in configuration.devices} == {4 * GIB}
    assert [
        (m.name, m.placement, m.popularity, m.dtype, m.max_sequences, m.step_tokens) for m in configuration.models
    ] == [
        ("llm-0", ("cpu:0", "cpu:1"), 3.0, "float16", 256, 256),
        ("llm-1", ("cpu:1",), 1.0, "float16", 7, 256),
    ]
    assert configuration.models[0].path == str(folder)


def test_translation_for_gpus_and_large_workloads(folder: Path, write: Write, make_workload: Make) -> None:
    raw = content(folder)
    raw["models"][0] |= {"placement": [[1]], "model_dtype": "bf16"}
    config, models, _ = read(write(raw))
    workload = make_workload([("llm-0", 0, 1, 1)] * 300)
    translated = translate(config, models, workload, Target("cuda", 800 * GIB), "adbs")
    # Only GPU 1 holds models. 320 GiB in at most 512 slabs.
    assert translated["devices"] == [{"device": "cuda:1", "memory": 320 * GIB, "slab": GIB}]
    assert (translated["policy"], translated["queue_bound"]) == ("adbs", 300)
    assert [(m["dtype"], m["step_tokens"]) for m in translated["models"]] == [("bfloat16", 2048), ("float16", 2048)]
    tiny = translate(config, models, workload, Target("cpu", 1 << 20), "fix-adbs")
    assert tiny["devices"][0]["memory"] == 32 << 20  # a pool has at least one slab


def test_what_has_no_meaning_is_noted(folder: Path, write: Write) -> None:
    raw = content(folder) | {"block_size": 16}
    raw["models"][1]["rate"] = 5
    raw["workloads"] |= {"dataset": "d.json", "arrival_rates": [20, 20.5], "duration": 1000, "num_requests": 10}
    config, models, remarks = read(write(raw))
    assert [remark.partition("yaml: ")[2] for remark in remarks] == [
        "block_size is no key of MuxServe's; ignored",
        "models[1].rate is no key of MuxServe's; ignored",
    ]
    found = "\n".join(notes(config, models, Target("cpu", GIB)))
    assert "mps_percentage: SM shares have no meaning on a CPU device" in found
    assert "overload_threshold: not used" in found
    assert "workloads: dataset, arrival_rates, duration, num_requests: not used" in found
    assert "fp16 is computed as such" in found
    on_gpus = "\n".join(notes(config, models, Target("cuda", GIB)))
    assert "mps_percentage: fixed SM shares are not applied" in on_gpus
    assert "fp16" not in on_gpus


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_gpus": 0}, r"num_gpus: is 0; expected `int` >= 1"),
        ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization: is 1.5; expected `float` <= 1.0"),
        ({"models": []}, r"models: expected `array` of length >= 1"),
        ({"max_num_seqs": "many"}, r"max_num_seqs: is 'many'; expected `int`"),
        ({"workloads": {"arrival_rates": [1, -1]}}, r"workloads.arrival_rates\[1\]: is -1; expected `float` >= 0"),
    ],
)
def test_bad_values_are_named(folder: Path, write: Write, change: dict[str, Any], words: str) -> None:
    with pytest.raises(BenchError, match=rf"model_config\.yaml: {words}"):
        read_muxserve_config(write(content(folder) | change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"placement": 0}, r"models\[0\].placement: is 0; expected `array`"),
        ({"placement": [[]]}, r"models\[0\].placement\[0\]: expected `array` of length >= 1"),
        ({"mps_percentage": [100, 35]}, r"models\[0\].mps_percentage\[1\]: is 35; expected `int` that's a multiple"),
        ({"mps_percentage": [0]}, r"models\[0\].mps_percentage\[0\]: is 0; expected `int` >= 10"),
        ({"model_dtype": "int4"}, r"models\[0\].model_dtype: is 'int4'; invalid enum"),
        ({"name": "llm-1"}, r"models: the name 'llm-1' appears twice"),
    ],
)
def test_bad_values_of_models_are_named(folder: Path, write: Write, change: dict[str, Any], words: str) -> None:
    raw = content(folder)
    raw["models"][0] |= change
    with pytest.raises(BenchError, match=rf"model_config\.yaml: {words}"):
        read_muxserve_config(write(raw))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pipeline_parallel_size": 2, "placement": [[0, 1]]}, "pipeline_parallel_size: is 2; only 1 can be served"),
        ({"tensor_parallel_size": 2, "placement": [[0, 1]]}, "tensor_parallel_size: is 2; only 1 .*such as [[0], [1]]"),
        ({"placement": [[0, 1]]}, "placement[0]: is [0, 1]; .* 1: one list for each replica"),
        ({"placement": [[0], [4]]}, "placement[1]: names GPU 4; num_gpus is 2: 0 to 1 are allowed"),
        ({"placement": [[0], [0]]}, "placement: names GPU 0 twice"),
        ({"model": "huggyllama/llama-7b"}, "model: is 'huggyllama/llama-7b'; .* has no config.json"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    folder: Path, write: Write, change: dict[str, Any], words: str
) -> None:
    raw = content(folder)
    raw["models"][1] |= change
    path = write(raw)
    expression = ".*".join(part.replace("[", r"\[").replace("]", r"\]") for part in words.split(".*"))
    with pytest.raises(BenchError, match=rf"model_config\.yaml: models\[1\] \(llm-1\): {expression}") as caught:
        read(path)
    assert len(str(caught.value).splitlines()) == 1
    # What is not served need not be servable.
    assert [model.name for model in read(path, "llm-0")[1]] == ["llm-0"]


def test_all_refusals_come_at_once(folder: Path, write: Write) -> None:
    raw = content(folder)
    raw["models"][0] |= {"tensor_parallel_size": 2, "placement": [[2, 3]]}
    raw["models"][1] |= {"model": "nowhere"}
    with pytest.raises(BenchError) as caught:
        read(write(raw))
    assert len(str(caught.value).splitlines()) == 3


def test_split_by_model(folder: Path, write: Write, make_workload: Make) -> None:
    raw = content(folder)
    _, models, remarks = read(write(raw), "llm-1")
    assert ([m.name for m in models], remarks) == (["llm-1"], [])
    with pytest.raises(BenchError, match=r"'llm-9' is not among the models of .*: llm-0, llm-1"):
        read(write(raw), "llm-9")
    # MuxServe's own spatial examples call the only model of each file llm-0.
    raw["models"] = raw["models"][:1]
    _, models, remarks = read(write(raw), "llm-2")
    assert [m.name for m in models] == ["llm-2"]
    assert "calls its only model 'llm-0'; served as 'llm-2'" in remarks[0]

    workload = make_workload([("a", 0.5, 3, 2), ("b", 0.7, 4, 2), ("a", 0.9, 5, 2)])
    part = split(workload, "a", "w.json")
    assert part.arrivals == [0.5, 0.9]
    assert [(request.model_name, request.prompt_tokens) for request in part.requests] == [("a", 3), ("a", 5)]
    with pytest.raises(BenchError, match=r"w\.json has no request for 'c'; it has some for a, b"):
        split(workload, "c", "w.json")
    with pytest.raises(BenchError, match=r"w\.json: asks for 'a', which .* it serves llm-2"):
        check_models(workload, models, "w.json")


def test_cpu_devices_divide_the_machines_memory() -> None:
    whole = find_target("cpu", 1)
    assert whole.kind == "cpu"
    assert find_target("cpu", 4).memory_bytes == whole.memory_bytes // 4
    with pytest.raises(BenchError, match=r"--device: num_gpus is 1000, and \d+ CUDA devices are visible"):
        find_target("cuda", 1000)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nnodes", "2"], "argument --nnodes: 2 is not allowed; 1 is"),
        (["--node-rank", "1"], "argument --node-rank: 1 is not allowed; 0 is"),
        (["--schedule-approach", "sjf"], "invalid choice: 'sjf'"),
        (["--server-port", "70000"], "'70000' is not allowed; a port from 0 to 65535 is"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
    ],
)
def test_usage_errors(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        muxserve.main(["c.yaml", *arguments])
    assert caught.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_errors_before_the_start(
    folder: Path, write: Write, make_workload: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(content(folder))
    write_workload(tmp_path / "w.json", make_workload([("llm-0", 0, 3, 2), ("llm-7", 0, 3, 2)]))

    def error_of(*arguments: str) -> str:
        common = [str(path), "--device", "cpu", "--output", str(tmp_path / "r.json")]
        assert muxserve.main([*common, *arguments]) == 1
        return capsys.readouterr().err

    assert "workloads.workload_file is empty; give --workload-file" in error_of()
    with_file = ["--workload-file", str(tmp_path / "w.json")]
    assert "asks for 'llm-7', which the configuration does not serve; it serves llm-0, llm-1" in error_of(*with_file)
    assert "--nproc_per_node: is 3; " in error_of(*with_file, "--nproc_per_node", "3")
    noted = error_of(*with_file, "--nnodes=1", "--node-rank=0", "--master-addr=10.0.0.1", "--mps-dir", "m")
    for option in ("--nnodes", "--node-rank", "--master-addr", "--mps-dir"):
        assert f"note: {option}: " in noted
    twice = content(folder)
    twice["workloads"]["workload_file"] = "other.json"
    write(twice)
    assert "has workloads.workload_file 'other.json' too; give one of them" in error_of(*with_file)
    assert "other.json: cannot be read: No such file" in error_of()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.system
@pytest.mark.timeout(240)
def test_both_recipes_with_our_module_names(smollm2: Path, write: Write, tmp_path: Path) -> None:
    """A workload from text, then MuxServe's launch line: all models together, then one alone (spatial)."""
    raw = content(smollm2) | {"gpu_memory_utilization": 0.02, "max_num_seqs": 16}
    for entry in raw["models"]:
        entry["model_dtype"] = "fp32"
    path = write(raw)
    models_yaml, sharegpt, workload = tmp_path / "models.yaml", tmp_path / "sharegpt.json", tmp_path / "workload.json"
    models_yaml.write_text(
        yaml.safe_dump(
            {
                "cluster": {"nnodes": 1, "ngpus_per_node": 2},
                "models": [{"name": f"llm-{i}", "model": str(smollm2), "rate": rate} for i, rate in ((0, 6), (1, 2))],
            }
        )
    )
    turns = [{"from": "human", "value": "Why is the sky blue, and the sunset red?"}, {"from": "gpt", "value": "Light."}]
    turns[1]["value"] = "Blue light is scattered more."
    sharegpt.write_text(json.dumps([{"id": "0", "conversations": turns}]))

    def run(module: str, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", module, *map(str, arguments)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=200,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    made = run(
        "bench.workload", "--dataset-source", sharegpt, "--workload_info_from_yaml", "True",
        "--output-file", workload, "--model-yaml", models_yaml, "--num-requests", "8",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    port = free_port()
    launch = [
        path, "--nnodes=1", "--node-rank=0", "--master-addr=127.0.0.1", "--nproc_per_node=2",
        "--server-port", str(port), "--flexstore-port", "50025", "--workload-file", workload, "--device", "cpu",
    ]  # fmt: skip
    together = run("bench.muxserve", *launch, "--output", tmp_path / "all.json")
    assert together.returncode == 0, together.stderr
    report = json.loads((tmp_path / "all.json").read_text())
    assert (report["total"]["requests"], report["total"]["completed"]) == (8, 8)
    assert report["base_url"] == f"http://127.0.0.1:{port}"
    assert "TTFT s" in together.stdout
    assert "note: --flexstore-port: " in together.stderr
    assert "server: ended with status 0" in together.stderr

    alone = run(
        "bench.muxserve", *launch, "--split-by-model", "llm-0", "--schedule-approach", "fcfs",
        "--output", tmp_path / "alone.json",
    )  # fmt: skip
    assert alone.returncode == 0, alone.stderr
    split_report = json.loads((tmp_path / "alone.json").read_text())
    assert set(split_report["models"]) == {"llm-0"}
    assert split_report["total"]["requests"] == report["models"]["llm-0"]["requests"]
    assert yaml.safe_load((tmp_path / "alone.yaml").read_text())["policy"] == "temporal"


@pytest.mark.system
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("victim", "number", "code", "ended"),
    [("server", signal.SIGKILL, 1, "server_lost"), ("command", signal.SIGINT, 130, "interrupted")],
)
def test_an_end_in_mid_run_leaves_a_partial_report(
    smollm2: Path,
    write: Write,
    make_workload: Make,
    tmp_path: Path,
    victim: str,
    number: signal.Signals,
    code: int,
    ended: str,
) -> None:
    raw = content(smollm2) | {"gpu_memory_utilization": 0.02, "max_num_seqs": 16, "num_gpus": 1}
    raw["models"] = [model(smollm2, "llm-0", [[0]], model_dtype="fp32")]
    workload = make_workload([("llm-0", 0, 5, 2), ("llm-0", 0.1, 5, 400), ("llm-0", 3600, 5, 2)])
    write_workload(tmp_path / "w.json", workload)
    files = ["--workload-file", str(tmp_path / "w.json"), "--output", str(tmp_path / "r.json")]
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.muxserve", str(write(raw)), *files, "--device", "cpu"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("replay: 2/3 sent"):
            break
    [server] = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    offspring = [server, *map(int, Path(f"/proc/{server}/task/{server}/children").read_text().split())]
    descriptors = [os.pidfd_open(pid) for pid in offspring]
    os.kill(server if victim == "server" else process.pid, number)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == code, errors
    assert f"the replay ended early ({ended}); the report is partial" in errors
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["ended"] == ended
    assert (report["total"]["requests"], report["total"]["failures"]["not_sent"]) == (3, 1)
    for descriptor in descriptors:
        assert selecting.select([descriptor], [], [], 0)[0], "a process of the server's outlived the command"
        os.close(descriptor)

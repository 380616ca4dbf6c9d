"""MuxServe's words for `bench.workload`: the same as ours, its defaults, and conflicts by name."""

import json
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from forebay.bench.workload import main
from forebay.bench.workload_file import read_workload


def make_tokenizer(folder: Path, first: int) -> Path:
    """A tokenizer of whole words, w0 being the id `first`."""
    vocabulary = {"<unk>": 0, **{f"w{number}": first + number for number in range(2000)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def text(count: int) -> str:
    return " ".join(f"w{number}" for number in range(count))


@pytest.fixture
def sharegpt(tmp_path: Path) -> Path:
    """Three conversations, of which the last two are too long for MuxServe's limits."""
    path = tmp_path / "sharegpt.json"
    path.write_text(
        json.dumps(
            [
                {"conversations": [{"from": "human", "value": text(prompt)}, {"from": "gpt", "value": text(answer)}]}
                for prompt, answer in ((5, 6), (1025, 6), (5, 1025))
            ]
        )
    )
    return path


def write_models(tmp_path: Path, small: Path | str, large: Path | str) -> Path:
    path = tmp_path / "models.yaml"
    path.write_text(
        f"cluster: {{nnodes: 1, ngpus_per_node: 4}}\nmodels:\n- {{name: llm-0, model: {small}, rate: 10}}\n"
        f"- {{name: llm-1, model: {large}, rate: 5}}\n"
    )
    return path


def test_its_command_line_with_its_defaults(tmp_path: Path, sharegpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small, large = make_tokenizer(tmp_path / "small", 1), make_tokenizer(tmp_path / "large", 5000)
    output = tmp_path / "made.json"
    recipe = ["--dataset-source", str(sharegpt), "--workload_info_from_yaml", "True", "--output-file", str(output)]
    recipe += ["--model-yaml", str(write_models(tmp_path, small, large))]
    assert main(recipe) == 0
    assert f"{output}: " in capsys.readouterr().out
    workload = read_workload(output)
    # 200 requests of the busiest model: 20 s at its 10 a second.
    assert workload.info.duration == 20
    counts = Counter(request.model_name for request in workload.requests)
    assert counts["llm-0"] == pytest.approx(200, abs=57)  # four standard deviations
    assert counts["llm-1"] == pytest.approx(100, abs=40)
    # Each model's prompts are in its own tokens; longer texts than 1,024 tokens are left out.
    assert {(r.model_name, tuple(r.prompt), r.output_tokens) for r in workload.requests} == {
        ("llm-0", (1, 2, 3, 4, 5), 6),
        ("llm-1", (5000, 5001, 5002, 5003, 5004), 6),
    }
    assert main([*recipe, "--tokenizer", str(large), "--num-requests", "40", "--max-output", "2000"]) == 0
    workload = read_workload(output)
    assert len(workload.requests) == 40
    assert {(r.prompt[0], r.output_tokens) for r in workload.requests} == {(5000, 6), (5000, 1025)}


def test_the_longest_duration_is_its_own(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text("models: [{name: llm-0, model: nowhere, rate: 0.01}]")
    assert main(["--model-yaml", str(path), "--output-file", str(tmp_path / "made.json")]) == 0
    assert read_workload(tmp_path / "made.json").info.duration == 1000


def test_names_on_a_hub_need_a_tokenizer(tmp_path: Path, sharegpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_models(tmp_path, make_tokenizer(tmp_path / "small", 1), "huggyllama/llama-13b")
    assert main(["--model-yaml", str(path), "--dataset-source", str(sharegpt)]) == 1
    error = capsys.readouterr().err
    assert "model 'llm-1': 'huggyllama/llama-13b' is no local folder with a tokenizer.json" in error
    assert "--tokenizer FOLDER" in error
    assert main(["--model-yaml", str(tmp_path / "none.yaml"), "--dataset-source", str(sharegpt)]) == 1
    assert "none.yaml: cannot be read: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["m.yaml", "--model-yaml", "n.yaml"], "--model-yaml and MODELS_YAML are the same; give one of them"),
        (["--model-yaml", "m.yaml", "--dataset", "d", "--dataset-source", "d"], "--dataset-source and --dataset are"),
        (["m.yaml", "--output", "o", "--output-file", "p"], "--output-file and --output are the same"),
        (["--model-yaml", "m.yaml", "--workload_info_from_yaml", "False"], "invalid choice: 'False'"),
        (["--workload_info_from_yaml", "True"], "--workload_info_from_yaml needs --model-yaml FILE"),
    ],
)
def test_conflicts_are_named(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_its_words_do_not_go_with_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_models(tmp_path, "a", "b")
    with pytest.raises(SystemExit):
        main(["--model-yaml", str(path), "--duration", "5", "--azure", "a.csv", "--models", "a"])
    assert "MODELS_YAML does not go with --azure" in capsys.readouterr().err

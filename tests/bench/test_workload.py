"""Generated workloads: repeatable, of the rates and lengths asked for; the command line."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from forebay.bench.draws import Draws
from forebay.bench.errors import BenchError
from forebay.bench.generate import generate
from forebay.bench.lengths import Lengths, RandomPrompts, Vocabulary, load_tokenizer
from forebay.bench.models_file import ModelLoad, read_models_file
from forebay.bench.sharegpt import ShareGPTPrompts, read_sharegpt
from forebay.bench.workload import main
from forebay.bench.workload_file import Workload, read_workload
from tests.bench.conftest import ROOT

MODELS = [ModelLoad("llm-0", 12), ModelLoad("llm-1", 5), ModelLoad("llm-2", 3)]
MODELS_YAML = """
cluster: {nnodes: 1, ngpus_per_node: 2}
models:
- {name: llm-0, model: some/folder, rate: 12}
- {name: llm-1, model: some/folder, rate: 5, avg_prompt_len: 30, avg_output_len: 7}
- {name: llm-2, model: some/folder, rate: 3}
"""


def small(seed: int, prompt: str = "fixed:3", **when: float | None) -> Workload:
    source = RandomPrompts(Vocabulary(range(50, 60)), Lengths.parse(prompt), Lengths.parse("uniform:1:9"))
    return generate(MODELS, lambda _: source, seed=seed, **when)  # type: ignore[arg-type]


def test_raw_draws_are_pinned() -> None:
    # Written down once: another numpy, machine or Python must draw the same numbers.
    draws = Draws(7, "arrivals")
    assert [draws.uniform() for _ in range(3)] == PINNED_UNIFORM
    assert draws.many_below(1000, 4).tolist() == PINNED_BELOW
    assert Draws(7, "lengths").uniform() != PINNED_UNIFORM[0]


PINNED_UNIFORM = [0.7705745669875722, 0.9031922063274301, 0.31488092079718477]
PINNED_BELOW = [163, 668, 235, 861]


def test_poisson_arrivals_have_the_rates_asked_for() -> None:
    workload = small(1, duration=1000.0)
    counts = dict(zip([model.name for model in MODELS], workload.info.num_requests or [], strict=True))  # type: ignore[arg-type]
    for model in MODELS:
        expected = model.rate * 1000
        assert abs(counts[model.name] - expected) < 4 * math.sqrt(expected)
    assert workload.arrivals == sorted(workload.arrivals)
    assert workload.arrivals[0] >= 0
    assert workload.arrivals[-1] < 1000
    # Of one model alone the gaps are exponential too: their standard deviation equals their mean.
    times = [t for t, r in zip(workload.arrivals, workload.requests, strict=True) if r.model_name == "llm-2"]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert deviation / mean == pytest.approx(1, abs=0.08)


def test_seed_and_lengths_are_independent_of_arrivals() -> None:
    assert small(1, num_requests=200) == small(1, num_requests=200)
    assert small(1, num_requests=200).arrivals != small(2, num_requests=200).arrivals
    longer = small(1, prompt="fixed:30", num_requests=200)
    assert longer.arrivals == small(1, num_requests=200).arrivals
    assert len(longer.requests) == 200
    assert all(len(request.prompt) == 30 for request in longer.requests)
    with pytest.raises(BenchError, match="no request arrives within"):
        small(1, duration=1e-6)


@pytest.mark.parametrize(
    ("text", "mean", "low", "high"),
    [("fixed:17", 17, 17, 17), ("uniform:10:20", 15, 10, 20), ("lognormal:100:0.5", 100, 1, 5000)],
)
def test_distributions(text: str, mean: float, low: int, high: int) -> None:
    draws = Draws(3, "test")
    lengths = [Lengths.parse(text).draw(draws) for _ in range(20000)]
    assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=0.02)
    assert low <= min(lengths)
    assert max(lengths) <= high
    if text.startswith("uniform"):
        assert {min(lengths), max(lengths)} == {10, 20}
    if text.startswith("lognormal"):
        logarithms = [math.log(length) for length in lengths]
        centre = sum(logarithms) / len(logarithms)
        spread = math.sqrt(sum((value - centre) ** 2 for value in logarithms) / len(logarithms))
        assert spread == pytest.approx(0.5, rel=0.03)
    doubled = [Lengths.parse(text).with_mean(2 * mean).draw(draws, maximum=2 * high) for _ in range(20000)]
    assert sum(doubled) / len(doubled) == pytest.approx(2 * mean, rel=0.02)
    assert Lengths.parse(text).draw(draws, maximum=4) <= 4


@pytest.mark.parametrize("text", ["fixed", "fixed:0", "normal:3:4", "uniform:5:4", "lognormal:10", "fixed:x"])
def test_bad_distributions_are_named(text: str) -> None:
    with pytest.raises(BenchError, match=rf"'{text}'.*fixed:N, lognormal:MEAN:SIGMA"):
        Lengths.parse(text)


def test_models_file_errors(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    for content, words in [
        ("models: []", "models"),
        ("models: [{name: a, rate: -1}]", r"models\[0\].rate"),
        ("models: [{rate: 1}]", "name"),
        ("models: [{name: a, rate: 1}, {name: a, rate: 2}]", "'a' appears twice"),
        ("models: [{name: a, rate: 0}]", "every rate is 0"),
        ("models: [{", "not YAML"),
        ("models: [{name: a, rate: 1}]\ncluster: {nnodes: 0, ngpus_per_node: 1}", "nnodes"),
    ]:
        path.write_text(content)
        with pytest.raises(BenchError, match=rf"models\.yaml.*{words}"):
            read_models_file(path)


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    """A tokenizer of whole words: w0 .. w99, with two special tokens at 0 and 1."""
    vocabulary = {"<s>": 0, "<unk>": 1, **{f"w{number}": number + 2 for number in range(100)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "<unk>"])
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def words(first: int, count: int) -> str:
    return " ".join(f"w{number}" for number in range(first, first + count))


def conversation(*turns: tuple[str, str]) -> dict[str, object]:
    return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in turns]}


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "sharegpt.json"
    path.write_text(
        json.dumps(
            [
                conversation(("human", words(0, 5)), ("gpt", words(10, 6)), ("human", "w1"), ("gpt", "w2")),
                conversation(("gpt", words(0, 9)), ("human", words(20, 8)), ("gpt", words(0, 20))),
                conversation(("human", words(0, 3)), ("gpt", words(0, 9))),  # prompt too short
                conversation(("human", words(0, 9)), ("gpt", words(0, 3))),  # answer too short
                conversation(("human", words(0, 9))),  # no answer
                conversation(("human", words(0, 50)), ("gpt", words(0, 10))),  # too long with --max-prompt 40
            ]
        )
    )
    return path


def test_sharegpt_pairs_and_filters(dataset: Path, tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    pairs = read_sharegpt(dataset, tokenizer, max_prompt=40)
    assert pairs == [([2, 3, 4, 5, 6], 6), (list(range(22, 30)), 20)]
    assert [len(prompt) for prompt, _ in read_sharegpt(dataset, tokenizer)] == [5, 8, 50]
    assert read_sharegpt(dataset, tokenizer, max_prompt=40, max_output=10) == pairs[:1]
    with pytest.raises(BenchError, match=r"none of its 6 conversations.*--max-prompt 4"):
        read_sharegpt(dataset, tokenizer, max_prompt=4)
    source, draws = ShareGPTPrompts(pairs), Draws(0, "test")
    for _ in range(10):
        assert sorted(source.draw(draws) for _ in pairs) == sorted(pairs)


def test_vocabulary_of_a_tokenizer_leaves_out_special_tokens(tokenizer_folder: Path) -> None:
    tokens = Vocabulary.of_tokenizer(load_tokenizer(tokenizer_folder)).draw(Draws(0, "test"), 5000)
    assert set(tokens) == set(range(2, 102))


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench.workload", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True
    )


def test_command_from_the_checkout_repeats_bit_for_bit(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text(MODELS_YAML)
    for name in ("first.json", "second.json"):
        done = run(tmp_path / "models.yaml", "--duration", "20", "--seed", "9", "--output", tmp_path / name)
        assert done.returncode == 0, done.stderr
        assert "requests for 3 models over 20.0 s" in done.stdout
    assert (tmp_path / "first.json").read_bytes() == (tmp_path / "second.json").read_bytes()


def test_command_with_dataset_and_averages(
    tmp_path: Path, dataset: Path, tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models_yaml = tmp_path / "models.yaml"
    models_yaml.write_text(MODELS_YAML)
    output = tmp_path / "workload.json"
    text = ["--dataset", str(dataset), "--tokenizer", str(tokenizer_folder)]
    assert main([str(models_yaml), "--num-requests", "50", "--output", str(output), *text]) == 0
    workload = read_workload(output)
    assert workload.info.use_share_gpt is True
    assert {(r.prompt_tokens, r.output_tokens) for r in workload.requests} == {(5, 6), (8, 20), (50, 10)}
    fixed = ["--prompt-lengths", "fixed:4", "--output-lengths", "fixed:2", "--vocabulary", "90:91"]
    assert main([str(models_yaml), "--num-requests", "50", "--output", str(output), *fixed]) == 0
    lengths = {(r.model_name, r.prompt_tokens, r.output_tokens) for r in read_workload(output).requests}
    assert lengths == {("llm-0", 4, 2), ("llm-1", 30, 7), ("llm-2", 4, 2)}
    assert {token for r in read_workload(output).requests for token in r.prompt} == {90}
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "words_of_error"),
    [
        ([], "MODELS_YAML, --models with --total-rate, or a trace (--azure, --mooncake, --servegen-rates"),
        (["m.yaml"], "exactly one of --duration and --num-requests"),
        (["m.yaml", "--duration", "1", "--num-requests", "1"], "exactly one of"),
        (["m.yaml", "--duration", "0"], "'0' is not allowed; a number above 0 is"),
        (["m.yaml", "--duration", "1", "--vocabulary", "9:3"], "LOW:HIGH"),
        (["m.yaml", "--duration", "1", "--prompt-lengths", "mean:3"], "fixed:N"),
        (["--azure", "a.csv"], "--azure needs --models"),
        (["--azure", "a.csv", "--models", "a:0"], "weights above 0"),
        (["m.yaml", "--azure", "a.csv", "--models", "a"], "MODELS_YAML does not go with --azure"),
    ],
)
def test_usage_errors(arguments: list[str], words_of_error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert words_of_error in " ".join(capsys.readouterr().err.split())

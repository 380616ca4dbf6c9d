"""Mooncake's traces: shared blocks, scaling, and what is said about a bad file."""

import json
from pathlib import Path

import pytest

from forebay.bench.errors import BenchError
from forebay.bench.lengths import Vocabulary
from forebay.bench.mooncake import convert_mooncake, read_mooncake
from forebay.bench.trace import Slice
from forebay.bench.workload import main
from forebay.bench.workload_file import Workload, read_workload

ROWS = [
    (0, 1200, 20, [0, 7, 8]),
    (250, 1030, 5, [0, 7, 9]),
    (4000, 512, 1, [7]),
    (9000, 600, 0, [0, 11]),
]


def line(timestamp: float, prompt: int, output: int, blocks: list[int]) -> str:
    row = {"timestamp": timestamp, "input_length": prompt, "output_length": output, "hash_ids": blocks}
    return json.dumps(row) + "\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(line(*row) for row in ROWS))
    return path


WHOLE = Slice()


def convert(path: Path, part: Slice = WHOLE, models: str = "a", seed: int = 5) -> Workload:
    return convert_mooncake(path, [(models, 1.0)], Vocabulary(range(100, 30000)), part, seed=seed)


def shared(workload: Workload, one: int, other: int) -> int:
    """How many tokens two requests' prompts have in common from their beginning."""
    first, second = workload.requests[one].prompt, workload.requests[other].prompt
    return next((place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(second))


def test_same_hash_id_same_tokens(trace: Path) -> None:
    workload = convert(trace)
    assert workload.arrivals == [0, 0.25, 4, 9]
    assert [(r.prompt_tokens, r.output_tokens) for r in workload.requests] == [
        (1200, 20),
        (1030, 5),
        (512, 1),
        (600, 1),
    ]
    assert shared(workload, 0, 1) == 1024  # two blocks, and no token of the third
    assert shared(workload, 0, 3) == 512
    assert shared(workload, 0, 2) == 0  # the same block, but in another place: no prefix of the other prompt ...
    assert workload.requests[2].prompt == workload.requests[0].prompt[512:1024]  # ... though of the same tokens
    assert convert(trace) == workload
    assert convert(trace, seed=6).requests[0].prompt != workload.requests[0].prompt


def test_scaled_prompts_still_share_their_blocks(trace: Path) -> None:
    workload = convert(trace, Slice(scale_tokens=0.1, scale_rate=2.0))
    assert workload.arrivals == [0, 0.125, 2, 4.5]
    assert [(r.prompt_tokens, r.output_tokens) for r in workload.requests] == [(120, 2), (103, 1), (51, 1), (60, 1)]
    assert shared(workload, 0, 1) == 102  # 2 blocks of 51.2
    assert shared(workload, 0, 3) == 51
    cut = convert(trace, Slice(start=0.2, duration=5.0, max_prompt=600))
    assert [r.prompt_tokens for r in cut.requests] == [600, 512]
    assert cut.requests[0].prompt == convert(trace).requests[1].prompt[:600]
    tiny = convert(trace, Slice(scale_tokens=0.001))
    assert [r.prompt_tokens for r in tiny.requests] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"timestamp": 1, "input_length": 5, "output_length": 2}\n', "line 1: .*missing required field `hash_ids`"),
        (line(0, 5, -2, [1]), r"line 1: .*>= 0.*output_length"),
        (line(0, 5, 2, [1, 2]), "line 1: hash_ids holds 2 ids; input_length 5 is 1 blocks of 512"),
        (line(9, 5, 2, [1]) + line(8, 5, 2, [1]), "line 2: timestamp is 8, before .* must be sorted"),
        (line(9, 5, 2, [1]) + line(10, 5, 2, [1])[:30], "line 2: not whole JSON"),
        (line(9, 5, 2, [1]).replace("5", '"5"'), "line 1: Expected `int`, got `str`"),
    ],
)
def test_bad_files_are_explained(trace: Path, content: str, words: str) -> None:
    trace.write_text(content)
    with pytest.raises(BenchError, match=rf"trace\.jsonl, {words}"):
        list(read_mooncake(trace))


def test_nothing_in_the_slice_and_no_file(trace: Path, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"no row from 60 s.*reach 9 s"):
        convert(trace, Slice(start=60))
    with pytest.raises(BenchError, match=r"none\.jsonl: cannot be read"):
        convert(tmp_path / "none.jsonl")
    trace.write_text("")
    with pytest.raises(BenchError, match="no row"):
        convert(trace)


def test_lines_after_the_slice_are_never_read(trace: Path) -> None:
    with trace.open("a") as file:
        file.write("broken")
    assert len(convert(trace, Slice(duration=8.0)).requests) == 3


def test_command_spreads_requests_over_models(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "workload.json"
    arguments = ["--mooncake", str(trace), "--models", "a,b", "--output", str(output), "--vocabulary", "5:900"]
    assert main(arguments) == 0
    workload = read_workload(output)
    assert workload.info.distribution == "mooncake"
    assert shared(workload, 0, 1) == 1024
    assert all(5 <= token < 900 for request in workload.requests for token in request.prompt)
    capsys.readouterr()

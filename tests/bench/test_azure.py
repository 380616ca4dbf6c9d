"""Azure's traces: the numbers of a slice, scaling, and what is said about a bad file."""

from collections import Counter
from pathlib import Path

import pytest

from forebay.bench.azure import convert_azure, parse_model_weights, read_azure
from forebay.bench.errors import BenchError
from forebay.bench.lengths import Vocabulary
from forebay.bench.trace import Slice
from forebay.bench.workload import main
from forebay.bench.workload_file import Workload, read_workload

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROWS = (
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9951690,396,109\n"
    "2023-11-16 18:15:51.2224670,879,55\n"
    "2023-11-16 18:16:06.6805900,1,7\n"
    "2023-11-16 18:16:26.6805901,91,16"
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + ROWS)
    return path


def convert(path: Path, models: str = "a", **settings: float | None) -> Workload:
    part = Slice(**settings)  # type: ignore[arg-type]
    return convert_azure(path, parse_model_weights(models), Vocabulary(range(10, 20)), part, seed=0)


def lengths(workload: Workload) -> list[tuple[int, int]]:
    return [(request.prompt_tokens, request.output_tokens) for request in workload.requests]


def test_whole_slice_and_scales(trace: Path) -> None:
    whole = convert(trace)
    assert whole.arrivals == pytest.approx([0, 4.314579, 4.541877, 20, 40.0000001], abs=1e-9)
    assert lengths(whole) == [(374, 44), (396, 109), (879, 55), (1, 7), (91, 16)]
    part = convert(trace, start=4.0, duration=16.0, scale_rate=2.0, scale_tokens=0.1)
    # 20 s is start + duration, so no longer in the slice.
    assert part.arrivals == pytest.approx([0.1572895, 0.2709385], abs=1e-9)
    assert lengths(part) == [(40, 11), (88, 6)]
    assert lengths(convert(trace, start=20.0, scale_tokens=0.01)) == [(1, 1), (1, 1)]
    assert lengths(convert(trace, max_prompt=100, max_output=50)) == [(100, 44), (100, 50), (100, 50), (1, 7), (91, 16)]
    assert part.info.duration == pytest.approx(8.0)
    assert part.info.rates == [("a", 2 / 8)]
    with pytest.raises(BenchError, match=r"no row from 100 s.*reach 40 s"):
        convert(trace, start=100.0)


def test_rows_after_the_slice_are_never_read(trace: Path) -> None:
    trace.write_text(HEADER + ROWS + "\n2023-11-16 18:16:36.0,broken,1\n")
    assert len(convert(trace, duration=30.0).requests) == 4
    with pytest.raises(BenchError, match=r"trace\.csv, line 7: ContextTokens is 'broken'; a whole number"):
        convert(trace)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            "TIMESTAMP,ContextTokens\n1,2\n",
            "column GeneratedTokens is missing; its columns are TIMESTAMP, ContextTokens",
        ),
        ("", "column TIMESTAMP is missing; its columns are none"),
        (HEADER + "2023-11-16 18:15:46.68,1\n", "line 2: has 2 cells for 3 columns"),
        (HEADER + "yesterday,1,1\n", "line 2: TIMESTAMP is 'yesterday'"),
        (HEADER + "2023-11-16 18:15:46,1,-3\n", "line 2: GeneratedTokens is '-3'"),
        (HEADER + "2023-11-16 18:15:46,1,1\n2023-11-16 18:15:45,1,1\n", "line 3: TIMESTAMP .* must be sorted"),
    ],
)
def test_bad_files_are_explained(trace: Path, content: str, words: str) -> None:
    trace.write_text(content)
    with pytest.raises(BenchError, match=words):
        list(read_azure(trace))


def test_columns_are_found_by_name(trace: Path) -> None:
    trace.write_text("GeneratedTokens,Region,TIMESTAMP,ContextTokens\n5,west,2023-11-16 18:15:46,9\n")
    assert [(row.prompt_tokens, row.output_tokens) for row in read_azure(trace)] == [(9, 5)]


def test_models_are_drawn_by_weight() -> None:
    assert parse_model_weights("a:12, b:5,c") == [("a", 12), ("b", 5), ("c", 1)]
    for text in ("a:0", "a:x", ":3", "a,a", "a:nan"):
        with pytest.raises(BenchError):
            parse_model_weights(text)


def test_real_slice_through_the_command(traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "azure.json"
    arguments = ["--azure", str(traces / "azure_conv_2023.csv"), "--models", "a:3,b", "--start", "600"]
    arguments += ["--duration", "120", "--scale-rate", "2", "--scale-tokens", "0.1", "--output", str(output)]
    assert main(arguments) == 0
    workload = read_workload(output)
    # Counted with awk over the file: rows from 600 s up to 720 s after the first.
    assert len(workload.requests) == 603
    assert workload.arrivals[0] >= 0
    assert workload.arrivals[-1] < 60
    shares = Counter(request.model_name for request in workload.requests)
    assert shares["a"] / 603 == pytest.approx(0.75, abs=0.06)
    once = output.read_bytes()
    assert main(arguments) == 0
    assert output.read_bytes() == once
    capsys.readouterr()


def test_whole_conversation_trace(traces: Path) -> None:
    rows = list(read_azure(traces / "azure_conv_2023.csv"))
    assert len(rows) == 19366
    assert rows[-1].seconds == pytest.approx(3501.7, abs=0.05)
    assert sum(row.prompt_tokens for row in rows) / len(rows) == pytest.approx(1154.7, abs=0.05)
    assert max(row.output_tokens for row in rows) == 1000

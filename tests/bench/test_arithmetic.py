"""What a step must read and compute, against counting by hand."""

import json
from pathlib import Path

import pytest

from forebay.bench.arithmetic import Arithmetic, Ceilings, StepWork, read_arithmetic
from forebay.bench.errors import BenchError

TINY = Arithmetic(
    body=1000, head=200, layers=2, heads=4, kv_heads=2, head_size=8, element_bytes=2, vocabulary=50
)  # fmt: skip


def test_a_decode_step_reads_the_weights_once_and_every_context() -> None:
    assert TINY.kv_bytes == 2 * 2 * 2 * 8 * 2
    work = TINY.decode(3, 10)
    # Each sequence reads 11 tokens, of which it has just written one.
    assert work.bytes == 1200 * 2 + 3 * (11 + 1) * TINY.kv_bytes
    assert work.operations == 2 * 1200 * 3 + 4 * 2 * 4 * 8 * 3 * 11


def test_a_prefill_projects_only_the_last_token_of_each_prompt() -> None:
    work = TINY.prefill(2, 8, 1000)
    assert work.operations == 2 * (1000 * 16 + 200 * 2) + 4 * 2 * 4 * 8 * 2 * 36
    # In four steps instead of one the body is read three times more.
    assert TINY.prefill(2, 8, 4).bytes - work.bytes == 3 * 1000 * 2
    assert TINY.prefill(2, 8, 4).operations == work.operations


def test_the_limit_is_the_scarcer_of_the_two() -> None:
    ceilings = Ceilings(100.0, 1000.0)
    assert ceilings.seconds(StepWork(200, 1000)) == 2
    assert ceilings.seconds(StepWork(200, 5000)) == 5


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_folder_is_counted_without_its_weights(tmp_path: Path, tied: bool) -> None:
    from tests.gpu.driver import TINY as CONFIGS
    from tests.gpu.driver import VOCABULARY

    config = CONFIGS["llama"].to_dict() | {"tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_arithmetic(tmp_path, "bfloat16")
    attention = 48 * (6 + 2 * 2) * 8 + 6 * 8 * 48
    assert found.body == 3 * (attention + 3 * 48 * 96)
    assert (found.head, found.vocabulary) == (VOCABULARY * 48, VOCABULARY)
    assert (found.layers, found.heads, found.kv_heads, found.head_size, found.element_bytes) == (3, 6, 2, 8, 2)


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"holds no config\.json"):
        read_arithmetic(tmp_path, "float32")
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(BenchError, match="transformers cannot make it"):
        read_arithmetic(tmp_path, "float32")

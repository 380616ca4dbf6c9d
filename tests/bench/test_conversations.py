"""Conversations of several turns: what each turn's prompt holds, when it arrives, what is cut."""

import math
from pathlib import Path
from statistics import fmean

import pytest

from forebay.bench.conversations import Conversations, Pace, Turn, parse_think_time, read_turns
from forebay.bench.draws import Draws
from forebay.bench.errors import BenchError
from forebay.bench.generate import generate
from forebay.bench.models_file import ModelLoad
from forebay.bench.workload import main
from forebay.bench.workload_file import read_workload
from tests.bench.words import ids, word_tokenizer, words, write_conversations


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "sharegpt.json"
    write_conversations(
        path,
        [
            [("human", words(0, 5)), ("gpt", words(10, 6)), ("human", words(20, 1)), ("gpt", words(30, 2))],
            [("gpt", words(0, 9)), ("human", words(40, 9)), ("human", words(50, 8)), ("gpt", words(60, 7))],
            [("human", words(0, 3)), ("gpt", words(0, 9)), ("human", words(0, 9)), ("gpt", words(0, 9))],
            [("human", words(70, 4)), ("gpt", words(80, 4)), ("human", words(0, 40)), ("gpt", words(0, 5))],
            [("human", words(0, 9))],
        ],
    )
    return path


def test_later_prompts_hold_the_whole_conversation_with_the_data_sets_answers(dataset: Path) -> None:
    conversations = read_turns(dataset, word_tokenizer())
    first, second, third = ids(0, 5), ids(10, 6), ids(20, 1)
    assert conversations == [
        [Turn(first, 6), Turn(first + second + third, 2)],
        [Turn(ids(50, 8), 7)],  # an answer to nothing and a question without an answer are passed over
        # The third conversation's first prompt is too short, which leaves all of it out.
        [Turn(ids(70, 4), 4), Turn(ids(70, 4) + ids(80, 4) + ids(0, 40), 5)],
    ]
    assert read_turns(dataset, word_tokenizer(), max_prompt=40)[2] == [Turn(ids(70, 4), 4)]
    assert read_turns(dataset, word_tokenizer(), max_output=5) == [conversations[2]]
    with pytest.raises(BenchError, match=r"sharegpt\.json: none of its 5 conversations.*--max-prompt 3"):
        read_turns(dataset, word_tokenizer(), max_prompt=3)


def test_turns_arrive_after_the_answers_expected_time_and_a_think_time() -> None:
    conversation = [Turn([1] * 4, 20), Turn([1] * 30, 10), Turn([1] * 50, 5)]
    steady = Conversations([conversation], Pace(think_s=3.0, think_sigma=0.0, answer_token_s=0.1))
    plans = steady.draw_turns(Draws(0, "test"))
    assert [plan.delay_s for plan in plans] == pytest.approx([0, 3 + 2, 3 + 2 + 3 + 1])
    assert [(len(plan.prompt), plan.output_tokens) for plan in plans] == [(4, 20), (30, 10), (50, 5)]
    varied, draws = Pace(think_s=3.0, think_sigma=1.0, answer_token_s=0.0), Draws(0, "think")
    gaps = [varied.draw_gap(draws, 100) for _ in range(20000)]
    assert fmean(gaps) == pytest.approx(3, abs=0.15)
    assert sorted(gaps)[10000] == pytest.approx(3 * math.exp(-0.5), rel=0.05)
    assert Pace(think_s=0.0, answer_token_s=0.5).draw_gap(draws, 4) == 2


def test_all_turns_together_come_at_the_rate_asked_for() -> None:
    conversations = [[Turn([9, 9], 2)] * 3, [Turn([8, 8], 2)]]  # two turns on average
    source = Conversations(conversations, Pace(think_s=1.0, answer_token_s=0.0))
    workload = generate([ModelLoad("a", 10.0)], lambda _: source.fresh(), seed=1, duration=1000.0)
    assert len(workload.requests) == pytest.approx(10_000, rel=0.06)
    assert workload.arrivals == sorted(workload.arrivals)
    assert workload.arrivals[-1] < 1000
    assert workload.info.rates == [("a", 10.0)]


def test_think_times() -> None:
    assert parse_think_time("4") == (4, 1)
    assert parse_think_time("0:2") == (0, 2)
    for text in ("", "x", "-1", "3:-1", "3:11", "inf", "nan"):
        with pytest.raises(BenchError, match=r"MEAN\[:SIGMA\]"):
            parse_think_time(text)


def test_command_makes_conversations_that_share_prefixes(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    word_tokenizer().save(str(folder / "tokenizer.json"))
    output = tmp_path / "turns.json"
    arguments = ["--models", "a:3,b", "--total-rate", "4", "--duration", "100", "--turns", "--think-time", "2:0"]
    arguments += ["--dataset", str(dataset), "--tokenizer", str(folder), "--output", str(output)]
    assert main([*arguments, "--answer-token-time", "0.5"]) == 0
    workload = read_workload(output)
    pairs = list(zip(workload.arrivals, workload.requests, strict=True))
    opened = [(t, r.model_name) for t, r in pairs if r.prompt == ids(0, 5)]
    followed = {(round(t, 6), r.model_name) for t, r in pairs if r.prompt[:5] == ids(0, 5) and len(r.prompt) == 12}
    # 2 s to think and 6 tokens of answer; what would come after 100 s is cut off.
    assert followed == {(round(t + 5, 6), name) for t, name in opened if t + 5 < 100}
    assert len(followed) > 20
    once = output.read_bytes()
    assert main([*arguments, "--answer-token-time", "0.5"]) == 0
    assert output.read_bytes() == once
    capsys.readouterr()

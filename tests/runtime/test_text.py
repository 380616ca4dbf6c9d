"""Tokenizers, chat templates, incremental text and stop strings."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from forebay.runtime.text import Detokenizer, ModelText, OutputText, PromptError, PromptTooLong, StopStrings, Texts
from tests.runtime.tiny_text import byte_level, sentence_piece


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    return ModelText.load(str(byte_level(tmp_path_factory.mktemp("byte-level"))))


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    return ModelText.load(str(sentence_piece(tmp_path_factory.mktemp("sentence-piece"))))


def decode(text: ModelText, tokens: list[int]) -> str:
    return str(text.backend.decode(tokens, skip_special_tokens=True))


def in_pieces(text: ModelText, tokens: list[int], context: list[int] | None = None) -> str:
    detokenizer = Detokenizer(text, context or [])
    pieces = [detokenizer.push(token) for token in tokens]
    return "".join(pieces) + detokenizer.finish()


# --- prompts


def test_encode_is_reversible_and_never_cut(text: ModelText) -> None:
    prompt = "the wheel turns, 水は流れる 🌊 " * 40
    tokens = text.encode(prompt)
    assert len(tokens) > 16, "the folder's own limit of 16 must not apply"
    assert decode(text, tokens) == prompt


def test_chat_goes_through_the_template(text: ModelText) -> None:
    tokens = text.chat([{"role": "system", "content": "Turn."}, {"role": "user", "content": "water"}])
    whole = text.backend.decode(tokens, skip_special_tokens=False)
    assert whole == "<|start|>system\nTurn.<|end|>\n<|start|>user\nwater<|end|>\n<|start|>assistant\n"
    assert tokens[0] == text.backend.token_to_id("<|start|>")


def test_chat_without_a_template_says_what_to_do(tmp_path: Path) -> None:
    plain = ModelText.load(str(byte_level(tmp_path, chat=False)))
    with pytest.raises(PromptError, match=r"no chat template.*v1/completions"):
        plain.chat([{"role": "user", "content": "water"}])


def test_a_template_that_refuses_is_a_prompt_error(text: ModelText) -> None:
    with pytest.raises(PromptError, match="no such talk here"):
        text.chat([{"role": "user", "content": "refuse"}])


def test_vocabulary_is_the_models_not_the_tokenizers(text: ModelText) -> None:
    assert text.backend.get_vocab_size() < text.vocabulary == 512


def test_vocabulary_without_a_configuration_is_what_the_tokenizer_knows(tmp_path: Path) -> None:
    folder = byte_level(tmp_path)
    (folder / "config.json").unlink()
    plain = ModelText.load(str(folder))
    assert plain.vocabulary == max(plain.backend.get_vocab().values()) + 1


@pytest.mark.system
async def test_a_long_prompt_leaves_the_event_loop_free(text: ModelText) -> None:
    prompt = "the water turns the wheel " * 20_000
    expected = text.encode(prompt)
    gaps = []
    tokenizing = asyncio.create_task(text.tokenize(prompt))
    last = time.perf_counter()
    started = last
    while not tokenizing.done():
        await asyncio.sleep(0)
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    whole = time.perf_counter() - started
    assert tokenizing.result() == expected
    assert len(gaps) > 20, "the loop must turn while the thread works"
    assert max(gaps) < max(0.5 * whole, 0.02)


@pytest.mark.parametrize("inline", [True, False])
async def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    text: ModelText, monkeypatch: pytest.MonkeyPatch, inline: bool
) -> None:
    monkeypatch.setattr("forebay.runtime.text.INLINE_CHARACTERS", 10**6 if inline else 0)
    longest = text.longest_token
    assert longest == max(map(len, text.backend.get_vocab()))
    fits = "x" * (10 * longest)
    assert await text.tokenize(fits, max_context=10) == text.encode(fits)
    assert await text.tokenize(fits + "x") == text.encode(fits + "x"), "no context, no bound"
    with pytest.raises(PromptTooLong, match=rf"^{len(fits) + 1} characters .* {len(fits)} .* 10 tokens"):
        await text.tokenize(fits + "x", max_context=10)
    with pytest.raises(PromptTooLong, match="10 tokens"):
        await text.tokenize([{"role": "user", "content": fits}], max_context=10)


def test_where_one_unknown_token_stands_for_any_text_there_is_no_bound(tmp_path: Path) -> None:
    folder = byte_level(tmp_path)
    tokenizer = Tokenizer(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True))
    tokenizer.save(str(folder / "tokenizer.json"))
    unbounded = ModelText.load(str(folder))
    assert len(unbounded.encode("b" * 1000)) == 1
    assert unbounded.longest_token is None


@pytest.mark.system
async def test_a_conversation_of_many_messages_leaves_the_event_loop_free(text: ModelText) -> None:
    messages = [{"role": "user", "content": "a"}] * 20_000
    expected = text.chat(messages)
    tokenizing = asyncio.create_task(text.tokenize(messages))
    turns = 0
    while not tokenizing.done():
        await asyncio.sleep(0)
        turns += 1
    assert tokenizing.result() == expected
    assert turns > 20, "the loop must turn while a thread renders"


# --- folders


async def test_texts_reads_a_folder_once(tmp_path: Path) -> None:
    folder = str(byte_level(tmp_path))
    texts = Texts()
    first, second = await asyncio.gather(texts.get(folder), texts.get(folder))
    assert first is second is await texts.get(folder)


async def test_a_broken_folder_is_named_and_read_again_once_repaired(tmp_path: Path) -> None:
    texts = Texts()
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=str(tmp_path)):
        await texts.get(str(tmp_path))
    byte_level(tmp_path)
    assert (await texts.get(str(tmp_path))).encode("water")


def test_no_torch_in_a_process_that_makes_text(tmp_path: Path) -> None:
    program = (
        "import sys; from forebay.runtime.text import ModelText\n"
        f"text = ModelText.load({str(byte_level(tmp_path))!r})\n"
        "text.chat([{'role': 'user', 'content': 'water'}])\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=50)


# --- text of tokens


@given(data=st.data())
def test_pieces_joined_are_the_whole_text(text: ModelText, data: st.DataObject) -> None:
    token = st.integers(0, text.backend.get_vocab_size() - 1)
    tokens = data.draw(st.lists(token, max_size=40))
    assert in_pieces(text, tokens) == decode(text, tokens)


@given(st.text(max_size=40))
def test_any_text_comes_back_and_no_piece_ends_inside_a_character(text: ModelText, written: str) -> None:
    detokenizer = Detokenizer(text)
    shown = ""
    for token in text.encode(written):
        shown += detokenizer.push(token)
        assert written.startswith(shown)
    assert shown + detokenizer.finish() == written


def test_special_tokens_are_not_shown(text: ModelText) -> None:
    end = text.backend.token_to_id("<|end|>")
    water = text.encode(" water")
    assert in_pieces(text, [*water, end, *water, end]) == " water water"


def test_an_incomplete_character_at_the_end_is_shown_as_such(text: ModelText) -> None:
    wave = text.encode("a🌊")
    assert len(wave) > 2, "the character must take several tokens here"
    assert in_pieces(text, wave[:-1]) == decode(text, wave[:-1])


def test_ids_that_only_the_model_knows_make_no_text(text: ModelText) -> None:
    assert in_pieces(text, [511, *text.encode("water"), 510]) == "water"


def test_spaces_of_sentence_pieces(spaced: ModelText) -> None:
    tokens = spaced.encode("the wheel turns, water")
    assert in_pieces(spaced, tokens) == "the wheel turns, water" == decode(spaced, tokens)


def test_an_output_that_continues_a_prompt_keeps_its_first_space(spaced: ModelText) -> None:
    prompt, output = spaced.encode("the wheel"), spaced.encode("turns")
    assert in_pieces(spaced, output, prompt) == " turns"
    assert in_pieces(spaced, output) == "turns"


def test_a_context_that_ends_inside_a_character_shows_nothing_of_itself(spaced: ModelText) -> None:
    half = [spaced.backend.token_to_id(f"<0x{byte:02X}>") for byte in "é".encode()[:1]]
    assert in_pieces(spaced, spaced.encode("turns"), [*spaced.encode("the"), *half]) == "turns"


def test_malformed_bytes_after_good_ones_do_not_end_the_text(spaced: ModelText) -> None:
    good = [spaced.backend.token_to_id(f"<0x{byte:02X}>") for byte in "水".encode()]
    bad = spaced.backend.token_to_id("<0xFF>")
    whole = in_pieces(spaced, [*good, bad, *spaced.encode("the wheel")])
    assert whole == "水\N{REPLACEMENT CHARACTER} the wheel"


# --- stop strings


def first_stop(whole: str, stops: list[str]) -> tuple[str, str | None]:
    """What StopStrings must show, by reading character after character."""
    for end in range(1, len(whole) + 1):
        complete = [stop for stop in stops if whole[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return whole[: end - len(longest)], longest
    return whole, None


@given(
    pieces=st.lists(st.text("abc", max_size=5), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_any_chunking_finds_what_the_whole_text_has(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    expected, found = first_stop(whole, stops)
    search = StopStrings(stops)
    shown = ""
    for piece in pieces:
        shown += search.push(piece)
        assert expected.startswith(shown), "shown text is never taken back"
    shown += search.finish()
    assert (shown, search.found) == (expected, found)


def test_text_that_cannot_become_a_stop_is_shown_at_once() -> None:
    search = StopStrings(["\n\nUser:"])
    assert search.push("water\n") == "water"
    assert search.push("\nU") == ""
    assert search.push("p") == "\n\nUp"
    assert search.finish() == ""


def test_stop_strings_are_looked_for_after_min_tokens(text: ModelText) -> None:
    tokens = [text.backend.token_to_id(letter) for letter in "axbxcxd"]
    output = OutputText(text, stops=["x"], min_tokens=2)
    assert output.push(tokens[:3]) == "axb"
    assert output.push(tokens[3:]) == ""
    assert output.stopped
    assert output.tokens == 4, "the token that completed the stop string counts, those after it do not"
    assert output.finish() == ""


def test_held_text_is_shown_when_the_output_ends(text: ModelText) -> None:
    output = OutputText(text, stops=["abc"])
    assert output.push(text.encode("xab")) == "x"
    assert output.finish() == "ab"
    assert output.tokens == len(text.encode("xab"))


def test_a_stop_string_may_end_in_the_last_incomplete_character(text: ModelText) -> None:
    half = text.encode("🌊")[:1]
    output = OutputText(text, stops=["\N{REPLACEMENT CHARACTER}"])
    assert output.push([*text.encode("a"), *half]) == "a"
    assert output.finish() == ""
    assert output.stopped


# --- a real model's folder


@pytest.mark.model
@pytest.mark.parametrize("written", ["", " ", "Hello, world", "  leading\n\n\ttabs ", "水は 🌊 流れる é", "1234567890"])
def test_smollm2_encodes_as_transformers_does(smollm2: Path, written: str) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(smollm2, local_files_only=True)
    text = ModelText.load(str(smollm2))
    tokens = text.encode(written)
    assert tokens == reference(written)["input_ids"]
    assert in_pieces(text, tokens) == reference.decode(tokens, skip_special_tokens=True)
    messages = [{"role": "user", "content": written}]
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert text.chat(messages) == expected

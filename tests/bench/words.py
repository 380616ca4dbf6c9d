"""A tokenizer of whole words, and conversations of them, for tests of text."""

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers


def word_tokenizer() -> Tokenizer:
    """w0 .. w99 are 2 .. 101; 0 and 1 are special."""
    vocabulary = {"<s>": 0, "<unk>": 1, **{f"w{number}": number + 2 for number in range(100)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "<unk>"])
    return tokenizer


def words(first: int, count: int) -> str:
    return " ".join(f"w{number}" for number in range(first, first + count))


def ids(first: int, count: int) -> list[int]:
    return list(range(first + 2, first + 2 + count))


def write_conversations(path: Path, conversations: list[list[tuple[str, str]]]) -> None:
    path.write_text(
        json.dumps(
            [{"conversations": [{"from": who, "value": text} for who, text in turns]} for turns in conversations]
        )
    )

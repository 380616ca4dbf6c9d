"""Conversations in ShareGPT's form as a source of prompts: real text, real lengths."""

import codecs
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from forebay.bench.draws import Draws
from forebay.bench.errors import BenchError

SHORTEST = 4
"""Prompts and answers of fewer tokens are dropped: they are greetings and broken records."""


class Turn(msgspec.Struct, frozen=True):
    speaker: str = msgspec.field(name="from")
    value: str


class Conversation(msgspec.Struct, frozen=True):
    conversations: list[Turn]


class ShareGPTPrompts:
    """The prompt is a conversation's first human turn, the output as long as the first answer. Each conversation is
    drawn once, in random order, before any comes again."""

    def __init__(self, pairs: list[tuple[list[int], int]]) -> None:
        self._pairs = pairs
        self._order: list[int] = []

    def draw(self, draws: Draws) -> tuple[list[int], int]:
        if not self._order:
            self._order = draws.permutation(len(self._pairs))
        return self._pairs[self._order.pop()]


def read_conversations(path: Path) -> list[Conversation]:
    """A file in ShareGPT's form. Raises BenchError."""
    try:
        return msgspec.json.decode(path.read_bytes().removeprefix(codecs.BOM_UTF8), type=list[Conversation])
    except OSError as error:
        raise BenchError(f"data set {path}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise BenchError(
            f'data set {path}: not ShareGPT\'s form, a list of {{"conversations": [{{"from", "value"}}, ...]}}: {error}'
        ) from error


def read_sharegpt(
    path: Path, tokenizer: Tokenizer, max_prompt: int | None = None, max_output: int | None = None
) -> list[tuple[list[int], int]]:
    """(prompt token ids, output length in tokens) of every conversation whose prompt and answer have at least
    SHORTEST and at most `max_prompt` and `max_output` tokens. Raises BenchError, also if none is left."""
    conversations = read_conversations(path)
    texts = [pair for pair in map(_first_exchange, conversations) if pair is not None]
    prompts = tokenizer.encode_batch([prompt for prompt, _ in texts])
    answers = tokenizer.encode_batch([answer for _, answer in texts], add_special_tokens=False)
    pairs = [
        (prompt.ids, len(answer.ids))
        for prompt, answer in zip(prompts, answers, strict=True)
        if SHORTEST <= len(prompt.ids) <= (max_prompt or len(prompt.ids))
        and SHORTEST <= len(answer.ids) <= (max_output or len(answer.ids))
    ]
    if not pairs:
        raise BenchError(
            f"data set {path}: none of its {len(conversations)} conversations has a first human turn and a first "
            f"answer of at least {SHORTEST} tokens{within(max_prompt, max_output)}"
        )
    return pairs


def within(max_prompt: int | None, max_output: int | None) -> str:
    """The maxima, for a sentence."""
    given = [f"--max-{name} {most}" for name, most in (("prompt", max_prompt), ("output", max_output)) if most]
    return f" within {' and '.join(given)}" if given else ""


def _first_exchange(conversation: Conversation) -> tuple[str, str] | None:
    """The first human turn and the first answer after it."""
    prompt: str | None = None
    for turn in conversation.conversations:
        if prompt is None and turn.speaker in ("human", "user"):
            prompt = turn.value
        elif prompt is not None and turn.speaker in ("gpt", "assistant", "chatgpt"):
            return prompt, turn.value
    return None

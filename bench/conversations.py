"""Conversations of several turns from ShareGPT's form: which requests one makes, and when each leaves.

The replay is open loop, so when a turn arrives is settled before it begins: a think time after its user would have
read the answer before it, and that answer is taken to need a given time for each token. A server slower than this gets
the next turn while it still works on the one before; a faster one waits longer than people would make it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from forebay.bench.draws import Draws
from forebay.bench.errors import BenchError
from forebay.bench.generate import TurnPlan
from forebay.bench.sharegpt import SHORTEST, Conversation, read_conversations, within


@dataclass(frozen=True)
class Pace:
    """How fast a conversation goes on. The think time is lognormal with mean `think_s`; `think_sigma` is the standard
    deviation of its logarithm. `answer_token_s` is the expected time of each token of an answer."""

    think_s: float = 10.0
    think_sigma: float = 1.0
    answer_token_s: float = 0.05

    def draw_gap(self, draws: Draws, answer_tokens: int) -> float:
        """Seconds from a turn's arrival to that of the next."""
        think_s = 0.0
        if self.think_s > 0:
            think_s = math.exp(math.log(self.think_s) - self.think_sigma**2 / 2 + self.think_sigma * draws.normal())
        return think_s + answer_tokens * self.answer_token_s


def parse_think_time(text: str) -> tuple[float, float]:
    """`MEAN[:SIGMA]`: (seconds, standard deviation of the logarithm, 1 where not given). Raises BenchError."""
    mean_text, colon, sigma_text = text.partition(":")
    try:
        mean, sigma = float(mean_text), float(sigma_text) if colon else 1.0
    except ValueError:
        mean = sigma = math.nan
    if not (0 <= mean < math.inf and 0 <= sigma <= 10):
        raise BenchError(f"think time {text!r}: allowed is MEAN[:SIGMA], seconds of 0 or more and a SIGMA of 0 to 10")
    return mean, sigma


@dataclass(frozen=True)
class Turn:
    """A turn as a request: the whole conversation up to its question, and the length of its answer in tokens."""

    prompt: list[int]
    answer_tokens: int


class Conversations:
    """Draws each conversation once, in random order, before any comes again."""

    def __init__(self, conversations: Sequence[Sequence[Turn]], pace: Pace) -> None:
        self._conversations = conversations
        self._pace = pace
        self._order: list[int] = []

    @property
    def mean_turns(self) -> float:
        return sum(map(len, self._conversations)) / len(self._conversations)

    def fresh(self) -> "Conversations":
        """The same conversations in an order of their own."""
        return Conversations(self._conversations, self._pace)

    def draw_turns(self, draws: Draws) -> list[TurnPlan]:
        if not self._order:
            self._order = draws.permutation(len(self._conversations))
        plans: list[TurnPlan] = []
        delay_s = 0.0
        for turn in self._conversations[self._order.pop()]:
            plans.append(TurnPlan(delay_s, turn.prompt, turn.answer_tokens))
            delay_s += self._pace.draw_gap(draws, turn.answer_tokens)
        return plans


def read_turns(
    path: Path, tokenizer: Tokenizer, max_prompt: int | None = None, max_output: int | None = None
) -> list[list[Turn]]:
    """The turns of every conversation of a data set. Messages are tokenized one by one, so that each prompt begins
    with the whole prompt of the turn before. A conversation ends before a turn whose prompt or answer is longer than
    allowed; it is left out if its first prompt or answer has fewer than SHORTEST tokens. Raises BenchError, also if
    none is left."""
    conversations = read_conversations(path)
    exchanges = [_exchanges(conversation) for conversation in conversations]
    texts = [text for turns in exchanges for exchange in turns for text in exchange]
    encoded = iter(tokenizer.encode_batch(texts, add_special_tokens=False))
    # What a tokenizer puts before a text by itself, such as a token for its beginning.
    opening: list[int] = tokenizer.encode("").ids
    found: list[list[Turn]] = []
    for exchange_list in exchanges:
        history = list(opening)
        turns: list[Turn] = []
        open_ended = True
        for _ in exchange_list:
            question, answer = next(encoded).ids, next(encoded).ids
            history = history + question
            least = 1 if turns else SHORTEST
            fits = (
                len(history) >= least
                and least <= len(answer) <= (max_output or len(answer))
                and len(history) <= (max_prompt or len(history))
            )
            open_ended = open_ended and fits
            if open_ended:
                turns.append(Turn(history, len(answer)))
            history = history + answer
        if turns:
            found.append(turns)
    if not found:
        raise BenchError(
            f"data set {path}: none of its {len(conversations)} conversations begins with a human turn and an answer "
            f"of at least {SHORTEST} tokens{within(max_prompt, max_output)}"
        )
    return found


def _exchanges(conversation: Conversation) -> list[tuple[str, str]]:
    """(question, answer) pairs in order. Messages of others, and answers to nothing, are passed over; of several
    questions in a row the last is answered."""
    pairs: list[tuple[str, str]] = []
    question: str | None = None
    for message in conversation.conversations:
        if message.speaker in ("human", "user"):
            question = message.value
        elif question is not None and message.speaker in ("gpt", "assistant", "chatgpt"):
            pairs.append((question, message.value))
            question = None
    return pairs

"""How long prompts and outputs are, and which token ids a made-up prompt holds."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from tokenizers import Tokenizer

from forebay.bench.draws import Draws
from forebay.bench.errors import BenchError
from forebay.bench.limits import MOST_TOKENS

DEFAULT_VOCABULARY = range(1000, 30000)
"""Ids that nearly every vocabulary has, above where special tokens usually lie."""


class LengthSource(Protocol):
    """Where a request's content comes from."""

    def draw(self, draws: Draws) -> tuple[list[int], int]:
        """Token ids of a prompt (at least one) and the output length in tokens (at least 1)."""
        ...


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens. `mean` is its mean; `spread` is the standard deviation of the logarithm
    (lognormal) or half of the width (uniform), and unused where all are the same (fixed)."""

    kind: Literal["fixed", "lognormal", "uniform"]
    mean: float
    spread: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """`fixed:N`, `lognormal:MEAN:SIGMA` or `uniform:LOW:HIGH` (both ends included). Raises BenchError."""
        kind, *rest = text.split(":")
        try:
            numbers = [float(number) for number in rest]
        except ValueError:
            numbers = []
        match kind, numbers:
            case "fixed", [mean] if 1 <= mean <= MOST_TOKENS:
                return cls("fixed", mean)
            case "lognormal", [mean, sigma] if 1 <= mean <= MOST_TOKENS and 0 <= sigma <= 10:
                return cls("lognormal", mean, sigma)
            case "uniform", [low, high] if 1 <= low <= high <= MOST_TOKENS:
                return cls("uniform", (low + high) / 2, (high - low) / 2)
        raise BenchError(
            f"length {text!r}: not a distribution; allowed are fixed:N, lognormal:MEAN:SIGMA (SIGMA at most 10) and "
            f"uniform:LOW:HIGH, with lengths of 1 to {MOST_TOKENS:,} tokens"
        )

    def with_mean(self, mean: float | None) -> "Lengths":
        """The same shape around another mean; a uniform one keeps its width relative to the mean."""
        if mean is None:
            return self
        spread = self.spread * mean / self.mean if self.kind == "uniform" else self.spread
        return replace(self, mean=mean, spread=spread)

    def draw(self, draws: Draws, maximum: int | None = None) -> int:
        """A length from 1 on, at most `maximum` (else MOST_TOKENS): what is outside is moved to the nearest end."""
        if self.kind == "fixed":
            length = self.mean
        elif self.kind == "lognormal":
            length = math.exp(math.log(self.mean) - self.spread**2 / 2 + self.spread * draws.normal())
        else:
            low, high = self.mean - self.spread, self.mean + self.spread
            length = math.floor(low + draws.uniform() * (high - low + 1))
        return min(max(1, round(length)), MOST_TOKENS if maximum is None else maximum)


class RandomPrompts:
    """Prompts of random token ids, lengths by distribution."""

    def __init__(
        self,
        vocabulary: "Vocabulary",
        prompt: Lengths,
        output: Lengths,
        max_prompt: int | None = None,
        max_output: int | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._prompt, self._output = prompt, output
        self._max_prompt, self._max_output = max_prompt, max_output

    def draw(self, draws: Draws) -> tuple[list[int], int]:
        prompt_tokens = self._prompt.draw(draws, self._max_prompt)
        output_tokens = self._output.draw(draws, self._max_output)
        return self._vocabulary.draw(draws, prompt_tokens), output_tokens


class Vocabulary:
    """The token ids that a made-up prompt may hold."""

    def __init__(self, ids: range | list[int]) -> None:
        self._ids = ids

    @classmethod
    def parse(cls, text: str) -> "Vocabulary":
        """`LOW:HIGH`, HIGH itself excluded. Raises BenchError."""
        low, colon, high = text.partition(":")
        if not (colon and low.isdecimal() and high.isdecimal() and int(low) < int(high) <= 2**31):
            raise BenchError(f"vocabulary {text!r}: allowed is LOW:HIGH, token ids from LOW up to HIGH - 1")
        return cls(range(int(low), int(high)))

    @classmethod
    def of_tokenizer(cls, tokenizer: Tokenizer) -> "Vocabulary":
        """All of a tokenizer's ids but its special and added tokens."""
        added = tokenizer.get_added_tokens_decoder()
        return cls(sorted(set(tokenizer.get_vocab().values()) - set(added)))

    def draw(self, draws: Draws, count: int) -> list[int]:
        ids = self._ids
        return [ids[place] for place in draws.many_below(len(ids), count).tolist()]


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder. Raises BenchError."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise BenchError(
            f"tokenizer {folder}: holds no tokenizer.json; give the folder of a model in Hugging Face's layout"
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more special
        raise BenchError(f"tokenizer {path}: cannot be read ({error}): write or copy it again") from error

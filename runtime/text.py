"""Text into token ids and token ids into text, for the front door.

Knows tokenizers, chat templates and stop strings; knows neither HTTP nor requests. Nothing here imports torch:
a front door would pay seconds and hundreds of megabytes for it, and never use it.
"""

import asyncio
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers.decoders import DecodeStream
from tokenizers.models import BPE

_importing = threading.Lock()
"""What transformers imports when it is asked for is not there yet for a second thread that asks meanwhile."""

INLINE_CHARACTERS = 2_000
"""Text up to this length is tokenized at once (below a millisecond); longer text goes to a thread."""

INLINE_MESSAGES = 50
"""A conversation up to so many messages is put through its template at once, if its text is short, too."""

CONTEXT_TOKENS = 8
"""How many tokens before an output are read along with it (some tokenizers drop the space of a first word)."""


class PromptError(ValueError):
    """This model cannot take this prompt; the message says why."""


class PromptTooLong(PromptError):
    """Its text has more characters than the context can hold, whatever its tokens are."""


class ModelText:
    """The tokenizer and the chat template of one model folder. Safe to use from several threads."""

    def __init__(self, path: str, tokenizer: Any, vocabulary: int) -> None:
        self.path = path
        self.vocabulary = vocabulary
        """Token ids are below this number."""
        self.longest_token = _longest_token(tokenizer.backend_tokenizer)
        """The most characters of text that one token stands for; None: no such bound."""
        self._tokenizer = tokenizer
        self.backend = tokenizer.backend_tokenizer
        # What a model's authors set up for training must not cut or pad what a client sends.
        self.backend.no_truncation()
        self.backend.no_padding()

    @classmethod
    def load(cls, path: str) -> "ModelText":
        """Reads a model folder in Hugging Face's layout (no network). Blocks for a second or two.

        Raises ValueError naming the folder if it holds no tokenizer that can be read."""
        folder = Path(path)
        try:
            if (folder / "tokenizer.json").is_file():
                with _importing:
                    from transformers import PreTrainedTokenizerFast

                tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
            else:
                # Converts older tokenizer files, but imports torch on the way.
                with _importing:
                    from transformers import AutoTokenizer

                tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
            return cls(path, tokenizer, _vocabulary(folder, tokenizer))
        except Exception as error:  # the libraries raise many types, the bare one among them
            raise ValueError(
                f"model folder {path}: its tokenizer cannot be read ({error}); expected a tokenizer.json as "
                "transformers saves it"
            ) from error

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the model wants around it."""
        return self._encode(text, add_special_tokens=True)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation (`role` and `content` each), up to where the assistant's answer begins.

        Raises PromptError if the model has no chat template, or its template refuses the conversation."""
        return self._encode(self._render(messages), add_special_tokens=False)

    async def tokenize(self, prompt: str | Sequence[Mapping[str, Any]], max_context: int = 0) -> list[int]:
        """`encode` or `chat` without holding up the event loop, however long the prompt is.

        Raises PromptTooLong, before it is tokenized, for text that cannot fit into `max_context` tokens (0: any)."""
        if isinstance(prompt, str):
            short = len(prompt) <= INLINE_CHARACTERS
        else:
            short = (
                len(prompt) <= INLINE_MESSAGES
                and sum(len(message["content"]) for message in prompt) <= INLINE_CHARACTERS
            )
        return self._read(prompt, max_context) if short else await asyncio.to_thread(self._read, prompt, max_context)

    def _read(self, prompt: str | Sequence[Mapping[str, Any]], max_context: int) -> list[int]:
        is_text = isinstance(prompt, str)
        text = prompt if isinstance(prompt, str) else self._render(prompt)
        if max_context and self.longest_token and len(text) > max_context * self.longest_token:
            raise PromptTooLong(
                f"{len(text)} characters are more than the {max_context * self.longest_token} that the model's "
                f"context of {max_context} tokens can hold (its longest token has {self.longest_token})"
            )
        return self._encode(text, add_special_tokens=is_text)

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        from jinja2 import TemplateError

        if not self._tokenizer.chat_template:
            raise PromptError("it has no chat template; use /v1/completions with the whole prompt as text")
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
                )
            )
        except TemplateError as error:
            raise PromptError(f"its chat template refuses these messages: {str(error)[:200]}") from error

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Only the batch call releases the interpreter lock; without that a thread would not help.
        [encoding] = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)


def _longest_token(backend: Any) -> int | None:
    """None where one unknown token may stand for any number of characters (other kinds than BPE are not known to be
    free of that).

    Of a normalization that makes fewer characters nothing is taken into account: real text has a few characters a
    token, the longest token is a run of tens of spaces or dashes."""
    model = backend.model
    if not isinstance(model, BPE) or (model.unk_token and model.fuse_unk and not model.byte_fallback):
        return None
    return max(map(len, backend.get_vocab()))


def _vocabulary(folder: Path, tokenizer: Any) -> int:
    """The rows of the model's embedding: what its configuration says, else what the tokenizer knows."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        config = {}
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return int(size or max(tokenizer.get_vocab().values()) + 1)


class Texts:
    """The texts of all models, each folder read once however many models and requests share it."""

    def __init__(self) -> None:
        self._loads: dict[str, asyncio.Task[ModelText]] = {}

    async def get(self, path: str) -> ModelText:
        """Reads the folder in a thread at the first call (call it early and requests need not wait).

        Raises ValueError as `ModelText.load`; the next call then tries again."""
        if path not in self._loads:
            self._loads[path] = asyncio.create_task(asyncio.to_thread(ModelText.load, path))
        load = self._loads[path]
        try:
            return await asyncio.shield(load)
        except ValueError:
            if self._loads.get(path) is load:
                del self._loads[path]
            raise


class Detokenizer:
    """Token ids in, text out: the pieces joined are the text of all ids, special tokens skipped.

    A piece never ends inside a character. `context` is what comes before the first id (of a prompt that the
    output continues), so that a word that begins the output keeps its space."""

    def __init__(self, text: ModelText, context: Sequence[int] = ()) -> None:
        self._backend = text.backend
        self._begin()
        for token in context[-CONTEXT_TOKENS:]:
            self.push(token)
        if self._read < len(self._ids):
            self._begin()

    def _begin(self) -> None:
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._read = 0
        self._shown = 0

    def push(self, token: int) -> str:
        """The text that this token completes; often a word, "" inside a character or for a special token."""
        try:
            piece = self._stream.step(self._backend, token)
        except Exception as error:
            # The library has no type of its own for this: with byte-fallback tokenizers a malformed byte
            # changes how the bytes before it read, and those are shown already. The text goes on from here.
            if "prefix" not in str(error):
                raise
            held = self._ids[self._read :]
            self._begin()
            return "".join([self.push(again) for again in (*held, token)])
        self._ids.append(token)
        if piece is None:
            return ""
        self._read = len(self._ids)
        self._shown += len(piece)
        return str(piece)

    def finish(self) -> str:
        """What is still held back: an incomplete character, as replacement characters."""
        if self._read == len(self._ids):
            return ""
        self._read = len(self._ids)
        return str(self._backend.decode(self._ids, skip_special_tokens=True))[self._shown :]


class StopStrings:
    """Finds the first stop string in text that comes piece by piece, however it is cut.

    First is the one that is complete first; of those complete at the same character, the longest. Text that may
    yet become part of a stop string is held back. A stop string and what follows it are never shown."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """The text that may be shown now. "" once a stop string was found."""
        if self.found is not None:
            return ""
        text = self._held + piece
        ends = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            _, cut, self.found = min(ends)
            self._held = ""
        else:
            cut = min((self._possible_start(text, stop) for stop in self._stops), default=len(text))
            self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """What was held back: no more text comes."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _possible_start(text: str, stop: str) -> int:
        """Where the longest end of `text` that begins `stop` starts."""
        start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while start >= 0:
            if stop.startswith(text[start:]):
                return start
            start = text.find(stop[0], start + 1)
        return len(text)


class OutputText:
    """What a client gets to see of one request's tokens, and how many of them that took."""

    def __init__(
        self, text: ModelText, context: Sequence[int] = (), stops: Sequence[str] = (), min_tokens: int = 0
    ) -> None:
        """Stop strings are looked for in the text after the first `min_tokens` tokens."""
        self._detokenizer = Detokenizer(text, context)
        self._stops = StopStrings(stops) if stops else None
        self._min_tokens = min_tokens
        self.tokens = 0
        """Tokens taken, with the one that completed a stop string; those after it do not count."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found: the text is complete."""
        return self._stops is not None and self._stops.found is not None

    def push(self, tokens: Iterable[int]) -> str:
        """The text to show for some more tokens."""
        shown = ""
        for token in tokens:
            if self.stopped:
                break
            self.tokens += 1
            piece = self._detokenizer.push(token)
            if self._stops is not None and self.tokens > self._min_tokens:
                piece = self._stops.push(piece)
            shown += piece
        return shown

    def finish(self) -> str:
        """The rest of the text after the last token; "" after a stop string."""
        if self.stopped:
            return ""
        rest = self._detokenizer.finish()
        if self._stops is None:
            return rest
        if self.tokens > self._min_tokens:
            rest = self._stops.push(rest)
        return rest if self.stopped else rest + self._stops.finish()

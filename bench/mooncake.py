"""Mooncake's traces (JSON lines with timestamp, input_length, output_length, hash_ids) as workloads. The file is
streamed."""

import codecs
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from forebay.bench.draws import Draws
from forebay.bench.errors import BenchError
from forebay.bench.lengths import Vocabulary
from forebay.bench.limits import MOST_TOKENS
from forebay.bench.trace import Invocation, Slice, convert
from forebay.bench.workload_file import Workload

BLOCK_TOKENS = 512
"""Tokens that one hash id stands for; the last block of a prompt may hold fewer."""

Tokens = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]


class Line(msgspec.Struct, frozen=True):
    """`timestamp` in milliseconds, lengths in tokens. Equal `hash_ids` in the same place of two prompts say that they
    agree up to the end of that block."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Tokens
    output_length: Tokens
    hash_ids: tuple[int, ...]


def read_mooncake(path: Path) -> Iterator[Invocation]:
    """Rows as they come, seconds from the trace's own zero. Raises BenchError that names line, field and value."""
    earlier = 0.0
    decode = msgspec.json.Decoder(Line).decode
    try:
        with path.open("rb") as lines:
            for number, content in enumerate(lines, start=1):
                if number == 1:
                    content = content.removeprefix(codecs.BOM_UTF8)
                if not content.strip():
                    continue
                where = f"trace {path}, line {number}"
                try:
                    line = decode(content)
                except msgspec.ValidationError as error:
                    raise BenchError(f"{where}: {error}: {_shortened(content)}") from error
                except msgspec.DecodeError as error:
                    raise BenchError(f"{where}: not whole JSON ({error}): {_shortened(content)}") from error
                if line.timestamp < earlier:
                    raise BenchError(
                        f"{where}: timestamp is {line.timestamp:g}, before the line ahead of it; lines must be sorted"
                    )
                needed = -(-line.input_length // BLOCK_TOKENS)
                if len(line.hash_ids) != needed:
                    raise BenchError(
                        f"{where}: hash_ids holds {len(line.hash_ids)} ids; input_length {line.input_length} is "
                        f"{needed} blocks of {BLOCK_TOKENS} tokens"
                    )
                earlier = line.timestamp
                yield Invocation(line.timestamp / 1000, line.input_length, line.output_length, line.hash_ids)
    except OSError as error:
        raise BenchError(f"trace {path}: cannot be read: {error.strerror}") from error


def _shortened(content: bytes) -> str:
    text = content.decode(errors="replace").strip()
    return text if len(text) <= 80 else text[:77] + "..."


def convert_mooncake(
    path: Path, weights: Sequence[tuple[str, float]], vocabulary: Vocabulary, part: Slice, *, seed: int
) -> Workload:
    """`part` of the trace as requests. Each goes to a model drawn by weight. Prompts repeat each other as in the trace:
    the tokens of a block follow from the seed and its hash id alone, and scaled lengths shrink every block alike. A
    prefix cache hits within one model only, so over several models it finds less than the trace holds. Raises
    BenchError."""

    def prompt_of(row: Invocation, tokens: int) -> list[int]:
        prompt: list[int] = []
        for place, block in enumerate(row.blocks):
            begin, end = (round(edge * BLOCK_TOKENS * part.scale_tokens) for edge in (place, place + 1))
            prompt += vocabulary.draw(Draws(seed, f"block {block}"), min(end, tokens) - begin)
            if end >= tokens:
                break
        # Where a length of 0 was raised to 1, or rounding left blocks short of it.
        missing = tokens - len(prompt)
        return prompt + vocabulary.draw(Draws(seed, "filling"), missing) if missing > 0 else prompt

    return convert(read_mooncake(path), part, weights, prompt_of, seed=seed, origin=path, distribution="mooncake")

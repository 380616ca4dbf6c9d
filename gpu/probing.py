"""A probe of a model that was just loaded: a few tokens through its own attention and through ours, and the logits are
compared. So what would be served wrongly is refused, whatever its configuration says.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from forebay.gpu.attention import ATTENTION_NAME, LayerViews, PagedBatch, Scratch, Share, build_layout
from forebay.gpu.errors import ModelLoadError
from forebay.gpu.linear import pack_linear_layers
from forebay.gpu.pool import KVShape
from forebay.transport.messages import BLOCK_TOKENS

_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}
"""Largest difference of a logit, as a share of the largest logit."""

_HARMLESS_ARGUMENTS = frozenset(
    {"dropout", "sliding_window", "position_ids", "use_cache", "cache", "past_key_values", "output_attentions"}
)
"""What a layer may hand to its attention besides queries, keys and values without wanting other results. Windows are
checked by the configuration."""


PROBE_TOKENS = 2 * BLOCK_TOKENS + 7


def convert_and_probe(model: Any, shape: KVShape, refuse: Callable[[str], ModelLoadError]) -> None:
    """Turns a model of the host to our attention and packed layers, and compares with what it gave before. Raises what
    `refuse` makes."""

    def run(tokens: torch.Tensor) -> tuple[torch.Tensor, dict[int, frozenset[str]]]:
        model.set_attn_implementation(ATTENTION_NAME)
        pack_linear_layers(model)
        return _run_paged(model, shape, tokens)

    probe(model, shape, run, refuse)


def probe(
    model: Any,
    shape: KVShape,
    run: Callable[[torch.Tensor], tuple[torch.Tensor, dict[int, frozenset[str]]]],
    refuse: Callable[[str], ModelLoadError],
) -> None:
    """Compares the logits of `model` with those that `run` gives for the same tokens [1, length], cut by `probe_cuts`,
    once it has turned the model to our attention; it also tells by layer what else its attention was given. Raises
    ModelLoadError where the model would be served wrongly."""
    length = min(PROBE_TOKENS, model.config.max_position_embeddings)
    device = next(model.parameters()).device
    tokens = torch.arange(1, length + 1, device=device).mul_(7919).remainder_(model.config.vocab_size).unsqueeze(0)
    positions = torch.arange(length, device=device).unsqueeze(0)
    architecture = type(model).__name__
    try:
        expected = model(input_ids=tokens, position_ids=positions, use_cache=False).logits[0]
        found, seen = run(tokens)
    except Exception as error:
        # A foreign architecture may fail anywhere in its own code; whatever it raises, we cannot serve it.
        raise refuse(f"{architecture} does not work with paged attention: {type(error).__name__}: {error}") from error
    if set(seen) != set(range(shape.layers)):
        raise refuse(
            f"{architecture} sends {len(seen)} of its {shape.layers} layers through transformers' attention "
            "interface; models whose layers do not all use it are not supported"
        )
    special = sorted(frozenset[str]().union(*seen.values()) - _HARMLESS_ARGUMENTS)
    if special:
        raise refuse(f"the attention of {architecture} wants {special[0]!r}, which is not supported")
    if not bool(torch.isfinite(expected).all()):
        raise refuse(f"its logits are not finite in {str(shape.dtype).removeprefix('torch.')}; try float32")
    difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    if not difference <= _PROBE_TOLERANCE[shape.dtype]:
        raise refuse(
            f"{architecture} gives other logits with paged attention (by {difference:.1%}); its attention is not plain "
            "causal attention, so it is not supported"
        )


def probe_cuts(length: int) -> list[tuple[int, int]]:
    """First and last position of each step of a probe: a first chunk, a second one, then single tokens."""
    return list(pairwise(sorted({0, length // 3, length - 2, length - 1, length})))


def _run_paged(model: Any, shape: KVShape, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[int, frozenset[str]]]:
    length = tokens.shape[1]
    positions = torch.arange(length).unsqueeze(0)
    blocks = -(-length // BLOCK_TOKENS)
    views = LayerViews(torch.zeros(blocks, *shape.block, dtype=shape.dtype), shape)
    table = np.arange(blocks)[::-1].copy()
    logits = []
    seen: dict[int, frozenset[str]] = {}
    scratch = Scratch()
    for start, end in probe_cuts(length):
        shares = [Share(table, start, end - start)]
        batch = PagedBatch(build_layout(shares, shape), views, scratch, seen)
        span = slice(start, end)
        out = model(input_ids=tokens[:, span], position_ids=positions[:, span], use_cache=False, paged=batch)
        logits.append(out.logits[0])
    return torch.cat(logits), seen

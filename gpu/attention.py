"""Attention over the shared pool, plugged into transformers under one name; and the plan of one packed batch for it.

A batch is packed as [1, T]: first the sequences with one token each (decode), shortest first, then the chunks of
prompts (prefill). Everything that depends on the step alone is built once, in `BatchLayout`; a layer then writes its
new keys and values, and attends.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from forebay.gpu.pool import KVShape

ATTENTION_NAME = "forebay_paged"

GATHER_BYTES = 3 << 20
"""Decode rows are gathered in groups of about this many bytes of keys and values, so that they are attended to while
still in the cache of one core. Measured at 256 and 2,048 tokens: twice as much takes up to twice as long."""


@dataclass(frozen=True, slots=True)
class Share:
    """One sequence's part of a packed batch: positions start .. start + count - 1. `table` holds its blocks."""

    table: NDArray[np.int64]
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows first .. last - 1 of the batch. `pages` [rows * pages each]; `mask` [rows, 1, 1, tokens] is added."""

    first: int
    last: int
    pages: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens first .. last - 1 of the batch, of one sequence that has `length` tokens with them. Without cached tokens
    before it there are no `pages`, and plain causal attention over the chunk does."""

    first: int
    last: int
    length: int
    pages: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """`write_rows` [T]: where each token's keys go, in rows of one token of one layer, for the first layer."""

    write_rows: torch.Tensor
    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillChunk, ...]


class LayerViews:
    """The pool as one model's layers see it, by layer: `keys`, `values` as rows of one token [rows, kv_heads,
    head_size], and `key_pages`, `value_pages` as rows of one block's tokens [pages, 16 * kv_heads * head_size].

    Rows of one layer are addressed by the number they have for the first: each view starts where its layer does."""

    def __init__(self, pool_view: torch.Tensor, shape: KVShape) -> None:
        pages = pool_view.view(-1, shape.block_tokens * shape.kv_heads * shape.head_size)
        rows = pool_view.view(-1, shape.kv_heads, shape.head_size)
        self.shape = shape
        self.key_pages = [pages[2 * layer :] for layer in range(shape.layers)]
        self.value_pages = [pages[2 * layer + 1 :] for layer in range(shape.layers)]
        self.keys = [rows[2 * layer * shape.block_tokens :] for layer in range(shape.layers)]
        self.values = [rows[(2 * layer + 1) * shape.block_tokens :] for layer in range(shape.layers)]


class Scratch:
    """Two buffers that pages are gathered into, reused by every layer and step of one lane."""

    def __init__(self) -> None:
        self._buffers = (torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8))

    def take(self, pages: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for keys and for values: [pages, width] each."""
        size = pages * width * dtype.itemsize
        if size > self._buffers[0].numel():
            self._buffers = (torch.empty(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8))
        keys, values = (buffer[:size].view(dtype).view(pages, width) for buffer in self._buffers)
        return keys, values


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """What a forward pass hands through the model to each layer's attention. With `seen`, each layer leaves there the
    names of all further arguments that it was given, unless None or False."""

    layout: BatchLayout
    views: LayerViews
    scratch: Scratch
    seen: dict[int, frozenset[str]] | None = None


def packing_order(shares: list[Share]) -> list[int]:
    """In which order shares are packed: decode rows, shortest first, then chunks."""

    def key(i: int) -> tuple[bool, int]:
        share = shares[i]
        return share.count > 1, share.start if share.count == 1 else 0

    return sorted(range(len(shares)), key=key)


def build_layout(shares: list[Share], shape: KVShape) -> BatchLayout:
    """The layout of `shares`, which are in packing order."""
    tokens = shape.block_tokens
    rows_per_block = shape.layers * 2 * tokens
    write_rows = np.empty(sum(share.count for share in shares), np.int64)
    rows = sum(share.count == 1 for share in shares)
    prefill = []
    for i, share in enumerate(shares[:rows]):
        write_rows[i] = share.table[share.start // tokens] * rows_per_block + share.start % tokens
    first = rows
    for share in shares[rows:]:
        last = first + share.count
        positions = np.arange(share.start, share.start + share.count)
        write_rows[first:last] = share.table[positions // tokens] * rows_per_block + positions % tokens
        prefill.append(_prefill_chunk(share, first, last, shape))
        first = last
    return BatchLayout(torch.from_numpy(write_rows), tuple(_decode_groups(shares[:rows], shape)), tuple(prefill))


def _decode_groups(shares: list[Share], shape: KVShape) -> list[DecodeGroup]:
    page_bytes = 2 * shape.block_tokens * shape.kv_heads * shape.head_size * shape.dtype.itemsize
    groups = []
    first = 0
    while first < len(shares):
        last = first + 1
        while last < len(shares):
            pages = shares[last].start // shape.block_tokens + 1
            if (last + 1 - first) * pages * page_bytes > GATHER_BYTES:
                break
            last += 1
        groups.append(_decode_group(shares[first:last], first, shape))
        first = last
    return groups


def _decode_group(shares: list[Share], first: int, shape: KVShape) -> DecodeGroup:
    width = shares[-1].start // shape.block_tokens + 1
    blocks = np.empty((len(shares), width), np.int64)
    lengths = np.empty((len(shares), 1), np.int64)
    for i, share in enumerate(shares):
        used = share.start // shape.block_tokens + 1
        blocks[i, :used] = share.table[:used]
        # Padding must be finite even though it is masked; any block of the sequence itself is.
        blocks[i, used:] = share.table[0]
        lengths[i] = share.start + 1
    hidden = torch.from_numpy(np.arange(width * shape.block_tokens) >= lengths)
    mask = torch.zeros(hidden.shape, dtype=shape.dtype).masked_fill_(hidden, -torch.inf)
    pages = torch.from_numpy(blocks.reshape(-1) * (2 * shape.layers))
    return DecodeGroup(first, first + len(shares), pages, mask[:, None, None])


def _prefill_chunk(share: Share, first: int, last: int, shape: KVShape) -> PrefillChunk:
    length = share.start + share.count
    if share.start == 0:
        return PrefillChunk(first, last, length, None, None)
    used = -(-length // shape.block_tokens)
    pages = torch.from_numpy(share.table[:used] * (2 * shape.layers))
    hidden = torch.arange(length) > torch.arange(share.start, length).unsqueeze(1)
    mask = torch.zeros(hidden.shape, dtype=shape.dtype).masked_fill_(hidden, -torch.inf)
    return PrefillChunk(first, last, length, pages, mask)


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedBatch,
    scaling: float,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """`query` [1, heads, T, head_size], `key` and `value` [1, kv_heads, T, head_size] -> [1, T, heads, head_size].

    The query heads that share a KV head are handled as if they were queries (decode) or heads (prefill) of that KV
    head's own batch entry, so keys and values are never repeated."""
    layer: int = module.layer_idx
    views = paged.views
    if paged.seen is not None:
        given = (name for name, argument in others.items() if argument is not None and argument is not False)
        paged.seen[layer] = frozenset(given)
    layout = paged.layout
    views.keys[layer].index_copy_(0, layout.write_rows, key[0].transpose(0, 1))
    views.values[layer].index_copy_(0, layout.write_rows, value[0].transpose(0, 1))
    heads, kv_heads = query.shape[1], key.shape[1]
    query = query[0].unflatten(0, (kv_heads, heads // kv_heads))
    parts = []
    for group in layout.decode:
        keys, values = _gather(paged, layer, group.pages)
        rows = group.last - group.first
        parts.append(
            scaled_dot_product_attention(
                query[:, :, group.first : group.last].permute(2, 0, 1, 3),
                keys.view(rows, -1, kv_heads, views.shape.head_size).transpose(1, 2),
                values.view(rows, -1, kv_heads, views.shape.head_size).transpose(1, 2),
                attn_mask=group.mask,
                scale=scaling,
            ).flatten(1, 2)
        )
    parts += [_attend_chunk(paged, layer, chunk, query, key, value, scaling) for chunk in layout.prefill]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0), None


def _attend_chunk(
    paged: PagedBatch,
    layer: int,
    chunk: PrefillChunk,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    kv_heads, group = query.shape[0], query.shape[1]
    if chunk.pages is None:
        keys, values = key[0, :, chunk.first : chunk.last], value[0, :, chunk.first : chunk.last]
    else:
        gathered = _gather(paged, layer, chunk.pages)
        keys, values = (pages.view(-1, kv_heads, key.shape[-1])[: chunk.length].transpose(0, 1) for pages in gathered)
    out = scaled_dot_product_attention(
        query[:, :, chunk.first : chunk.last],
        keys.unsqueeze(1).expand(-1, group, -1, -1),
        values.unsqueeze(1).expand(-1, group, -1, -1),
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        scale=scaling,
    )
    return out.flatten(0, 1).transpose(0, 1)


def _gather(paged: PagedBatch, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    source = paged.views.key_pages[layer]
    keys, values = paged.scratch.take(pages.numel(), source.shape[1], source.dtype)
    torch.index_select(source, 0, pages, out=keys)
    torch.index_select(paged.views.value_pages[layer], 0, pages, out=values)
    return keys, values


AttentionInterface.register(ATTENTION_NAME, paged_attention)

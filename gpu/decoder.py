"""Our own forward pass of the fast families (Llama, Mistral, Qwen2, Qwen3), over merged weights.

What a device does its own way is behind `Operators`; what depends on the step is behind `PackedStep`. So the same pass
runs with plain torch on the CPU, where tests compare it with transformers, and with fused kernels on a GPU.

In the last layer only keys and values are needed of every token; queries, attention, MLP and logits are computed for
the rows that sample alone, which changes nothing and saves a thirtieth of a prefill.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from forebay.gpu.pool import KVShape

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class DecoderShape:
    """What config.json says of a fast family's model. `head_size` in elements, `epsilon` of the RMS norms."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    epsilon: float
    qkv_bias: bool
    head_norms: bool
    tied: bool

    @property
    def qkv(self) -> int:
        """Rows of the merged projection: queries, then keys, then values."""
        return (self.heads + 2 * self.kv_heads) * self.head_size

    @property
    def parameters(self) -> int:
        """How many numbers the weights are, up to norms and biases."""
        attention = self.hidden * (self.qkv + self.heads * self.head_size)
        layer = attention + 3 * self.hidden * self.intermediate
        return self.layers * layer + self.vocabulary * self.hidden * (1 if self.tied else 2)

    def kv_shape(self, dtype: torch.dtype) -> KVShape:
        return KVShape(self.layers, self.kv_heads, self.head_size, dtype)


def fast_shape(config: Any) -> DecoderShape | None:
    """The shape of a model that this file can run, or None for any other architecture or variant of one."""
    if config.model_type not in FAMILIES or getattr(config, "hidden_act", "") != "silu":
        return None
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        return None  # also on projections that are merged without one here
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_type" not in rope or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return None
    heads = config.num_attention_heads
    return DecoderShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=heads,
        kv_heads=config.num_key_value_heads or heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocabulary=config.vocab_size,
        epsilon=config.rms_norm_eps,
        qkv_bias=config.model_type == "qwen2",
        head_norms=config.model_type == "qwen3",
        tied=bool(config.tie_word_embeddings),
    )


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """`qkv` [qkv, hidden], `out` [hidden, heads * head_size], `gate_up` [2 * intermediate, hidden] (the gate first),
    `down` [hidden, intermediate]; norms [hidden], `query_norm` and `key_norm` [head_size]."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, eq=False)
class DecoderWeights:
    """`embedding` and `head` [vocabulary, hidden] (the same tensor where they are tied); `cos` and `sin` [positions,
    head_size] in float32, both halves alike."""

    shape: DecoderShape
    embedding: torch.Tensor
    layers: tuple[DecoderLayer, ...]
    norm: torch.Tensor
    head: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


class PackedStep(Protocol):
    """One step's packed batch of T tokens, of which `kept` [n] are the rows that sample; None: all of them."""

    @property
    def kept(self) -> torch.Tensor | None: ...

    def append(self, layer: int, qkv: torch.Tensor, weights: DecoderWeights) -> torch.Tensor:
        """Rotates queries and keys of `qkv` [T, qkv], writes keys and values to the layer's part of the pool, and
        gives the queries [T, heads, head_size]."""

    def attend(self, layer: int, queries: torch.Tensor, kept: bool) -> torch.Tensor:
        """Attention of all rows, or with `kept` of those alone: [rows, heads * head_size]."""


class Operators(Protocol):
    """`hidden` [rows, hidden] is the sum that runs through the layers; `add_linear` may change it in place."""

    def norm(self, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor: ...

    def norm_linear(
        self,
        hidden: torch.Tensor,
        norm: torch.Tensor,
        epsilon: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """norm(hidden) @ weight.T + bias."""

    def norm_gate_up(
        self, hidden: torch.Tensor, norm: torch.Tensor, epsilon: float, weight: torch.Tensor
    ) -> torch.Tensor:
        """silu(gate) * up of norm(hidden) @ weight.T, whose first half is the gate."""

    def add_linear(self, hidden: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """hidden + rows @ weight.T."""


def forward(
    weights: DecoderWeights, tokens: torch.Tensor, step: PackedStep, operators: Operators
) -> torch.Tensor | None:
    """Logits [n, vocabulary] of the rows of `tokens` [T] that sample, in their order; None if none does. Keys and
    values of all tokens are in the pool afterwards."""
    epsilon = weights.shape.epsilon
    hidden = torch.nn.functional.embedding(tokens, weights.embedding)
    kept = step.kept
    last = len(weights.layers) - 1
    for number, layer in enumerate(weights.layers):
        qkv = operators.norm_linear(hidden, layer.attention_norm, epsilon, layer.qkv, layer.qkv_bias)
        queries = step.append(number, qkv, weights)
        only_kept = number == last and kept is not None
        if only_kept:
            assert kept is not None
            if not len(kept):
                return None
            queries, hidden = queries[kept], hidden[kept]
        attended = step.attend(number, queries, only_kept)
        hidden = operators.add_linear(hidden, attended, layer.out)
        gated = operators.norm_gate_up(hidden, layer.mlp_norm, epsilon, layer.gate_up)
        hidden = operators.add_linear(hidden, gated, layer.down)
    return operators.norm_linear(hidden, weights.norm, epsilon, weights.head)

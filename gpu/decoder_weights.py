"""Weights of the fast families for gpu/decoder.py: merged from a loaded model, or made up from its configuration."""

from collections.abc import Callable
from typing import Any

import torch

from forebay.gpu.decoder import DecoderLayer, DecoderShape, DecoderWeights

Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Makes an uninitialised tensor on the device that the weights are for, wherever they are kept there."""


def on_device(device: torch.device) -> Allocate:
    """Weights in memory of torch's own."""
    return lambda size, dtype: torch.empty(size, dtype=dtype, device=device)


SEED = 0
"""Of made-up weights: they are the same in every run."""

STANDARD_DEVIATION = 0.02
"""Of made-up weights, as most models are initialised."""


def merged_weights(model: Any, shape: DecoderShape, allocate: Allocate, positions: int) -> DecoderWeights:
    """Takes the weights out of `model` (transformers', on the host), layer by layer: what has been moved to the device
    is dropped there, so the model is of no use afterwards. `positions` is how many rotary positions are needed."""
    base = model.model

    def moved(*parts: Any) -> torch.Tensor:
        """One below the other."""
        whole = allocate((sum(len(part) for part in parts), *parts[0].shape[1:]), parts[0].dtype)
        for part, place in zip(parts, whole.split([len(part) for part in parts]), strict=True):
            place.copy_(part.detach())
        return whole

    cos, sin = rotary_tables(base.rotary_emb, positions, allocate)
    embedding = moved(base.embed_tokens.weight)
    head = embedding if shape.tied else moved(model.lm_head.weight)
    layers = []
    for module in base.layers:
        attention, mlp = module.self_attn, module.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        layers.append(
            DecoderLayer(
                attention_norm=moved(module.input_layernorm.weight),
                qkv=moved(*(projection.weight for projection in projections)),
                qkv_bias=moved(*(projection.bias for projection in projections)) if shape.qkv_bias else None,
                query_norm=moved(attention.q_norm.weight) if shape.head_norms else None,
                key_norm=moved(attention.k_norm.weight) if shape.head_norms else None,
                out=moved(attention.o_proj.weight),
                mlp_norm=moved(module.post_attention_layernorm.weight),
                gate_up=moved(mlp.gate_proj.weight, mlp.up_proj.weight),
                down=moved(mlp.down_proj.weight),
            )
        )
        module.to("meta")
    return DecoderWeights(shape, embedding, tuple(layers), moved(base.norm.weight), head, cos, sin)


def made_up_weights(
    model: Any, shape: DecoderShape, dtype: torch.dtype, allocate: Allocate, positions: int
) -> DecoderWeights:
    """Small random weights made on the device, the norms 1. `model` is transformers' without weights ("meta")."""
    norm = allocate((shape.hidden,), dtype).fill_(1.0)
    chance = torch.Generator(norm.device).manual_seed(SEED)

    def random(*size: int) -> torch.Tensor:
        return allocate(size, dtype).normal_(std=STANDARD_DEVIATION, generator=chance)

    def ones(size: int) -> torch.Tensor:
        return allocate((size,), dtype).fill_(1.0)

    with torch.device("cpu"):
        rotary = type(model.model.rotary_emb)(model.config)
    cos, sin = rotary_tables(rotary, positions, allocate)
    embedding = random(shape.vocabulary, shape.hidden)
    head = embedding if shape.tied else random(shape.vocabulary, shape.hidden)
    layers = tuple(
        DecoderLayer(
            attention_norm=ones(shape.hidden),
            qkv=random(shape.qkv, shape.hidden),
            qkv_bias=random(shape.qkv) if shape.qkv_bias else None,
            query_norm=ones(shape.head_size) if shape.head_norms else None,
            key_norm=ones(shape.head_size) if shape.head_norms else None,
            out=random(shape.hidden, shape.heads * shape.head_size),
            mlp_norm=ones(shape.hidden),
            gate_up=random(2 * shape.intermediate, shape.hidden),
            down=random(shape.hidden, shape.intermediate),
        )
        for _ in range(shape.layers)
    )
    return DecoderWeights(shape, embedding, layers, norm, head, cos, sin)


def rotary_tables(rotary: Any, positions: int, allocate: Allocate) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [positions, head_size] in float32, as transformers' module computes them (with its scaling)."""
    places = torch.arange(positions, device="cpu").unsqueeze(0)
    with torch.no_grad():
        tables = rotary.to("cpu")(torch.empty(0, dtype=torch.float32, device="cpu"), places)
    cos, sin = (allocate(tuple(table.shape[1:]), torch.float32).copy_(table[0]) for table in tables)
    return cos, sin

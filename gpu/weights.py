"""Loading a model folder (Hugging Face's layout), and refusing what our attention would compute wrongly.

Refusal comes in two steps: what the configuration says (windows, positions that depend on the batch), and then a probe,
which runs a few tokens through the model's own attention and through ours and compares the logits.
"""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from forebay.gpu.attention import (
    ATTENTION_NAME,
    LayerViews,
    PagedBatch,
    Scratch,
    Share,
    build_layout,
)
from forebay.gpu.errors import ModelLoadError
from forebay.gpu.linear import pack_linear_layers
from forebay.gpu.pool import KVShape
from forebay.transport.messages import BLOCK_TOKENS, ModelSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}
"""Largest difference of a logit, as a share of the largest logit."""

_STATIC_POSITIONS = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
"""Rotary embeddings that depend on a token's position alone, not on how long the whole batch is."""


@dataclass(frozen=True, eq=False)
class Weights:
    """A loaded model whose attention is ours. `max_positions` in tokens."""

    model: Any
    shape: KVShape
    vocabulary: int
    max_positions: int
    end_of_sequence: frozenset[int]


class WeightCache:
    """Loaded weights of one device: those of one (folder, dtype) exist once, however many models use them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[str, str], tuple[Weights, int]] = {}

    def acquire(self, spec: ModelSpec) -> Weights:
        """The weights `spec` names, loaded if need be. Give them back with `release`. Raises ModelLoadError."""
        key = _key(spec)
        with self._lock:
            weights, users = self._held.get(key) or (load_weights(spec), 0)
            _require_context(spec, weights.model.config)
            self._held[key] = (weights, users + 1)
            return weights

    def release(self, spec: ModelSpec) -> None:
        """The counterpart of `acquire`; the last one frees the weights."""
        key = _key(spec)
        with self._lock:
            weights, users = self._held[key]
            if users > 1:
                self._held[key] = (weights, users - 1)
            else:
                del self._held[key]

    @property
    def users(self) -> dict[tuple[str, str], int]:
        """How many models use the weights of each (folder, dtype)."""
        with self._lock:
            return {key: users for key, (_, users) in self._held.items()}


def _key(spec: ModelSpec) -> tuple[str, str]:
    return (str(Path(spec.path).resolve()), spec.dtype)


def load_weights(spec: ModelSpec) -> Weights:
    """Loads the folder without touching the network. Raises ModelLoadError, which says what is wrong with it."""

    def refuse(reason: str) -> ModelLoadError:
        return ModelLoadError(spec.name, spec.path, reason)

    if spec.dtype not in DTYPES:
        raise refuse(f"dtype {spec.dtype!r} is not supported; use one of {', '.join(DTYPES)}")
    dtype = DTYPES[spec.dtype]
    folder = Path(spec.path)
    if not folder.is_dir():
        raise refuse("the folder does not exist")
    _require_model_folder(folder, refuse)
    model = _read(folder, dtype, refuse)
    config = model.config
    _require_context(spec, config)
    heads = config.num_attention_heads
    shape = KVShape(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=dtype,
    )
    with torch.inference_mode():
        _convert_and_probe(model, shape, refuse)
    return Weights(
        model=model,
        shape=shape,
        vocabulary=config.vocab_size,
        max_positions=config.max_position_embeddings,
        end_of_sequence=_end_of_sequence(model),
    )


def _require_model_folder(folder: Path, refuse: Callable[[str], ModelLoadError]) -> None:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise refuse("the folder has no config.json, so it is not a model in Hugging Face's layout") from None
    except (OSError, ValueError) as error:
        raise refuse(f"config.json cannot be read: {error}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise refuse("config.json names no model_type, so it is not a model's configuration")
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method", "unknown")
        raise refuse(f"quantized weights ({method}) are not supported on this device; convert them first")
    if not any(folder.glob("*.safetensors")):
        raise refuse("the folder has no *.safetensors file; other weight formats are not read")


def _read(folder: Path, dtype: torch.dtype, refuse: Callable[[str], ModelLoadError]) -> Any:
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:
        # Whatever a foreign file makes the library raise, the model cannot be served, and its name must be told.
        raise refuse(f"{type(error).__name__}: {error}") from error
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
    missing = sorted(report["missing_keys"])
    if missing:
        raise refuse(f"its weights lack {len(missing)} tensors, {missing[0]!r} first")
    model.eval()
    return model


def _require_context(spec: ModelSpec, config: Any) -> None:
    """Refuses by configuration what differs from plain causal attention only over long texts, where no probe looks."""

    def refuse(reason: str) -> ModelLoadError:
        return ModelLoadError(spec.name, spec.path, f"{config.model_type} {reason}")

    for needed in ("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings"):
        if not isinstance(getattr(config, needed, None), int):
            raise refuse(f"is not a plain decoder: its configuration has no {needed}")
    if getattr(config, "is_encoder_decoder", False):
        raise refuse("is an encoder-decoder; only decoders are served")
    context = min(spec.max_context or config.max_position_embeddings, config.max_position_embeddings)
    layers = getattr(config, "layer_types", None)
    windowed = layers is None or any(kind != "full_attention" for kind in layers)
    for name in ("sliding_window", "attention_chunk_size"):
        width = getattr(config, name, None)
        if windowed and isinstance(width, int) and width < context:
            raise refuse(
                f"attends to {name}={width} tokens only, which is not supported; set max_context to at most {width}"
            )
    unknown = sorted(set(layers or ()) - {"full_attention", "sliding_attention", "chunked_attention"})
    if unknown:
        raise refuse(f"has layers of type {unknown[0]!r}, which are not supported")
    for rope_type in _rope_types(getattr(config, "rope_parameters", None)):
        if rope_type not in _STATIC_POSITIONS:
            supported = ", ".join(sorted(_STATIC_POSITIONS))
            raise refuse(f"uses rope type {rope_type!r}, which is not supported; supported: {supported}")


def _rope_types(parameters: Any) -> set[str]:
    """One type, or one for each kind of layer."""
    if not isinstance(parameters, dict):
        return set()
    found = {str(parameters["rope_type"])} if "rope_type" in parameters else set()
    return found.union(*(_rope_types(value) for value in parameters.values()))


def _end_of_sequence(model: Any) -> frozenset[int]:
    for config in (model.generation_config, model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


_HARMLESS_ARGUMENTS = frozenset(
    {"dropout", "sliding_window", "position_ids", "use_cache", "cache", "past_key_values", "output_attentions"}
)
"""What a layer may hand to its attention besides queries, keys and values without wanting other results. Windows are
checked by the configuration."""


def _convert_and_probe(model: Any, shape: KVShape, refuse: Callable[[str], ModelLoadError]) -> None:
    """Turns the model to our attention and packed layers, and compares with what it gave before on one text: a first
    chunk, a second one, then single tokens."""
    length = min(2 * BLOCK_TOKENS + 7, model.config.max_position_embeddings)
    tokens = torch.arange(1, length + 1).mul_(7919).remainder_(model.config.vocab_size).unsqueeze(0)
    positions = torch.arange(length).unsqueeze(0)
    architecture = type(model).__name__
    try:
        expected = model(input_ids=tokens, position_ids=positions, use_cache=False).logits[0]
        model.set_attn_implementation(ATTENTION_NAME)
        pack_linear_layers(model)
        found, seen = _run_paged(model, shape, tokens, positions)
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


def _run_paged(
    model: Any, shape: KVShape, tokens: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, dict[int, frozenset[str]]]:
    length = tokens.shape[1]
    blocks = -(-length // BLOCK_TOKENS)
    views = LayerViews(torch.zeros(blocks, *shape.block, dtype=shape.dtype), shape)
    table = np.arange(blocks)[::-1].copy()
    cuts = sorted({0, length // 3, length - 2, length - 1, length})
    logits = []
    seen: dict[int, frozenset[str]] = {}
    scratch = Scratch()
    for start, end in pairwise(cuts):
        shares = [Share(table, start, end - start)]
        batch = PagedBatch(build_layout(shares, shape), views, scratch, seen)
        span = slice(start, end)
        out = model(input_ids=tokens[:, span], position_ids=positions[:, span], use_cache=False, paged=batch)
        logits.append(out.logits[0])
    return torch.cat(logits), seen

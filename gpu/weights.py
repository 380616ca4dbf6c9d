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
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
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

_making_models = threading.Lock()
"""While transformers makes a model it changes what all threads of a process share: models that another thread makes
meanwhile may come out without their tied weights."""

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

    @property
    def config(self) -> Any:
        """As transformers read it."""
        return self.model.config


class Loaded(Protocol):
    """A loaded model of whatever kind of device."""

    @property
    def config(self) -> Any: ...


Some = TypeVar("Some", bound=Loaded)
Key = tuple[str, str, str]


class WeightCache(Generic[Some]):
    """Loaded weights of one device: those of one (folder, dtype, format) exist once, however many models use them."""

    def __init__(self, load: Callable[[ModelSpec], Some]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._held: dict[Key, tuple[Some, int]] = {}

    def acquire(self, spec: ModelSpec) -> Some:
        """The weights `spec` names, loaded if need be. Give them back with `release`. Raises ModelLoadError."""
        key = _key(spec)
        with self._lock:
            weights, users = self._held.get(key) or (self._load(spec), 0)
            require_context(spec, weights.config)
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
    def users(self) -> dict[Key, int]:
        """How many models use the weights of each (folder, dtype, format)."""
        with self._lock:
            return {key: users for key, (_, users) in self._held.items()}


def _key(spec: ModelSpec) -> Key:
    return (str(Path(spec.path).resolve()), spec.dtype, spec.load_format)


def load_weights(spec: ModelSpec) -> Weights:
    """Loads the folder without touching the network. Raises ModelLoadError, which says what is wrong with it."""
    refuse = refusal(spec)
    dtype = dtype_of(spec)
    model = read_model(spec, dtype)
    config = model.config
    require_context(spec, config)
    shape = kv_shape(config, dtype)
    with torch.inference_mode():
        _convert_and_probe(model, shape, refuse)
    return Weights(
        model=model,
        shape=shape,
        vocabulary=config.vocab_size,
        max_positions=config.max_position_embeddings,
        end_of_sequence=end_of_sequence(model),
    )


def refusal(spec: ModelSpec) -> Callable[[str], ModelLoadError]:
    """Makes the error that says why this model cannot be served."""
    return lambda reason: ModelLoadError(spec.name, spec.path, reason)


def dtype_of(spec: ModelSpec) -> torch.dtype:
    """Raises ModelLoadError for one that no device supports."""
    if spec.dtype not in DTYPES:
        raise refusal(spec)(f"dtype {spec.dtype!r} is not supported; use one of {', '.join(DTYPES)}")
    return DTYPES[spec.dtype]


def kv_shape(config: Any, dtype: torch.dtype) -> KVShape:
    """What a plain decoder of this configuration keeps of a token."""
    heads = config.num_attention_heads
    return KVShape(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=dtype,
    )


def read_model(spec: ModelSpec, dtype: torch.dtype) -> Any:
    """The model as transformers has it, on the host; with `load_format` "dummy" its weights are random, small, and the
    same every time. Raises ModelLoadError."""
    refuse = refusal(spec)
    folder = Path(spec.path)
    if spec.load_format == "auto":
        _require_folder(folder, refuse)
        _require_weights(folder, refuse)
        return _read(folder, dtype, refuse)
    config = read_config(spec)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _from_config(config, dtype, refuse)


def read_empty_model(spec: ModelSpec, dtype: torch.dtype) -> Any:
    """The model without weights, on no device ("meta"): from config.json alone. Raises ModelLoadError."""
    config = read_config(spec)
    with torch.device("meta"):
        return _from_config(config, dtype, refusal(spec))


def read_config(spec: ModelSpec) -> Any:
    """config.json as transformers reads it. Raises ModelLoadError, also for a `load_format` that there is not."""
    refuse = refusal(spec)
    if spec.load_format not in ("auto", "dummy"):
        raise refuse(f"load_format is {spec.load_format!r}; use auto or dummy")
    folder = Path(spec.path)
    _require_folder(folder, refuse)
    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise refuse(f"{type(error).__name__}: {error}") from error


def require_loadable(spec: ModelSpec) -> None:
    """Raises ModelLoadError for what `load_weights` would refuse before it reads weights."""
    dtype_of(spec)
    require_context(spec, read_config(spec))
    if spec.load_format == "auto":
        _require_weights(Path(spec.path), refusal(spec))


def _from_config(config: Any, dtype: torch.dtype, refuse: Callable[[str], ModelLoadError]) -> Any:
    try:
        with _making_models:
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="eager", trust_remote_code=False
            )
    except Exception as error:
        # Whatever a foreign configuration makes the library raise, the model cannot be served.
        raise refuse(f"{type(error).__name__}: {error}") from error
    return model.eval()


def _require_folder(folder: Path, refuse: Callable[[str], ModelLoadError]) -> None:
    if not folder.is_dir():
        raise refuse("the folder does not exist")
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


def _require_weights(folder: Path, refuse: Callable[[str], ModelLoadError]) -> None:
    if not any(folder.glob("*.safetensors")):
        raise refuse("the folder has no *.safetensors file; other weight formats are not read")


def _read(folder: Path, dtype: torch.dtype, refuse: Callable[[str], ModelLoadError]) -> Any:
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with _making_models:
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


def require_context(spec: ModelSpec, config: Any) -> None:
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


def end_of_sequence(model: Any) -> frozenset[int]:
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
    """Turns the model to our attention and packed layers, and compares with what it gave before."""

    def run(tokens: torch.Tensor) -> tuple[torch.Tensor, dict[int, frozenset[str]]]:
        model.set_attn_implementation(ATTENTION_NAME)
        pack_linear_layers(model)
        return _run_paged(model, shape, tokens)

    probe(model, shape, run, refuse)


PROBE_TOKENS = 2 * BLOCK_TOKENS + 7


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

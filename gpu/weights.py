"""Loading a model folder (Hugging Face's layout), and refusing what our attention would compute wrongly.

Refusal comes in two steps: what the configuration says (windows, positions that depend on the batch), and then a probe
of the loaded model (probing.py).
"""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from forebay.gpu.errors import ModelLoadError
from forebay.gpu.pool import KVShape
from forebay.gpu.probing import convert_and_probe
from forebay.transport.messages import ModelSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_making_models = threading.Lock()
"""While transformers makes a model it changes what all threads of a process share: models that another thread makes
meanwhile may come out without their tied weights."""

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
        convert_and_probe(model, shape, refuse)
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

"""Configurations of public models, by their published sizes: enough to make up weights of the same shapes."""

import json
from pathlib import Path
from typing import Any

from forebay.bench.errors import BenchError

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336,
        "vocab_size": 128256, "tie_word_embeddings": False, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009], "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "qwen2.5-7b": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064,
        "tie_word_embeddings": False, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "use_sliding_window": False, "bos_token_id": 151643, "eos_token_id": 151645, "rope_theta": 1000000.0,
    },
    "qwen3-1.7b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2048, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 6144,
        "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "attention_bias": False, "use_sliding_window": False, "bos_token_id": 151643,
        "eos_token_id": 151645, "rope_theta": 1000000.0,
    },
    "tiny": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512,
        "vocab_size": 32000, "tie_word_embeddings": True, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "rope_theta": 10000.0,
    },
}  # fmt: skip
"""What their publishers' config.json says; "tiny" is for trying things out. Older readers want `rope_theta` outside."""


def write_shape(name: str, folder: Path) -> None:
    """Raises BenchError where the folder holds something else."""
    path = folder / "config.json"
    config = {**SHAPES[name], "dtype": "bfloat16", "torch_dtype": "bfloat16", "use_cache": True}
    if path.exists() and json.loads(path.read_text()) != config:
        raise BenchError(f"{path} is another model's; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config, indent=2) + "\n")
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")

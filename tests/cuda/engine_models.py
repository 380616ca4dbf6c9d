"""Models and references for the tests of the CUDA engine: random weights of bf16 or fp16 numbers, and what transformers
computes from the same numbers in float32 on the same GPU."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from forebay.gpu.cuda_step import CudaStep, FastModel
from tests.gpu.driver import Driver, Request

VOCABULARY = 1003
GPU = torch.device("cuda", 0)
MOST_ROWS = 64

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3,
    "num_attention_heads": 8, "max_position_embeddings": 2048,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip

FAST: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(
        **_SIZES, num_key_value_heads=2, head_dim=128, rope_parameters=_LLAMA3, eos_token_id=[5, 6]
    ),
    "llama, heads of 64, tied": LlamaConfig(
        **_SIZES, num_key_value_heads=1, head_dim=64, tie_word_embeddings=True, eos_token_id=5
    ),
    "mistral, one KV head a head": MistralConfig(
        **_SIZES, num_key_value_heads=8, head_dim=64, sliding_window=None, eos_token_id=5
    ),
    "qwen2": Qwen2Config(**_SIZES, num_key_value_heads=4, eos_token_id=5),
    "qwen3": Qwen3Config(**_SIZES, num_key_value_heads=4, head_dim=128, eos_token_id=5),
}  # fmt: skip
OTHERS: dict[str, PreTrainedConfig] = {
    "opt": OPTConfig(
        vocab_size=VOCABULARY, hidden_size=512, ffn_dim=1024, num_hidden_layers=3, num_attention_heads=8,
        max_position_embeddings=1024, word_embed_proj_dim=512, eos_token_id=5,
    ),
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY, n_embd=512, n_layer=3, n_head=8, n_positions=1024, eos_token_id=5, bos_token_id=5
    ),
    "llama with biases": LlamaConfig(
        **_SIZES, num_key_value_heads=2, head_dim=128, attention_bias=True, eos_token_id=5
    ),
}  # fmt: skip


def write_model(config: PreTrainedConfig, folder: Path, dtype: torch.dtype, seed: int = 0) -> Path:
    """Random weights, wide enough for the next token to depend on all of the text, rounded to `dtype`."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5 if "embed" not in name else 1.0)
            else:
                parameter.normal_(mean=1.0 if "norm" in name and "bias" not in name else 0.0, std=0.1)
    model.to(dtype).save_pretrained(folder)
    return folder


def reference_logits(folder: Path, texts: list[list[int]]) -> list[torch.Tensor]:
    """Of every position of each text, in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").to(GPU)
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([text], device=GPU)).logits[0].clone() for text in texts]


class RecordingModel(FastModel):
    """Leaves the logits of the last step in `rows`, also when they come from a graph. Made for one model at a time."""

    rows: torch.Tensor

    def logits(self, tokens: torch.Tensor, step: CudaStep) -> torch.Tensor | None:
        found = super().logits(tokens, step)
        if found is not None:
            RecordingModel.rows[: len(found)].copy_(found)
        return found


@dataclass
class Recorded:
    """Logits that a step of the engine drew a token from."""

    request: Request
    position: int
    logits: torch.Tensor


def step_recorded(run: Driver, *counts: tuple[Request, int]) -> list[Recorded]:
    """As Driver.step, and what the tokens were drawn from."""
    sampling = [request for request, count in counts if request.computed + count == len(request.tokens)]
    positions = [len(request.tokens) - 1 for request in sampling]
    run.step(*counts)
    torch.cuda.synchronize()
    rows = RecordingModel.rows[: len(sampling)].clone()
    return [Recorded(*found) for found in zip(sampling, positions, rows, strict=True)]


@dataclass(frozen=True)
class Tolerance:
    """How far a row's logits may be off (norm of the difference over the norm), and all rows in the mean."""

    worst: float
    mean: float


TOLERANCE = {torch.bfloat16: Tolerance(0.04, 0.02), torch.float16: Tolerance(4e-3, 4e-3)}
"""bf16 has 8 bits: measured on an H200, the worst of 200 to 1,000 rows is off by 0.018 to 0.025."""


def compare(folder: Path, recorded: list[Recorded], tolerance: Tolerance) -> None:
    """Asserts that logits are those of transformers up to `tolerance`, and that tokens are the most probable ones where
    the difference cannot change that; says which rows are the worst."""
    requests = list({id(found.request): found.request for found in recorded}.values())
    expected = dict(
        zip(map(id, requests), reference_logits(folder, [request.tokens[:-1] for request in requests]), strict=True)
    )
    errors: list[tuple[float, str]] = []
    wrong: list[str] = []
    for found in recorded:
        truth = expected[id(found.request)][found.position]
        error = float((found.logits - truth).norm() / truth.norm())
        place = f"sequence {found.request.number}, position {found.position}: error {error:.4f}"
        errors.append((error, place))
        first, second = truth.topk(2).values.tolist()
        if first - second > 4 * tolerance.worst * float(truth.norm()) / len(truth) ** 0.5:
            drawn, best = found.request.tokens[found.position + 1], int(truth.argmax())
            if drawn != best:
                wrong.append(f"{place}: drew {drawn}, {best} is first by {first - second:.3f}")
    errors.sort(reverse=True)
    mean = sum(error for error, _ in errors) / len(errors)
    largest = [f"{error:.4f}" for error, _ in errors[:5]]
    print(f"\n{len(errors)} rows, errors: mean {mean:.4f}, largest {largest}", end="")
    off = sum(error > tolerance.worst for error, _ in errors)
    assert not off, f"{off} rows of {len(errors)} are off by more than {tolerance.worst}: {errors[:8]}"
    assert mean < tolerance.mean, f"rows are off by {mean:.4f} in the mean, allowed is {tolerance.mean}: {errors[:8]}"
    assert not wrong, wrong[:8]

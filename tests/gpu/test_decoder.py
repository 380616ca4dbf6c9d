"""Our forward pass of the fast families beside transformers' own, in float32 on the CPU with plain torch operators."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from forebay.gpu.decoder import DecoderWeights, fast_shape, forward
from forebay.gpu.decoder_weights import made_up_weights, merged_weights, on_device
from forebay.gpu.torch_operators import TorchOperators, TorchShare, TorchStep

VOCABULARY = 131
ALLOCATE = on_device(torch.device("cpu"))
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
ROPES: dict[str, dict[str, Any]] = {
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
}  # fmt: skip
MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama, tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama, one KV head a head": LlamaConfig(**{**SIZES, "num_key_value_heads": 6}),
    **{f"llama, rope {name}": LlamaConfig(**SIZES, rope_parameters=rope) for name, rope in ROPES.items()},
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models so small are only held up by a second one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def reference(config: PreTrainedConfig) -> Any:
    """Transformers' model with random weights, biases and norms."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2)
    return model


def pool_for(weights: DecoderWeights, blocks: int) -> torch.Tensor:
    return torch.full((blocks, *weights.shape.kv_shape(torch.float32).block), torch.nan)


def run(
    weights: DecoderWeights, pool: torch.Tensor, *shares: tuple[list[int], int, int, list[int]], keep: list[int] | None
) -> torch.Tensor | None:
    """One step: each share is a sequence's tokens, the first and the last position to compute, and its blocks. `keep`:
    which shares sample."""
    tokens, positions, rows, packed, ends = [], [], [], [], []
    for text, start, end, blocks in shares:
        tokens += text[start:end]
        positions += range(start, end)
        rows += [blocks[p // 16] * 16 + p % 16 for p in range(start, end)]
        packed.append(TorchShare(end - start, end, torch.tensor(blocks[: -(-end // 16)])))
        ends.append(len(tokens) - 1)
    kept = None if keep is None else torch.tensor([ends[i] for i in keep], dtype=torch.long)
    step = TorchStep(pool, torch.tensor(positions), torch.tensor(rows), tuple(packed), kept)
    with torch.inference_mode():
        return forward(weights, torch.tensor(tokens), step, TorchOperators())


def text_of(length: int, seed: int) -> list[int]:
    return list(torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers_however_the_text_is_cut(name: str) -> None:
    model = reference(MODELS[name])
    first, second = text_of(53, 1), text_of(20, 2)
    with torch.inference_mode():
        expected = [model(input_ids=torch.tensor([text])).logits[0] for text in (first, second)]
    shape = fast_shape(model.config)
    assert shape is not None
    weights = merged_weights(model, shape, ALLOCATE, 64)
    pool = pool_for(weights, 8)
    one, two = [5, 0, 3, 7], [2, 6]
    whole = run(weights, pool, (first, 0, 53, one), (second, 0, 20, two), keep=None)
    torch.testing.assert_close(whole, torch.cat(expected), rtol=1e-4, atol=1e-4)
    pool.fill_(torch.nan)
    assert run(weights, pool, (first, 0, 33, one), keep=[]) is None
    mixed = run(weights, pool, (first, 33, 52, one), (second, 0, 17, two), keep=[1])
    torch.testing.assert_close(mixed, expected[1][16:17], rtol=1e-4, atol=1e-4)
    for position in (17, 18, 19):
        row = run(weights, pool, (second, position, position + 1, two), keep=None)
        torch.testing.assert_close(row, expected[1][position : position + 1], rtol=1e-4, atol=1e-4)
    both = run(weights, pool, (first, 52, 53, one), (second, 17, 20, two), keep=[0, 1])
    torch.testing.assert_close(both, torch.stack([expected[0][52], expected[1][19]]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_greedy_tokens_are_those_of_generate(name: str) -> None:
    model = reference(MODELS[name])
    text = text_of(21, 3)
    out = model.generate(
        torch.tensor([text]), attention_mask=torch.ones(1, 21, dtype=torch.long), max_new_tokens=20, do_sample=False,
        eos_token_id=-1, pad_token_id=0,
    )  # fmt: skip
    shape = fast_shape(model.config)
    assert shape is not None
    weights = merged_weights(model, shape, ALLOCATE, 64)
    pool = pool_for(weights, 4)
    computed = 0
    while len(text) < 41:
        logits = run(weights, pool, (text, computed, len(text), [3, 1, 0]), keep=[0])
        assert logits is not None
        computed = len(text)
        text.append(int(logits[0].argmax()))
    assert text == out[0].tolist()


def test_rows_of_padding_write_nothing() -> None:
    model = reference(MODELS["llama"])
    shape = fast_shape(model.config)
    assert shape is not None
    weights = merged_weights(model, shape, ALLOCATE, 64)
    pool = torch.zeros(2, *shape.kv_shape(torch.float32).block)
    share = TorchShare(1, 1, torch.tensor([1]))
    step = TorchStep(pool, torch.tensor([0]), torch.tensor([-1]), (share,), None)
    with torch.inference_mode():
        forward(weights, torch.tensor([7]), step, TorchOperators())
    assert not pool.any()


@pytest.mark.parametrize("name", ["llama, tied", "qwen2", "qwen3", "llama, rope llama3"])
def test_made_up_weights_are_the_same_every_time_and_whole(name: str) -> None:
    config = MODELS[name]
    shape = fast_shape(config)
    assert shape is not None
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    first, again = (made_up_weights(empty, shape, torch.float32, ALLOCATE, 40) for _ in range(2))
    assert torch.equal(first.layers[-1].down, again.layers[-1].down)
    merged = merged_weights(reference(config), shape, ALLOCATE, 40)
    for mine, real in zip((first, *first.layers), (merged, *merged.layers), strict=True):
        for field, value in vars(real).items():
            made = vars(mine)[field]
            if isinstance(value, torch.Tensor):
                assert (made.shape, made.dtype) == (value.shape, value.dtype), field
            else:
                assert field in ("shape", "layers") or made is value is None, field
    assert torch.equal(first.cos, merged.cos)
    assert (first.head is first.embedding) == shape.tied
    logits = run(first, pool_for(first, 2), (text_of(20, 1), 0, 20, [0, 1]), keep=None)
    assert logits is not None
    assert bool(logits.isfinite().all())


def test_the_size_counts_what_there_is() -> None:
    for config in (MODELS["llama"], MODELS["llama, tied"], MODELS["mistral"]):
        shape = fast_shape(config)
        assert shape is not None
        exact = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        norms = (2 * shape.layers + 1) * shape.hidden
        assert shape.parameters == exact - norms


@pytest.mark.parametrize(
    "config",
    [
        GemmaConfig(**SIZES),
        LlamaConfig(**SIZES, attention_bias=True),
        LlamaConfig(**SIZES, mlp_bias=True),
        LlamaConfig(**SIZES, hidden_act="gelu"),
    ],
)
def test_other_variants_are_left_to_transformers(config: PreTrainedConfig) -> None:
    assert fast_shape(config) is None

"""Loading: shared weights, and a refusal with a reason for everything that would be served wrongly."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from forebay.gpu.errors import ModelLoadError
from forebay.gpu.weights import WeightCache, load_weights
from forebay.transport.messages import ModelSpec
from tests.gpu.driver import write_tiny

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
}  # fmt: skip


def save(config: PreTrainedConfig, folder: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def spec(folder: Path, **fields) -> ModelSpec:
    return ModelSpec(name="llm", path=str(folder), **fields)


def test_weights_of_one_folder_and_dtype_are_shared_until_the_last_user_is_gone(tmp_path) -> None:
    folder = write_tiny("llama", tmp_path)
    cache = WeightCache(load_weights)
    first = cache.acquire(spec(folder))
    again = cache.acquire(ModelSpec(name="other", path=str(folder / ".." / folder.name)))
    half = cache.acquire(spec(folder, dtype="bfloat16"))
    assert first is again
    assert half is not first
    assert half.shape.block_bytes * 2 == first.shape.block_bytes
    assert sorted(cache.users.values()) == [1, 2]
    cache.release(spec(folder))
    assert cache.acquire(spec(folder)) is first
    for _ in range(2):
        cache.release(spec(folder))
    cache.release(spec(folder, dtype="bfloat16"))
    assert cache.users == {}
    assert cache.acquire(spec(folder)) is not first


def test_end_of_sequence_ids_come_from_the_generation_configuration(tmp_path) -> None:
    folder = write_tiny("llama", tmp_path)
    assert load_weights(spec(folder)).end_of_sequence == {5, 6}
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": 9}))
    assert load_weights(spec(folder)).end_of_sequence == {9}
    path.unlink()
    assert load_weights(spec(folder)).end_of_sequence == {5, 6}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_passes_the_probe(tmp_path, dtype) -> None:
    weights = load_weights(spec(save(Qwen3Config(**SMALL), tmp_path), dtype=dtype))
    assert (weights.shape.layers, weights.shape.kv_heads, weights.shape.head_size) == (2, 2, 8)
    assert (weights.vocabulary, weights.max_positions) == (64, 256)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_decoders_with_learned_positions_are_served(tmp_path, family) -> None:
    configs = {
        "gpt2": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=256),
        "opt": OPTConfig(
            vocab_size=64, hidden_size=32, ffn_dim=32, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=256, word_embed_proj_dim=32,
        ),
    }  # fmt: skip
    assert load_weights(spec(save(configs[family], tmp_path))).shape.kv_heads == 4


@pytest.mark.parametrize(
    ("config", "fields", "reason"),
    [
        (
            FalconConfig(
                vocab_size=64,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=256,
                alibi=True,
            ),
            {},
            "sends 0 of its 2 layers through transformers' attention interface",
        ),
        (MistralConfig(**SMALL, sliding_window=64), {}, "sliding_window=64.*set max_context to at most 64"),
        (
            Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=32, max_window_layers=1),
            {"max_context": 33},
            "sliding_window=32",
        ),
        (
            LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            {},
            "rope type 'dynamic', which is not supported; supported: default",
        ),
        (
            Gemma2Config(**SMALL, sliding_window=4096),
            {},
            "attention of Gemma2ForCausalLM wants 'softcap', which is not supported",
        ),
    ],
)
def test_attention_that_is_not_plain_is_refused_by_name(tmp_path, config, fields, reason) -> None:
    folder = save(config, tmp_path)
    with pytest.raises(ModelLoadError, match=reason) as caught:
        load_weights(spec(folder, **fields))
    assert str(folder) in str(caught.value)
    assert "'llm'" in str(caught.value)


def test_experts_are_no_matter_for_attention(tmp_path) -> None:
    load_weights(spec(save(MixtralConfig(**SMALL, num_local_experts=2), tmp_path)))


def test_the_probe_sees_a_model_that_computes_something_else(tmp_path, monkeypatch) -> None:
    folder = save(LlamaConfig(**SMALL), tmp_path)
    monkeypatch.setattr(
        "forebay.gpu.probing.pack_linear_layers",
        lambda model: model.model.layers[1].self_attn.v_proj.weight.mul_(1.1),
    )
    with pytest.raises(ModelLoadError, match="LlamaForCausalLM gives other logits"):
        load_weights(spec(folder))


def test_a_window_wider_than_the_context_does_not_matter(tmp_path) -> None:
    folder = save(MistralConfig(**SMALL, sliding_window=64), tmp_path)
    assert load_weights(spec(folder, max_context=64)).max_positions == 256


def test_shared_weights_do_not_lift_the_limit_of_a_window(tmp_path) -> None:
    folder = save(MistralConfig(**SMALL, sliding_window=64), tmp_path)
    cache = WeightCache(load_weights)
    cache.acquire(spec(folder, max_context=64))
    with pytest.raises(ModelLoadError, match="sliding_window=64"):
        cache.acquire(spec(folder))


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    folder = save(LlamaConfig(**SMALL), tmp_path_factory.mktemp("sound"))
    load_weights(spec(folder))
    return folder


def _remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _unknown_architecture(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "unheard-of"}))


def _more_layers(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 4}))


def _quantized(folder: Path) -> None:
    path = folder / "config.json"
    marks = {"quantization_config": {"quant_method": "gptq"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | marks))


def _not_finite(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight[3] = torch.inf
    model.save_pretrained(folder)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda folder: (folder / "config.json").write_text("{}"), "names no model_type"),
        (_remove_weights, r"no \*.safetensors file"),
        (_cut_weights, "SafetensorError"),
        (_unknown_architecture, "unheard-of"),
        (_more_layers, "weights lack 18 tensors"),
        (_quantized, r"quantized weights \(gptq\)"),
        (_not_finite, "logits are not finite in float32"),
    ],
)
def test_damaged_folder_is_refused_with_the_reason(tmp_path, sound, damage, reason) -> None:
    folder = shutil.copytree(sound, tmp_path / "model")
    damage(folder)
    with pytest.raises(ModelLoadError, match=reason):
        load_weights(spec(folder))


def test_dummy_weights_need_the_configuration_alone_and_are_the_same_every_time(tmp_path) -> None:
    LlamaConfig(**SMALL, eos_token_id=[3, 4]).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"no \*.safetensors file"):
        load_weights(spec(tmp_path))
    first, again = (load_weights(spec(tmp_path, load_format="dummy")) for _ in range(2))
    pairs = zip(first.model.state_dict().values(), again.model.state_dict().values(), strict=True)
    assert all(torch.equal(mine, other) for mine, other in pairs)
    assert first.end_of_sequence == {3, 4}
    with pytest.raises(ModelLoadError, match="load_format is 'gguf'; use auto or dummy"):
        load_weights(spec(tmp_path, load_format="gguf"))


def test_unknown_dtype_and_missing_folder(tmp_path) -> None:
    with pytest.raises(ModelLoadError, match="dtype 'int3' is not supported; use one of float32, bfloat16, float16"):
        load_weights(spec(tmp_path, dtype="int3"))
    with pytest.raises(ModelLoadError, match="the folder does not exist"):
        load_weights(spec(tmp_path / "nowhere"))

"""A device on which weights come and go: models are known before their weights are there, sequences outlive both."""

import gc
import json
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig

from forebay.gpu.device import Device, open_device
from forebay.gpu.errors import ModelLoadError, StepError
from forebay.gpu.movable import describe
from forebay.gpu.weights import load_weights
from forebay.transport.messages import DeviceSettings, ModelSpec, StepPlan, Work
from tests.gpu.driver import Blocks, Driver, generate, prompt_of, write_tiny

BUDGET = 1 << 20


@pytest.fixture
def device() -> Iterator[Device]:
    device = open_device(
        "cpu:0", DeviceSettings(memory=4 << 20, slab_bytes=1 << 20, threads=1, weights_memory=BUDGET)
    )  # fmt: skip
    yield device
    device.close()


@pytest.mark.parametrize(("family", "dtype"), [("llama", "bfloat16"), ("mistral", "float32"), ("qwen2", "float32")])
def test_the_configuration_says_what_the_weights_say(tmp_path: Path, family: str, dtype: str) -> None:
    spec = ModelSpec("a", str(write_tiny(family, tmp_path)), dtype)
    described, weights = describe(spec), load_weights(spec)
    assert described.shape == weights.shape
    assert described.vocabulary == weights.vocabulary
    assert described.max_positions == weights.max_positions
    stored = (tmp_path / "model.safetensors").stat().st_size
    header = int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little") + 8
    assert described.weight_bytes == (stored - header) // (1 if dtype == "float32" else 2)


def test_models_may_be_described_while_others_are_loaded(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=1000, hidden_size=48, intermediate_size=96, num_hidden_layers=12, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    spec = ModelSpec("a", str(tmp_path))
    expected = describe(spec).weight_bytes
    with ThreadPoolExecutor(1) as thread:
        loading = thread.submit(lambda: [load_weights(spec) for _ in range(2)])
        found = {describe(spec).weight_bytes}
        while not loading.done():
            found.add(describe(spec).weight_bytes)
        for weights in loading.result():
            assert weights.model.lm_head is not None
    assert found == {expected}


def test_a_text_goes_on_as_if_the_weights_had_never_left(tmp_path: Path, device: Device) -> None:
    folder = write_tiny("llama", tmp_path)
    runner = device.introduce(ModelSpec("a", str(folder)))
    run = Driver(runner, Blocks(device.pool.capacity))  # type: ignore[arg-type]
    prompt = prompt_of(20, 1)
    dropped, request = run.open(prompt_of(3, 2)), run.open(prompt)
    run.close(dropped)
    device.restore("a")
    run.step((request, 20))
    for _ in range(3):
        run.step((request, 1))
        device.evict("a")
        device.evict("a")
        other = run.open(prompt_of(5, 3))
        device.restore("a")
        device.restore("a")
        run.step((other, 5), (request, 1))
        run.close(other)
    assert request.tokens[20:] == generate(folder, prompt, 7)


def test_a_step_without_weights_fails_alone(tmp_path: Path, device: Device) -> None:
    runner = device.introduce(ModelSpec("a", str(write_tiny("llama", tmp_path))))
    plan = StepPlan(1, "a", (Work(0, 0, 1, 0, (0,), True),))
    with pytest.raises(StepError, match="step 1 of model 'a': its weights are away"):
        runner.launch(plan).result(timeout=10)


def test_evicted_weights_are_freed(tmp_path: Path, device: Device) -> None:
    runner = device.introduce(ModelSpec("a", str(write_tiny("llama", tmp_path))))
    device.restore("a")
    assert runner.runner is not None
    model = weakref.ref(runner.runner._weights.model)  # type: ignore[attr-defined]
    gc.disable()
    try:
        device.evict("a")
        assert model() is None
    finally:
        gc.enable()


def test_names_share_weights_while_one_of_them_has_them(tmp_path: Path, device: Device) -> None:
    folder = str(write_tiny("llama", tmp_path))
    for name in "ab":
        device.introduce(ModelSpec(name, folder))
        device.restore(name)
    users = device._weights.users  # type: ignore[attr-defined]
    assert list(users.values()) == [2]
    device.evict("a")
    assert list(device._weights.users.values()) == [1]  # type: ignore[attr-defined]
    device.unload("a")
    device.unload("b")
    assert not device._weights.users  # type: ignore[attr-defined]
    device.introduce(ModelSpec("a", folder))
    device.unload("a")
    with pytest.raises(KeyError):
        device.unload("a")


def test_what_can_be_seen_to_be_wrong_is_refused_before_the_weights_are_read(tmp_path: Path, device: Device) -> None:
    folder = write_tiny("llama", tmp_path / "good")
    device.introduce(ModelSpec("a", str(folder)))
    with pytest.raises(ModelLoadError, match="a model of this name already"):
        device.introduce(ModelSpec("a", str(folder)))
    with pytest.raises(ModelLoadError, match="a model of this name already"):
        device.load(ModelSpec("a", str(folder)))
    with pytest.raises(ModelLoadError, match="the folder does not exist"):
        device.introduce(ModelSpec("b", str(tmp_path / "none")))
    with pytest.raises(ModelLoadError, match="dtype 'int8' is not supported"):
        device.introduce(ModelSpec("b", str(folder), "int8"))
    (folder / "model.safetensors").rename(tmp_path / "weights")
    with pytest.raises(ModelLoadError, match=r"no \*.safetensors file"):
        device.introduce(ModelSpec("b", str(folder)))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "nonsense"}))
    (tmp_path / "weights").rename(folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match="nonsense"):
        device.introduce(ModelSpec("b", str(folder)))
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 1 << 14}))
    with pytest.raises(ModelLoadError, match=rf"its weights take \d+ bytes, the device's weights_memory is {BUDGET}"):
        device.introduce(ModelSpec("b", str(folder)))


def test_weights_that_cannot_be_read_stay_away_and_are_tried_again(tmp_path: Path, device: Device) -> None:
    folder = write_tiny("llama", tmp_path)
    runner = device.introduce(ModelSpec("a", str(folder)))
    run = Driver(runner, Blocks(device.pool.capacity))  # type: ignore[arg-type]
    request = run.open(prompt := prompt_of(20, 1))
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:1000])
    with pytest.raises(ModelLoadError):
        device.restore("a")
    (folder / "model.safetensors").write_bytes(weights)
    device.restore("a")
    run.step((request, 20))
    assert request.tokens[20:] == generate(folder, prompt, 1)

"""The runner against transformers' own `generate`, greedy in float32: token for token, however the work is cut."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from forebay.gpu.device import Device, open_device
from forebay.gpu.errors import ModelLoadError, StepError
from forebay.gpu.weights import WeightCache, load_weights
from forebay.transport.messages import CloseSequence, DeviceSettings, ModelSpec, OpenSequence, Sampling, StepPlan, Work
from tests.gpu.driver import TINY, VOCABULARY, Blocks, Driver, Request, continue_with, generate, prompt_of, write_tiny

FAMILIES = sorted(TINY)
POOL = 8 << 20


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write_tiny(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[tuple[str, int], list[int]]:
    """Continuations of `prompt_of(length, length)` by family and length."""
    lengths = (1, 15, 16, 17, 40, 100)
    models = {f: AutoModelForCausalLM.from_pretrained(folders[f], dtype=torch.float32) for f in FAMILIES}
    return {(f, n): continue_with(models[f], prompt_of(n, n), 24) for f in FAMILIES for n in lengths}


@pytest.fixture(scope="module")
def weights(folders: dict[str, Path]) -> WeightCache[Any]:
    """The weights of all families, loaded once for all tests: reading and probing them took most of the time."""
    cache = WeightCache(load_weights)
    for folder in folders.values():
        cache.acquire(ModelSpec(name="m", path=str(folder)))
    return cache


@pytest.fixture
def device(weights: WeightCache[Any]) -> Iterator[Device]:
    opened = open_device("cpu:0", DeviceSettings(memory=POOL, slab_bytes=1 << 20, threads=1))
    opened._weights = weights  # type: ignore[attr-defined]
    _poison(opened)
    yield opened
    opened.close()


def _poison(device: Device) -> None:
    """What another model left behind reads as NaN in any dtype."""
    for slab in device.pool.slabs:
        with open(f"/proc/self/fd/{slab.fileno()}", "r+b") as file:
            file.write(b"\xff" * slab.size)


def driver(device: Device, folder: Path, name: str = "m", blocks: Blocks | None = None) -> Driver:
    runner = device.load(ModelSpec(name=name, path=str(folder)))
    return Driver(runner, blocks or Blocks(device.pool.capacity))


def continuation(request: Request) -> list[int]:
    return request.tokens[request.prompt_tokens :]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_whole_prompt_then_decode(device, folders, expected, family, length) -> None:
    run = driver(device, folders[family])
    request = run.open(prompt_of(length, length))
    run.step((request, length))
    for _ in range(23):
        run.step((request, 1))
    assert continuation(request) == expected[family, length]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunks", [(1, 1, 1, 37), (7, 9, 24), (16, 16, 8), (17, 22, 1), (39, 1)])
def test_prompt_in_chunks_of_odd_sizes(device, folders, expected, family, chunks) -> None:
    run = driver(device, folders[family])
    request = run.open(prompt_of(40, 40))
    for count in (*chunks, *[1] * 23):
        run.step((request, count))
    assert continuation(request) == expected[family, 40]


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decode_of_many_sequences_in_one_step(device, folders, expected, family) -> None:
    run = driver(device, folders[family])
    short = run.open(prompt_of(15, 15))
    run.step((short, 15))
    middle, long, single = (run.open(prompt_of(n, n)) for n in (40, 100, 1))
    run.step((middle, 23), (short, 1), (long, 50))
    run.step((short, 1), (single, 1), (long, 49), (middle, 17))
    run.step((long, 1), (middle, 1), (single, 1), (short, 1))
    for _ in range(20):
        run.step((short, 1), (long, 1), (middle, 1), (single, 1))
    for request in (short, middle, long, single):
        got = continuation(request)
        assert got == expected[family, request.prompt_tokens][: len(got)]
        assert len(got) >= 20


def test_decode_rows_that_do_not_fit_one_gather(device, folders, expected, monkeypatch) -> None:
    monkeypatch.setattr("forebay.gpu.attention.GATHER_BYTES", 4096)
    run = driver(device, folders["llama"])
    requests = [run.open(prompt_of(n, n)) for n in (100, 15, 16, 40, 17)]
    for request in requests:
        run.step((request, request.prompt_tokens))
    for _ in range(20):
        run.step(*((request, 1) for request in requests))
    for request in requests:
        assert continuation(request) == expected["llama", request.prompt_tokens][:21]


def test_steps_launched_before_earlier_tokens_are_known(device, folders, expected) -> None:
    run = driver(device, folders["qwen2"])
    requests = [run.open(prompt_of(n, n)) for n in (17, 40)]
    futures = [run.launch(*((request, request.prompt_tokens) for request in requests))]
    futures += [run.launch(*((request, 1) for request in requests)) for _ in range(23)]
    for future in futures:
        run.finish(future, *requests)
    for request in requests:
        assert continuation(request) == expected["qwen2", request.prompt_tokens]


def test_request_resumed_as_a_new_sequence(device, folders, expected) -> None:
    run = driver(device, folders["mistral"])
    first = run.open(prompt_of(40, 40))
    run.step((first, 40))
    for _ in range(8):
        run.step((first, 1))
    run.close(first)
    second = run.open(first.tokens, prompt_tokens=40)
    run.step((second, 30))
    run.step((second, 19))
    for _ in range(14):
        run.step((second, 1))
    assert continuation(second) == expected["mistral", 40]


def test_recompute_from_the_start_after_the_blocks_were_given_up(device, folders, expected) -> None:
    run = driver(device, folders["llama"])
    request = run.open(prompt_of(17, 17))
    run.step((request, 17))
    for _ in range(10):
        run.step((request, 1))
    run.restart(request)
    run.step((request, 20))
    run.step((request, 8))
    for _ in range(12):
        run.step((request, 1))
    assert continuation(request) == expected["llama", 17]


def test_models_of_different_shapes_share_one_pool(device, folders, expected) -> None:
    blocks = Blocks(device.pool.capacity, seed=3)
    runs = [driver(device, folders[family], family, blocks) for family in FAMILIES]
    assert len({run.runner.block_bytes for run in runs}) == len(runs)
    requests = [[run.open(prompt_of(n, n)) for n in (100, 16, 40)] for run in runs]
    for run, mine in zip(runs, requests, strict=True):
        run.step(*((request, request.prompt_tokens) for request in mine))
    for _ in range(23):
        futures = [run.launch(*((request, 1) for request in mine)) for run, mine in zip(runs, requests, strict=True)]
        for run, future, mine in zip(runs, futures, requests, strict=True):
            run.finish(future, *mine)
    for family, mine in zip(FAMILIES, requests, strict=True):
        for request in mine:
            assert continuation(request) == expected[family, request.prompt_tokens]


@pytest.mark.model
def test_smollm2_shares_a_pool_with_tiny_models(smollm2, folders, expected) -> None:
    device = open_device("cpu:0", DeviceSettings(memory=64 << 20, slab_bytes=4 << 20, threads=1))
    try:
        _poison(device)
        blocks = Blocks(device.pool.capacity, seed=1)
        real = driver(device, smollm2, "smollm2", blocks)
        runs = [driver(device, folders[family], family, blocks) for family in FAMILIES]
        tiny = [run.open(prompt_of(40, 40)) for run in runs]
        prompts = [prompt_of(n, n, 49_000) for n in (70, 33)]
        large = [real.open(prompt) for prompt in prompts]
        real.step((large[0], 45))
        real.step((large[1], 33), (large[0], 25))
        for run, request in zip(runs, tiny, strict=True):
            run.step((request, 40))
        for _ in range(20):
            real.step(*((request, 1) for request in large))
            for run, request in zip(runs, tiny, strict=True):
                run.step((request, 1))
        for family, request in zip(FAMILIES, tiny, strict=True):
            assert continuation(request) == expected[family, 40][:21]
        for request, prompt in zip(large, prompts, strict=True):
            assert continuation(request) == generate(smollm2, prompt, 21)
    finally:
        device.close()


@pytest.mark.model
def test_chat_of_smollm2_ends_at_its_end_of_turn(smollm2) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    device = open_device("cpu:0", DeviceSettings(memory=64 << 20, slab_bytes=4 << 20, threads=1))
    try:
        run = driver(device, smollm2)
        request = run.open(prompt, Sampling(max_tokens=60))
        run.step((request, len(prompt)))
        while request.stopped[-1] == 0 and len(request.stopped) < 60:
            run.step((request, 1))
        assert request.stopped[-1] == 1
        assert tokenizer.decode(continuation(request)[-1]) == "<|im_end|>"
        assert "Paris" in tokenizer.decode(continuation(request))
    finally:
        device.close()


def test_sampled_text_is_the_same_alone_and_resumed_in_another_batch(device, folders) -> None:
    run = driver(device, folders["llama"])
    sampling = Sampling(max_tokens=100, temperature=1.5, top_p=0.95, seed=11, ignore_eos=True)
    alone = run.open(prompt_of(17, 17), sampling)
    run.step((alone, 17))
    for _ in range(19):
        run.step((alone, 1))
    others = [run.open(prompt_of(n, n), Sampling(max_tokens=9, temperature=1.0, seed=n)) for n in (16, 40)]
    resumed = run.open(alone.tokens[: 17 + 8], sampling, prompt_tokens=17)
    run.step((others[0], 16), (resumed, 25), (others[1], 40))
    for _ in range(11):
        run.step((others[1], 1), (resumed, 1), (others[0], 1))
    assert continuation(resumed) == continuation(alone)
    assert continuation(alone) != generate(folders["llama"], prompt_of(17, 17), 20)


def test_end_of_sequence_is_marked_held_back_and_ignored(device, folders) -> None:
    run = driver(device, folders["llama"])
    eos = (5, 6)
    found = None
    for seed in range(200):
        request = run.open(prompt_of(9, seed), Sampling(max_tokens=40))
        run.step((request, 9))
        while request.stopped[-1] == 0 and len(request.stopped) < 12:
            run.step((request, 1))
        if request.stopped[-1] == 1 and len(request.stopped) > 1:
            found = seed, len(request.stopped), request.tokens
            break
    assert found is not None, "no prompt of 200 led to an end of sequence"
    seed, length, tokens = found
    assert tokens[-1] in eos
    assert not set(tokens[9:-1]) & set(eos)
    ignoring = run.open(prompt_of(9, seed), Sampling(max_tokens=40, ignore_eos=True))
    held_back = run.open(prompt_of(9, seed), Sampling(max_tokens=40, min_tokens=length))
    run.step((ignoring, 9), (held_back, 9))
    for _ in range(length - 1):
        run.step((ignoring, 1), (held_back, 1))
    assert ignoring.tokens == tokens
    assert ignoring.stopped == [0] * length
    assert not set(held_back.tokens[9:]) & set(eos)
    assert held_back.tokens[:-1] == tokens[:-1]


def test_rows_with_logits_that_are_not_finite_are_marked_alone(device, folders, expected, tmp_path) -> None:
    run = driver(device, shutil.copytree(folders["llama"], tmp_path / "model"))  # its weights are changed
    model = run.runner._weights.model
    poison = next(token for token in range(10, VOCABULARY) if token not in prompt_of(40, 40) + expected["llama", 40])
    with torch.inference_mode():
        model.get_input_embeddings().weight[poison] = torch.nan
    bad, good = run.open([10, poison, 12]), run.open(prompt_of(40, 40))
    run.step((bad, 3), (good, 40))
    for _ in range(10):
        run.step((bad, 1), (good, 1))
    assert set(bad.stopped) == {2}
    assert set(good.stopped) == {0}
    assert continuation(good) == expected["llama", 40][:11]


def _open(number: int, tokens: list[int]) -> OpenSequence:
    return OpenSequence(number, "m", np.array(tokens, "<u4").tobytes(), len(tokens), Sampling(max_tokens=4))


@pytest.mark.parametrize(
    ("work", "problem"),
    [
        (Work(9, 0, 1, 0, (0,), False), "not open"),
        (Work(1, 0, 4, 0, (0,), False), "3 tokens are known"),
        (Work(1, 0, 2, 0, (0,), True), "to sample from"),
        (Work(1, 0, 3, 0, (), True), "table of 0 blocks is too short"),
        (Work(1, 0, 3, 0, (10**6,), True), "block outside"),
        (Work(1, 0, 0, 0, (0,), False), "3 tokens are known"),
    ],
)
def test_step_that_breaks_the_contract_fails_and_changes_nothing(device, folders, work, problem) -> None:
    run = driver(device, folders["llama"])
    run.runner.open(_open(1, [20, 21, 22]))
    with pytest.raises(StepError, match=problem):
        run.runner.launch(StepPlan(1, "m", (work,))).result(timeout=30)
    done = run.runner.launch(StepPlan(2, "m", (Work(1, 0, 3, 0, (0,), True),))).result(timeout=30)
    assert (done.step, len(done.tokens), done.seconds > 0) == (2, 4, True)


def test_sequences_are_opened_and_closed_once(device, folders) -> None:
    runner = driver(device, folders["llama"]).runner
    runner.open(_open(1, [20]))
    with pytest.raises(StepError, match="open already"):
        runner.open(_open(1, [20]))
    with pytest.raises(StepError, match="0 to 210"):
        runner.open(_open(2, [VOCABULARY]))
    with pytest.raises(StepError, match="1 to 512"):
        runner.open(_open(2, [20] * 513))
    runner.close(CloseSequence(1, "m"))
    with pytest.raises(StepError, match="not open"):
        runner.close(CloseSequence(1, "m"))
    with pytest.raises(StepError, match="not open"):
        runner.launch(StepPlan(1, "m", (Work(1, 0, 1, 0, (0,), True),))).result(timeout=30)


def test_context_is_the_least_of_model_spec_and_pool(folders) -> None:
    spec = ModelSpec(name="m", path=str(folders["llama"]))
    block_bytes = 3 * 2 * 16 * 2 * 8 * 4
    small = 16 * (5 * 4096 // block_bytes)
    for memory, limit, context in ((1 << 20, 0, 512), (1 << 20, 100, 100), (5 * 4096, 0, small)):
        device = open_device("cpu:0", DeviceSettings(memory=memory, slab_bytes=4096, threads=1))
        limited = ModelSpec(name=spec.name, path=spec.path, max_context=limit)
        runner = device.load(limited)
        assert runner.max_context == context
        assert runner.block_bytes == block_bytes
        assert runner.blocks == memory // block_bytes
        device.close()
    device = open_device("cpu:0", DeviceSettings(memory=4096, slab_bytes=4096, threads=1))
    with pytest.raises(ModelLoadError, match=f"takes {block_bytes} bytes, the device's pool has 4096"):
        device.load(spec)
    device.close()

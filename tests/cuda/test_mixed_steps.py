"""Captured steps with prompts in them on a GPU, beside the same steps launch by launch and beside transformers.

python -m pytest -q -s -x tests/cuda/test_mixed_steps.py
"""

import contextlib
import time
from pathlib import Path

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from forebay.gpu.cuda_graphs import Captures
from forebay.gpu.cuda_stepper import Stepper
from forebay.gpu.device import Device, open_device
from forebay.transport.messages import DeviceSettings, ModelSpec, Sampling
from tests.cuda.engine_models import (
    FAST,
    GPU,
    MOST_ROWS,
    TOLERANCE,
    VOCABULARY,
    Recorded,
    RecordingModel,
    compare,
    step_recorded,
    write_model,
)
from tests.cuda.test_engine import driver, opened, prompt
from tests.gpu.driver import Blocks, Driver, Request

pytestmark = pytest.mark.timeout(600)
NAMES = ["llama", "llama, heads of 64, tied", "mistral, one KV head a head"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_model(FAST[name], tmp_path_factory.mktemp("model"), torch.bfloat16) for name in NAMES}


def stepper_of(run: Driver) -> Stepper:
    found = run.runner.prepare(run.lane)  # type: ignore[attr-defined]
    assert isinstance(found, Stepper)
    return found


def without_graphs(run: Driver) -> Driver:
    stepper = stepper_of(run)
    stepper.captures = Captures(stepper.captures.decodes, None)
    return run


def graphs_of(run: Driver) -> list[object]:
    """Captured mixed steps."""
    return [key for key in stepper_of(run).graphs.held if key[0] == "mixed"]  # type: ignore[index]


class Pair:
    """The same requests on a model with captured mixed steps and on the same one without, in one pool."""

    def __init__(self, device: Device, folder: Path, **fields: object) -> None:
        blocks = Blocks(device.pool.capacity, seed=5)
        self.runs = (
            driver(device, folder, "graphs", blocks, **fields),
            driver(device, folder, "plain", blocks, **fields),
        )
        without_graphs(self.runs[1])
        self.errors: list[float] = []
        self.different = 0
        self.drawn = 0

    def open(self, length: int, seed: int) -> tuple[Request, Request]:
        first, second = (run.open(prompt(length, seed)) for run in self.runs)
        return first, second

    def step(self, *counts: tuple[tuple[Request, Request], int]) -> None:
        sides = [step_recorded(run, *((pair[i], count) for pair, count in counts)) for i, run in enumerate(self.runs)]
        for one, other in zip(*sides, strict=True):
            self.errors.append(float((one.logits - other.logits).norm() / other.logits.norm()))
            self.drawn += 1
            self.different += one.request.tokens[-1] != other.request.tokens[-1]

    def alike(self, pair: tuple[Request, Request]) -> bool:
        return pair[0].tokens == pair[1].tokens


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> None:
    RecordingModel.rows = torch.zeros(MOST_ROWS, VOCABULARY, device=GPU)
    monkeypatch.setattr("forebay.gpu.cuda_loading.FastModel", RecordingModel)


@pytest.mark.parametrize("name", NAMES)
def test_random_steps_with_and_without_graphs(folders, record, name) -> None:
    """Chunks, whole prompts, decodes and recomputations in steps of 1 to 700 tokens. Texts that have come apart, by a
    token whose logits were as good as equal, are closed."""
    chance = np.random.default_rng(11)
    with opened() as device:
        pair = Pair(device, folders[name], max_sequences=40, step_tokens=1024)
        there: list[tuple[Request, Request]] = []
        sizes: list[int] = []
        for turn in range(150):
            while len(there) < 40 and chance.random() < 0.5:
                there.append(pair.open(int(chance.integers(1, 260)), 1000 + turn * 50 + len(there)))
            if there and chance.random() < 0.1:
                chosen = there[int(chance.integers(len(there)))]
                for run, request in zip(pair.runs, chosen, strict=True):
                    run.restart(request)
            counts = []
            budget = int(chance.choice([64, 128, 200, 512, 700]))
            order = sorted(there, key=lambda both: len(both[0].tokens) - both[0].computed != 1)
            for both in order:
                count = min(len(both[0].tokens) - both[0].computed, budget, int(chance.choice([1, 7, 64, 1000])))
                if count and chance.random() < 0.9:
                    counts.append((both, count))
                    budget -= count
            if counts:
                sizes.append(sum(count for _, count in counts))
                pair.step(*counts)
            for both in [both for both in there if not pair.alike(both) or len(both[0].tokens) > 500]:
                there.remove(both)
                for run, request in zip(pair.runs, both, strict=True):
                    run.give(request)
        errors = np.array(pair.errors)
        print(
            f"\n{name}: {len(sizes)} steps of {min(sizes)} to {max(sizes)} tokens, {pair.drawn} draws, "
            f"{pair.different} differ, logits are off by {errors.mean():.5f} in the mean, {errors.max():.5f} at most, "
            f"{(errors == 0).mean():.2f} not at all; graphs: {graphs_of(pair.runs[0])}",
            end="",
        )
        assert len(graphs_of(pair.runs[0])) > 4
        assert not graphs_of(pair.runs[1])[1:], "the second one has that of loading alone"
        assert errors.max() < TOLERANCE[torch.bfloat16].worst
        assert errors.mean() < TOLERANCE[torch.bfloat16].mean
        assert pair.different <= pair.drawn // 8


@pytest.mark.parametrize("tokens", [63, 64, 65, 255, 256, 257, 511, 512, 513])
def test_exactly_a_bucket_one_less_and_one_more(folders, record, tokens) -> None:
    """Three times over, so that the third one replays; with decodes in flight, and rows that sample nothing."""
    with opened() as device:
        run = driver(device, folders["llama"], max_sequences=24, step_tokens=1024)
        decoding = [run.open(prompt(20 + i, i)) for i in range(9)]
        recorded: list[Recorded] = []
        for request in decoding:
            recorded += step_recorded(run, (request, request.prompt_tokens))
        for turn in range(3):
            new, chunk = run.open(prompt(30, 100 + turn)), run.open(prompt(900, 200 + turn))
            steps = [(request, 1) for request in decoding]
            recorded += step_recorded(run, *steps, (new, 30), (chunk, tokens - 39))
            recorded += step_recorded(run, *steps, (chunk, 900 - tokens + 39))
            for request in (new, chunk):
                run.close(request)
        print(f"\n{tokens} tokens, graphs: {graphs_of(run)}", end="")
        compare(folders["llama"], recorded, TOLERANCE[torch.bfloat16])


def test_a_step_of_the_prefill_lane_without_draws_and_with_some(folders, record) -> None:
    with opened("streams") as device:
        run = driver(device, folders["llama"])
        recorded: list[Recorded] = []
        requests = [run.open(prompt(n, n)) for n in (300, 301, 302, 90)]
        run.lane = "prefill"
        for request in requests[:3]:
            for count in (100, 128):
                recorded += step_recorded(run, (request, count))
            recorded += step_recorded(run, (request, request.prompt_tokens - 228))
        print(f"\ngraphs: {graphs_of(run)}", end="")
        assert len(graphs_of(run)) >= 3
        recorded += step_recorded(run, (requests[3], 90))
        run.lane = "decode"
        for _ in range(8):
            recorded += step_recorded(run, *((request, 1) for request in requests))
        late = [run.open(prompt(60 + n, n)) for n in range(4)]
        for request in late:  # along with the decodes
            recorded += step_recorded(run, *((each, 1) for each in requests), (request, request.prompt_tokens))
        compare(folders["llama"], recorded, TOLERANCE[torch.bfloat16])


def test_steps_ahead_with_prompts_between_draw_what_single_steps_draw(folders) -> None:
    """Tokens in flight inside a captured mixed step."""
    with opened() as device:
        run = driver(device, folders["llama"], max_sequences=12)
        steady = [[run.open(prompt(20 + n, n)) for n in range(4)] for _ in range(2)]
        new = [[run.open(prompt(70 + n, 50 + n)) for n in range(6)] for _ in range(2)]
        futures = []
        for ahead in (True, False):
            first, others = steady[ahead], new[ahead]
            plans = [[(request, request.prompt_tokens) for request in first]]
            for i, request in enumerate(others):
                plans.append([*((each, 1) for each in first), *((each, 1) for each in others[:i]), (request, 70 + i)])
            plans += [[(each, 1) for each in (*first, *others)] for _ in range(3)]
            for plan in plans:
                future, names = run.launch(*plan), [request for request, _ in plan]
                if ahead:
                    futures.append((future, names))
                else:
                    run.finish(future, *names)
            for future, names in futures:
                run.finish(future, *names)
            futures.clear()
        for one, other in zip((*steady[0], *new[0]), (*steady[1], *new[1]), strict=True):
            assert one.tokens == other.tokens


def test_warm_draws_and_memory_after_many_replays(folders) -> None:
    with opened() as device:
        run = driver(device, folders["llama"], max_sequences=24)
        sampling = Sampling(max_tokens=999, temperature=0.8, top_p=0.9, seed=4, ignore_eos=True)
        steady = [run.open(prompt(20 + n, n), sampling if n % 2 else None) for n in range(12)]
        run.step(*((request, request.prompt_tokens) for request in steady))
        free: list[tuple[int, int]] = []
        for turn in range(220):
            new = run.open(prompt(40 + turn * 37 % 200, turn))
            run.step(*((request, 1) for request in steady), (new, new.prompt_tokens))
            run.give(new)
            if turn % 50 == 19:
                torch.cuda.synchronize()
                free.append((torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()))
        print(f"\nfree, reserved: {free}; graphs {len(graphs_of(run))}: {graphs_of(run)}", end="")
        assert free[-1][0] >= free[1][0] - (4 << 20)


# Times ---------------------------------------------------------------------------------------------------------------


def test_host_time_of_mixed_steps(tmp_path) -> None:
    """Prints what steps take the host and the device, with graphs and without, for a model of the shape of 8B."""
    config = FAST["llama"].__class__(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=16384,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    device = open_device("cuda:0", DeviceSettings(32 << 28, 1 << 28, partition="none"))
    with contextlib.closing(device):
        begin, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        spec = ModelSpec("m", str(tmp_path), "bfloat16", load_format="dummy", max_sequences=256, step_tokens=2048)
        run = Driver(device.load(spec), Blocks(device.pool.capacity, seed=7))
        used = free - torch.cuda.mem_get_info()[0]
        print(f"\nloaded in {time.perf_counter() - begin:.2f} s, took {used / 2**30:.2f} GiB")
        captures, length = stepper_of(run).captures, 9000
        for decodes in (0, 30, 100):
            decoding = [run.open(prompt(300, n)) for n in range(decodes)]
            for start in range(0, decodes, 6):
                run.step(*((request, 300) for request in decoding[start : start + 6]))
            for tokens, before in ((34, 0), (128, 0), (160, 0), (400, 0), (400, 8000)):
                if tokens + decodes > 512:
                    continue
                for name, kind in (("graphs", captures), ("launches", Captures(captures.decodes, None))):
                    stepper_of(run).captures = kind
                    found: list[tuple[float, float]] = []
                    for turn in range(12):
                        new = run.open(prompt(length if before else tokens, turn))
                        for _ in range(0, before, 2000):
                            run.step((new, 2000))
                        host = run.runner.host_seconds  # type: ignore[attr-defined]
                        done = run.launch(*((request, 1) for request in decoding), (new, tokens))
                        names = [*decoding, *([] if before else [new])]
                        run.finish(done, *names)
                        spent = run.runner.host_seconds - host  # type: ignore[attr-defined]
                        found.append((spent, done.result().seconds))
                        run.give(new)
                    host, device_s = (1e3 * float(np.median([each[i] for each in found[3:]])) for i in (0, 1))
                    worst = 1e3 * max(each[0] for each in found)
                    print(
                        f"{decodes:4} decodes + {tokens:4} tokens after {before:5}: {name:9} host {host:6.2f} ms, "
                        f"at most {worst:6.2f}; device {device_s:6.2f} ms"
                    )
            stepper_of(run).captures = captures
            for request in decoding:
                run.give(request)
        since = (free - torch.cuda.mem_get_info()[0] - used) / 2**20
        print(f"{len(graphs_of(run))} graphs of mixed steps; {since:.0f} MiB less free than after loading")

"""The CUDA engine on a GPU beside transformers' float32 on the same GPU.

python -m pytest -q -s -x tests/cuda/test_engine.py
"""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from forebay.gpu.cuda_loading import weight_bytes
from forebay.gpu.device import Device, open_device
from forebay.gpu.errors import DeviceError, ModelLoadError
from forebay.gpu.sampling import Draw, choose
from forebay.transport.messages import DeviceSettings, ModelSpec, Sampling
from tests.cuda.engine_models import (
    FAST,
    GPU,
    MOST_ROWS,
    OTHERS,
    TOLERANCE,
    VOCABULARY,
    Recorded,
    RecordingModel,
    compare,
    reference_logits,
    step_recorded,
    write_model,
)
from tests.gpu.driver import Blocks, Driver, Request, prompt_of

pytestmark = pytest.mark.timeout(600)
SLAB = 32 << 20
NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}

Folders = Callable[[str, torch.dtype], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    made: dict[tuple[str, torch.dtype], Path] = {}

    def folder(name: str, dtype: torch.dtype = torch.bfloat16) -> Path:
        if (name, dtype) not in made:
            made[name, dtype] = write_model({**FAST, **OTHERS}[name], tmp_path_factory.mktemp("model"), dtype)
        return made[name, dtype]

    return folder


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> None:
    RecordingModel.rows = torch.zeros(MOST_ROWS, VOCABULARY, device=GPU)
    monkeypatch.setattr("forebay.gpu.cuda_loading.FastModel", RecordingModel)


@pytest.fixture
def device() -> Iterator[Device]:
    with opened() as device:
        yield device


class opened:
    """A device whose pool reads as NaN, with whatever another model left behind; its first block, which the rows that
    fill up a graph read, too."""

    def __init__(self, partition: str = "none", **fields: int) -> None:
        settings = DeviceSettings(8 * SLAB, SLAB, partition=partition, **fields)
        self.device = open_device("cuda:0", settings)
        whole = self.device.pool._bytes
        assert whole is not None
        whole.fill_(255)
        torch.cuda.synchronize()

    def __enter__(self) -> Device:
        return self.device

    def __exit__(self, *error: object) -> None:
        self.device.close()
        gc.collect()
        torch.cuda.empty_cache()


def driver(device: Device, folder: Path, name: str = "m", blocks: Blocks | None = None, **fields: object) -> Driver:
    values: dict[str, object] = {"dtype": "bfloat16", "max_sequences": 12, "step_tokens": 1024, **fields}
    begin = time.perf_counter()
    runner = device.load(ModelSpec(name, str(folder), **values))  # type: ignore[arg-type]
    print(f"\nloaded in {time.perf_counter() - begin:.1f} s", end="")
    return Driver(runner, blocks or Blocks(device.pool.capacity, seed=7))


def prompt(length: int, seed: int) -> list[int]:
    return prompt_of(length, seed, VOCABULARY)


# Logits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=NAMES.get)
@pytest.mark.parametrize("name", FAST)
def test_logits_of_prefill_chunks_decodes_and_mixed_steps(folders, record, device, name, dtype) -> None:
    folder = folders(name, dtype)
    run = driver(device, folder, dtype=NAMES[dtype])
    recorded: list[Recorded] = []

    def step(*counts: tuple[Request, int]) -> None:
        recorded.extend(step_recorded(run, *counts))

    whole, short, single = run.open(prompt(700, 1)), run.open(prompt(15, 2)), run.open(prompt(1, 3))
    step((whole, 700))
    step((short, 15), (single, 1))
    for _ in range(3):
        step((short, 1), (whole, 1), (single, 1))
    chunked = run.open(prompt(433, 4))
    for count in (1, 16, 17, 130):
        step((chunked, count))
    others = [run.open(prompt(n, n)) for n in (16, 17, 100)]
    step((chunked, 200), (whole, 1), (others[0], 16), (single, 1), (others[1], 9))
    step((others[1], 8), (chunked, 69), (others[2], 100), (short, 1))
    everyone = [whole, short, single, chunked, *others]
    for last in (1, 2, 3, 4, 5, 6, 7, 7, 7, 3):
        step(*((request, 1) for request in everyone[:last]))
    for _ in range(20):
        step(*((request, 1) for request in reversed(everyone)))
    compare(folder, recorded, TOLERANCE[dtype])


def test_decodes_of_so_many_rows_that_keys_are_not_split(folders, record, device) -> None:
    """Such plans are ordinary ones (see PagedAttention.plan). Rows get blocks at different times; some drop out."""
    folder = folders("mistral, one KV head a head")
    run = driver(device, folder, max_sequences=64)
    requests = [run.open(prompt(1 + 7 * n % 130, n)) for n in range(59)] + [run.open(prompt(900, 99))]
    recorded: list[Recorded] = []
    for request in requests:
        recorded += step_recorded(run, (request, request.prompt_tokens))
    for rows in (60, 60, 60, 60, 60, 60, 60, 60, 60, 60, 41, 41, 30, 60, 60, 60, 60, 60, 60, 60):
        recorded += step_recorded(run, *((request, 1) for request in requests[-rows:]))
    compare(folder, recorded, TOLERANCE[torch.bfloat16])


def test_random_schedules_with_preemption_over_two_models_in_one_pool(folders, record, device) -> None:
    """Steps of every make-up; sequences that give way and compute everything again; blocks at random places."""
    chance = np.random.default_rng(5)
    folder = folders("llama")
    blocks = Blocks(device.pool.capacity, seed=1)
    quiet = driver(device, folders("qwen3"), "quiet", blocks)
    run = driver(device, folder, "m", blocks)
    recorded: list[Recorded] = []
    open_requests: list[Request] = []
    beside = quiet.open(prompt(40, 9))
    quiet.step((beside, 40))
    for turn in range(120):
        if len(open_requests) < 12 and chance.random() < 0.4:
            open_requests.append(run.open(prompt(int(chance.integers(1, 300)), turn)))
        if open_requests and chance.random() < 0.1:
            run.restart(open_requests[int(chance.integers(len(open_requests)))])
        counts: list[tuple[Request, int]] = []
        budget = 1024
        for request in chance.permutation(np.array(open_requests, object)).tolist():
            pending = len(request.tokens) - request.computed
            count = min(pending, budget, int(chance.choice([1, 7, 64, 1000])))
            if count and chance.random() < 0.8:
                counts.append((request, count))
                budget -= count
        if counts:
            recorded += step_recorded(run, *counts)
        if turn % 4 == 0:
            quiet.step((beside, 1))
    assert len(recorded) > 300
    compare(folder, recorded, TOLERANCE[torch.bfloat16])


def test_steps_ahead_take_tokens_from_the_device(folders, device) -> None:
    folder = folders("llama")
    run = driver(device, folder)
    requests = [run.open(prompt(n, n)) for n in (17, 200)]
    futures = [run.launch((requests[0], 17)), run.launch((requests[0], 1), (requests[1], 200))]
    futures += [run.launch(*((request, 1) for request in requests)) for _ in range(40)]
    run.finish(futures[0], requests[0])
    for future in futures[1:]:
        run.finish(future, *requests)
    stepped = [run.open(prompt(n, n)) for n in (17, 200)]
    run.step((stepped[0], 17))
    run.step((stepped[0], 1), (stepped[1], 200))
    for _ in range(40):
        run.step(*((request, 1) for request in stepped))
    assert [request.tokens for request in requests] == [request.tokens for request in stepped]


def test_models_of_transformers_run_as_they_are(folders, device) -> None:
    for name in OTHERS:
        folder = folders(name)
        run = driver(device, folder, name)
        requests = [run.open(prompt(n, n)) for n in (100, 33)]
        run.step((requests[0], 60))
        run.step((requests[1], 33), (requests[0], 40))
        for _ in range(10):
            run.step(*((request, 1) for request in requests))
        for request, logits in zip(
            requests, reference_logits(folder, [request.tokens[:-1] for request in requests]), strict=True
        ):
            drawn = request.tokens[request.prompt_tokens :]
            best = logits[request.prompt_tokens - 1 :]
            margin = best.topk(2).values
            clear = (margin[:, 0] - margin[:, 1]) > 0.15 * best.std(-1)
            agree = best.argmax(-1) == torch.tensor(drawn, device=GPU)
            assert bool(agree[clear].all()), f"{name}: {agree.tolist()}, clear {clear.tolist()}"
            assert int(clear.sum()) > 3
        device.unload(name)


# Lanes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0, 48])
def test_lanes_beside_each_other(folders, record, share) -> None:
    folder = folders("llama")
    with opened("green") as device:
        run = driver(device, folder)
        recorded: list[Recorded] = []
        requests = [run.open(prompt(n, n)) for n in (300, 17, 150)]
        run.lane, run.share = "prefill", share
        for request in requests:
            recorded += step_recorded(run, (request, request.prompt_tokens))
        run.lane = "decode"
        for _ in range(5):
            recorded += step_recorded(run, *((request, 1) for request in requests))
        late = run.open(prompt(900, 5))
        run.lane = "prefill"
        prefills = [run.launch((late, count)) for count in (500, 300, 100)]
        run.lane = "decode"
        decodes = [run.launch(*((request, 1) for request in requests)) for _ in range(10)]
        for future in decodes:
            run.finish(future, *requests)
        run.finish(prefills[2], late)
        run.share = 0
        for _ in range(5):
            recorded += step_recorded(run, *((request, 1) for request in (*requests, late)))
        compare(folder, recorded, TOLERANCE[torch.bfloat16])


# Sampling ------------------------------------------------------------------------------------------------------------


def test_draws_are_those_of_the_cpu(folders, record, device) -> None:
    run = driver(device, folders("llama"))
    samplings = [
        Sampling(max_tokens=99, temperature=temperature, top_p=top_p, seed=seed, ignore_eos=seed % 2 == 0, min_tokens=2)
        for seed, (temperature, top_p) in enumerate([(0.0, 1.0), (1.0, 1.0), (0.7, 0.9), (1.5, 0.5), (1.0, 0.95)])
    ]
    requests = [run.open(prompt(20 + i, i), sampling) for i, sampling in enumerate(samplings)]
    steps = [[(request, request.prompt_tokens) for request in requests]]
    steps += [[(request, 1) for request in requests] for _ in range(30)]
    different = 0
    for number, counts in enumerate(steps):
        found = step_recorded(run, *counts)
        draws = [Draw(sampling, number) for sampling in samplings]
        logits = torch.stack([row.logits for row in found]).to(torch.bfloat16).float().cpu()
        tokens, stopped = choose(logits, draws, frozenset({5, 6}))
        drawn = [request.tokens[-1] for request in requests]
        different += sum(a != b for a, b in zip(tokens.tolist(), drawn, strict=True))
        assert [request.stopped[-1] for request in requests] == stopped.tolist()
    assert different == 0, f"{different} draws differ"


def test_logits_that_are_not_finite_mark_their_row_alone(folders, device) -> None:
    run = driver(device, folders("llama"))
    embedding = run.runner._shared.model._weights.embedding  # type: ignore[attr-defined]
    with torch.inference_mode():
        embedding[1002] = torch.nan
    torch.cuda.synchronize()
    bad, good = run.open([10, 1002, 12]), run.open(prompt(40, 40))
    assert 1002 not in good.tokens
    run.step((bad, 3), (good, 40))
    for _ in range(5):
        run.step((bad, 1), (good, 1))
    assert set(bad.stopped) == {2}
    assert set(good.stopped) == {0}


# Memory --------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_loaded_is_refused_and_leaves_nothing(folders, device, tmp_path) -> None:
    folder = folders("llama")
    with pytest.raises(ModelLoadError, match=r"float32.*use bfloat16 or float16"):
        device.load(ModelSpec("m", str(folder), "float32"))
    huge = write_config(tmp_path / "huge", num_hidden_layers=60, hidden_size=16384, intermediate_size=65536)
    with pytest.raises(
        ModelLoadError, match=r"'huge'.*weights take \d+ bytes of cuda:0, of whose \d+ bytes \d+ are free"
    ):
        device.load(ModelSpec("huge", str(huge), "bfloat16", load_format="dummy"))
    odd = write_config(tmp_path / "odd", head_dim=80)
    with pytest.raises(ModelLoadError, match="heads of 80 elements"):
        device.load(ModelSpec("odd", str(odd), "bfloat16", load_format="dummy"))
    run = driver(device, folder)
    request = run.open(prompt(20, 1))
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    large = write_config(tmp_path / "large", num_hidden_layers=8, hidden_size=4096, intermediate_size=16384)
    spec = ModelSpec("large", str(large), "bfloat16", load_format="dummy", max_sequences=512)
    spare = torch.empty(free - weight_bytes(spec) - (40 << 20), dtype=torch.uint8, device=GPU)
    before = torch.cuda.mem_get_info()[0]
    with pytest.raises(ModelLoadError, match="are free") as caught:  # in the end it is too much
        device.load(spec)
    print(f"\n{caught.value}", end="")
    assert torch.cuda.mem_get_info()[0] >= before - (64 << 20)
    run.step((request, 20))
    run.step((request, 1))
    del spare


def write_config(folder: Path, **fields: int) -> Path:
    config = FAST["llama"].__class__(**{**FAST["llama"].to_dict(), **fields})
    config.save_pretrained(folder)
    return folder


def test_unloading_gives_the_memory_back_and_nothing_grows(folders) -> None:
    folder = folders("llama")
    with opened() as device:

        def come_and_go() -> int:
            """Bytes that are free afterwards."""
            run = driver(device, folder)
            request = run.open(prompt(40, 1))
            run.step((request, 40))
            run.step((request, 1))
            device.unload("m")
            torch.cuda.synchronize()
            allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            print(f"\nafter unloading: {allocated:,} bytes allocated, {reserved:,} reserved by torch", end="")
            return torch.cuda.mem_get_info()[0]

        # What stays after the first time is not the model's: kernels, and 32 MiB of cuBLAS for each of the two streams
        # that multiplied (one that graphs are captured on, one that steps run on), which later models use again.
        first = come_and_go()
        descriptors = len(os.listdir("/proc/self/fd"))
        free = [come_and_go() for _ in range(4)]
        print(f"\nfree after each: {first:,}, {free}", end="")
        assert free[-1] >= first - (8 << 20)
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 2


def test_a_device_opens_again_and_says_when_it_cannot() -> None:
    for _ in range(3):
        with opened() as device:
            assert device.telemetry().memory_total == 8 * SLAB
    with pytest.raises(DeviceError, match=r"cuda:0 has \d+ bytes free, its memory is to be"):
        open_device("cuda:0", DeviceSettings(1 << 42, SLAB))
    with pytest.raises(DeviceError, match="cuda:99 is not there: this process sees"):
        open_device("cuda:99", DeviceSettings(SLAB, SLAB))


def test_weights_that_come_and_go_leave_graphs_as_good_as_before(folders) -> None:
    folder = folders("llama")
    with opened(weights_memory=4 * SLAB) as device:
        blocks = Blocks(device.pool.capacity)
        runs = []
        for name in ("a", "b"):
            spec = ModelSpec(name, str(folder), "bfloat16", max_sequences=4, step_tokens=256)
            runs.append(Driver(device.introduce(spec), blocks))
        requests = [run.open(prompt(40, 1)) for run in runs]
        device.restore("a")
        runs[0].step((requests[0], 40))
        for _ in range(5):
            runs[0].step((requests[0], 1))
        device.evict("a")
        device.restore("b")
        runs[1].step((requests[1], 40))
        for _ in range(10):
            runs[1].step((requests[1], 1))
        device.evict("b")
        device.restore("a")
        for _ in range(5):
            runs[0].step((requests[0], 1))
        assert requests[0].tokens == requests[1].tokens


# Faults --------------------------------------------------------------------------------------------------------------

_STICKY = """
import sys, torch
from pathlib import Path
from forebay.gpu.device import open_device
from forebay.gpu.errors import DeviceError
from forebay.transport.messages import DeviceSettings, ModelSpec
from tests.gpu.driver import Blocks, Driver, prompt_of

device = open_device("cuda:0", DeviceSettings(8 << 25, 1 << 25, partition="none"))
run = Driver(device.load(ModelSpec("m", sys.argv[1], "bfloat16", max_sequences=4)), Blocks(device.pool.capacity))
request = run.open(prompt_of(40, 1, 1003))
run.step((request, 40))
stepper = run.runner.prepare("mixed")
torch.cuda.synchronize()
rows = stepper._arrays.decode_rows
original = rows.write
def spoil(arrays, bucket):
    lengths = original(arrays, bucket)
    arrays.indices.host[:] = 2**30  # no such block
    return lengths
rows.write = spoil
for attempt in range(2):
    try:
        run.launch((request, 1)).result(timeout=60)
        raise SystemExit("the step did not fail")
    except DeviceError as error:
        print(f"attempt {attempt}: {error}")
        assert "must be started again" in str(error)
print("lost as expected", flush=True)
import os
os._exit(0)
"""


def test_an_error_that_cuda_cannot_recover_from_says_so(folders) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _STICKY, str(folders("llama"))], capture_output=True, text=True, timeout=300, check=False
    )
    assert "lost as expected" in done.stdout, done.stdout[-3000:] + done.stderr[-6000:]

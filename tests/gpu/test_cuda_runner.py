"""The host's part of the CUDA engine, on a stand-in: lanes, staging, graphs' buckets, tokens that are still in flight.
The kernels and the device have their tests in tests/cuda."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from forebay.gpu import cuda_runner
from forebay.gpu.cuda_graphs import Captures
from forebay.gpu.cuda_step import CudaStep, FastModel
from forebay.gpu.cuda_stepper import Stepper
from forebay.gpu.errors import StepError
from forebay.transport.messages import OpenSequence, Sampling, StepPlan, Work
from tests.gpu.cuda_stand_in import Attention, Graph, StandIn, spec_of, standing_in
from tests.gpu.driver import TINY, Blocks, Driver, Request, generate, prompt_of, write_tiny

FAMILIES = sorted(TINY)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write_tiny(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[tuple[str, int], list[int]]:
    lengths = {"llama": (1, 15, 17, 40, 100), "qwen2": (17, 40), "mistral": (40,)}
    return {(f, n): generate(folders[f], prompt_of(n, n), 16) for f, which in lengths.items() for n in which}


@pytest.fixture
def device() -> Iterator[StandIn]:
    with standing_in():
        opened = StandIn(8 << 20, 1 << 20)
        for slab in opened.pool.slabs:  # what another model left behind reads as NaN in any dtype
            with open(f"/proc/self/fd/{slab.fileno()}", "r+b") as file:
                file.write(b"\xff" * slab.size)
        yield opened
        opened.close()


def driver(device: StandIn, folder: Path, name: str = "m", blocks: Blocks | None = None, **fields: int) -> Driver:
    runner = device.load(spec_of(folder, name, **fields))
    return Driver(runner, blocks or Blocks(device.pool.capacity))


def attention(run: Driver) -> Attention:
    found = run.runner._shared.attention  # type: ignore[attr-defined]
    assert isinstance(found, Attention)
    return found


def stepper_of(run: Driver) -> Stepper:
    found = run.runner.prepare("mixed")  # type: ignore[attr-defined]
    assert isinstance(found, Stepper)
    return found


def continuation(request: Request) -> list[int]:
    return request.tokens[request.prompt_tokens :]


def test_prompts_in_chunks_and_decodes_in_graphs(device, folders, expected) -> None:
    run = driver(device, folders["llama"], max_sequences=6)
    short, long = run.open(prompt_of(15, 15)), run.open(prompt_of(100, 100))
    run.step((short, 15))
    run.step((long, 33))
    run.step((short, 1), (long, 50))
    run.step((long, 17), (short, 1))
    single, middle = run.open(prompt_of(1, 1)), run.open(prompt_of(40, 40))
    run.step((long, 1), (middle, 40), (short, 1), (single, 1))
    attention(run).planned.clear()
    captured = Graph.captured
    for _ in range(8):
        run.step((short, 1), (long, 1), (middle, 1))
    for _ in range(3):
        run.step((short, 1), (single, 1), (long, 1), (middle, 1))
    run.step((short, 1))
    assert attention(run).planned == [(True, 4)] * 11 + [(True, 1)]
    for request in (short, long, middle, single):
        got = continuation(request)
        assert got == expected["llama", request.prompt_tokens][: len(got)]
        assert len(got) >= 4
    assert Graph.captured == captured, "those of decodes were captured when the model was loaded"


def test_mixed_steps_are_captured_when_they_come_again(device, folders, expected) -> None:
    run = driver(device, folders["llama"], max_sequences=6)
    steady = run.open(prompt_of(15, 15))
    run.step((steady, 15))
    captured, shapes = Graph.captured, stepper_of(run).captures.mixed
    assert shapes is not None
    attention(run).planned.clear()
    requests = [run.open(prompt_of(n, n)) for n in (17, 40, 100)]
    run.step((requests[0], 17), (steady, 1))  # 64 tokens, the second time
    assert Graph.captured == captured + 1
    for count in (33, 50):
        run.step((steady, 1), (requests[2], count))
    run.step((steady, 1), (requests[1], 40), (requests[2], 17))
    run.step((requests[2], 1), (steady, 1), (requests[1], 1))  # a decode step
    assert Graph.captured == captured + 1, "steps of one shape have one graph"
    assert attention(run).planned == [(True, 32)] * 8 + [(True, 4)], "of each step all rows, and those kept"
    for _ in range(3):
        run.step((steady, 1), *((request, 1) for request in requests))
    for request in (steady, *requests):
        got = continuation(request)
        assert got == expected["llama", request.prompt_tokens][: len(got)]


def test_steps_with_and_without_graphs_draw_the_same(device, folders) -> None:
    """Random schedules, with chunks that sample nothing, on one lane with captured mixed steps and on one without."""
    runs = [
        driver(device, folders["llama"], name, Blocks(device.pool.capacity // 2, 7)) for name in ("graphs", "plain")
    ]
    stepper = stepper_of(runs[1])
    stepper.captures = Captures(stepper.captures.decodes, None)
    pairs: list[tuple[Request, ...]] = []
    chance = np.random.default_rng(3)
    captured = Graph.captured
    for turn in range(60):
        if len(pairs) < 6 and chance.random() < 0.4:
            length = int(chance.integers(1, 70))
            pairs.append(tuple(run.open(prompt_of(length, turn)) for run in runs))
        elif pairs and chance.random() < 0.1:
            for run, request in zip(runs, pairs.pop(0), strict=True):
                run.close(request)
        counts = []
        for pair in pairs:
            pending = len(pair[0].tokens) - pair[0].computed
            counts.append((pair, min(pending, int(chance.choice([1, 9, 70])))))
        for i, run in enumerate(runs):
            if counts:
                run.step(*((pair[i], count) for pair, count in counts))
        assert [pair[0].tokens for pair in pairs] == [pair[1].tokens for pair in pairs], f"turn {turn}"
    kinds = {key[0] for key in stepper_of(runs[0]).graphs.held}  # type: ignore[index]
    assert kinds == {"mixed", "decode"}
    assert Graph.captured > captured


def test_a_step_for_whose_graph_there_is_no_memory_runs_launch_by_launch(
    device, folders, expected, monkeypatch
) -> None:
    run = driver(device, folders["llama"])
    request, long = run.open(prompt_of(17, 17)), run.open(prompt_of(100, 100))
    run.step((request, 17))
    tried = []

    def too_large(*launches: object) -> None:
        tried.append(launches)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("forebay.gpu.cuda_graphs.captured", too_large)
    for count in (30, 30, 30):
        run.step((request, 1), (long, count))
    assert len(tried) == 1, "it is not tried again"
    run.step((long, 10), (request, 1))
    assert continuation(request) == expected["llama", 17][:5]
    assert continuation(long) == expected["llama", 100][:1]


def test_steps_launched_long_before_earlier_ones_land(device, folders, expected) -> None:
    run = driver(device, folders["qwen2"])
    requests = [run.open(prompt_of(n, n)) for n in (17, 40)]
    futures = [run.launch(*((request, request.prompt_tokens) for request in requests))]
    futures += [run.launch(*((request, 1) for request in requests)) for _ in range(15)]
    for future in futures:
        run.finish(future, *requests)
    for request in requests:
        assert continuation(request) == expected["qwen2", request.prompt_tokens]


def test_a_sequence_is_computed_again_while_its_last_tokens_are_in_flight(device, folders, expected) -> None:
    run = driver(device, folders["llama"])
    request = run.open(prompt_of(17, 17))
    futures = [run.launch((request, 17))]
    futures += [run.launch((request, 1)) for _ in range(5)]
    run.restart(request)
    futures += [run.launch((request, 20)), run.launch((request, 3))]
    futures += [run.launch((request, 1)) for _ in range(9)]
    for future in futures:
        run.finish(future, *([request] if future.result(timeout=30).tokens else []))
    assert continuation(request) == expected["llama", 17]


def test_a_step_that_mixes_a_token_in_flight_with_a_prompt(device, folders, expected) -> None:
    run = driver(device, folders["llama"])
    short, long = run.open(prompt_of(15, 15)), run.open(prompt_of(40, 40))
    futures = [run.launch((short, 15)), run.launch((short, 1), (long, 30)), run.launch((long, 10), (short, 1))]
    run.finish(futures[0], short)
    run.finish(futures[1], short)
    run.finish(futures[2], long, short)
    for _ in range(5):
        run.step((short, 1), (long, 1))
    assert continuation(short) == expected["llama", 15][:8]
    assert continuation(long) == expected["llama", 40][:6]


def test_models_of_different_shapes_share_one_pool_and_a_lane(device, folders, expected) -> None:
    blocks = Blocks(device.pool.capacity, seed=3)
    runs = [driver(device, folders[family], family, blocks, max_sequences=2) for family in FAMILIES]
    requests = [run.open(prompt_of(40, 40)) for run in runs]
    futures = [run.launch((request, 40)) for run, request in zip(runs, requests, strict=True)]
    for _ in range(15):
        futures += [run.launch((request, 1)) for run, request in zip(runs, requests, strict=True)]
    for i, future in enumerate(futures):
        runs[i % len(runs)].finish(future, requests[i % len(runs)])
    assert len(device.lanes) == 1
    for family, request in zip(FAMILIES, requests, strict=True):
        assert continuation(request) == expected[family, 40]


def test_prefill_and_decode_in_lanes_of_their_own(device, folders, expected) -> None:
    runner = device.load(spec_of(folders["llama"], max_sequences=3), ("decode", "prefill"))
    run = Driver(runner, Blocks(device.pool.capacity))
    first, second = run.open(prompt_of(40, 40)), run.open(prompt_of(100, 100))
    run.lane = "prefill"
    run.step((first, 30))
    run.step((first, 10), (second, 7))
    run.lane = "decode"
    futures = [run.launch((first, 1)) for _ in range(2)]
    run.lane = "prefill"
    futures.append(run.launch((second, 93)))
    run.finish(futures[0], first)
    run.finish(futures[1], first)
    run.finish(futures[2], second)
    run.lane = "decode"
    run.share = 48  # a graph of its own, captured when it is needed
    captured = Graph.captured
    for _ in range(4):
        run.step((second, 1), (first, 1))
    assert Graph.captured == captured + 1
    assert continuation(first) == expected["llama", 40][:7]
    assert continuation(second) == expected["llama", 100][:5]
    assert sorted(device.lanes) == ["decode m", "prefill"]


def test_bad_plans_change_nothing(device, folders) -> None:
    runner = device.load(spec_of(folders["llama"], max_sequences=2, step_tokens=8))
    tokens = torch.arange(20, 40, dtype=torch.int32).numpy().tobytes()
    for number in range(3):
        runner.open(OpenSequence(number, "m", tokens, 20, Sampling(max_tokens=9)))
    work = [Work(number, 0, 3, 0, (number,), False) for number in range(3)]
    for plan, problem in (
        (StepPlan(1, "m", (Work(9, 0, 1, 0, (0,), False),)), "not open"),
        (StepPlan(2, "m", tuple(work)), "3 sequences and 9 tokens"),
        (StepPlan(3, "m", (Work(0, 0, 9, 0, (0,), False),)), "step_tokens 8"),
        (StepPlan(4, "m", (Work(0, 0, 3, 1, (0,), False),)), "keep 1 blocks of a table of 0"),
    ):
        with pytest.raises(StepError, match=problem):
            runner.launch(plan).result(timeout=30)
    done = runner.launch(StepPlan(5, "m", (Work(0, 0, 3, 0, (0,), False),))).result(timeout=30)
    assert (done.step, done.tokens, done.stopped, done.seconds > 0) == (5, b"", b"", True)
    assert device.seconds == [done.seconds]


def test_a_step_that_fails_does_not_hold_up_those_behind_it(device, folders, expected, monkeypatch) -> None:
    run = driver(device, folders["llama"])
    request, other = run.open(prompt_of(17, 17)), run.open(prompt_of(40, 40))
    run.step((request, 17))
    stepper = run.runner.prepare("mixed")  # type: ignore[attr-defined]
    original = stepper._results.fetch

    def broken(rows: int) -> None:
        monkeypatch.setattr(stepper._results, "fetch", original)
        raise RuntimeError("no")

    monkeypatch.setattr(stepper._results, "fetch", broken)
    failed = run.launch((request, 1))
    fine = run.launch((other, 40))
    with pytest.raises(RuntimeError, match="no"):
        failed.result(timeout=30)
    run.finish(fine, other)
    for _ in range(5):
        run.step((other, 1))
    assert continuation(other) == expected["llama", 40][:6]


def test_rows_with_logits_that_are_not_finite_are_marked_alone(device, folders, expected) -> None:
    run = driver(device, folders["llama"])
    embedding = run.runner._shared.model._weights.embedding  # type: ignore[attr-defined]
    embedding[210] = torch.nan
    bad, good = run.open([10, 210, 12]), run.open(prompt_of(40, 40))
    run.step((bad, 3), (good, 40))
    for _ in range(5):
        run.step((bad, 1), (good, 1))
    assert set(bad.stopped) == {2}
    assert set(good.stopped) == {0}
    assert continuation(good) == expected["llama", 40][:6]


def test_slots_come_back_when_sequences_are_closed(device, folders) -> None:
    run = driver(device, folders["llama"])
    free = run.runner._shared.last_tokens._free  # type: ignore[attr-defined]
    before = len(free)
    request = run.open(prompt_of(17, 17))
    run.step((request, 17))
    assert len(free) == before - 1
    future = run.launch((request, 1))
    run.close(request)
    run.finish(future, request)
    del future
    device.lanes["mixed"].call(lambda: None)
    assert len(free) == before


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_step_that_lacks_memory_waits_and_goes_on_as_if_it_had_not(
    device, folders, expected, monkeypatch, kind
) -> None:
    run = driver(device, folders["llama"])
    request, other = run.open(prompt_of(40, 40)), run.open(prompt_of(15, 15))
    run.step((request, 39), (other, 15))
    lacking = 3
    logits = FastModel.logits

    def scarce(model: FastModel, tokens: torch.Tensor, step: CudaStep) -> torch.Tensor | None:
        nonlocal lacking
        if lacking:
            lacking -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return logits(model, tokens, step)

    if kind == "prefill":
        long = run.open(prompt_of(100, 100))
        monkeypatch.setattr(FastModel, "logits", scarce)
        run.step((long, 100), (request, 1))
        assert continuation(long) == expected["llama", 100][:1]
    else:
        # The prompt's last token, which the device has not seen, and one that only the device knows.
        monkeypatch.setattr(FastModel, "logits", scarce)
        run.step((request, 1), (other, 1))
    assert lacking == 0
    for _ in range(4):
        run.step((request, 1), (other, 1))
    assert continuation(request) == expected["llama", 40][:5]
    got = continuation(other)
    assert got == expected["llama", 15][: len(got)]
    assert len(got) >= 5


def test_a_step_that_lacks_memory_for_too_long_fails(device, folders, expected, monkeypatch) -> None:
    monkeypatch.setattr(cuda_runner, "LACKING_S", 0.1)
    run = driver(device, folders["llama"])
    request = run.open(prompt_of(15, 15))
    with monkeypatch.context() as patch:

        def scarce(*_: object) -> None:
            raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

        patch.setattr(FastModel, "logits", scarce)
        with pytest.raises(RuntimeError, match="ALLOC_FAILED"):
            run.step((request, 15))
    fresh = run.open(prompt_of(15, 15))
    run.step((fresh, 15))
    assert continuation(fresh) == expected["llama", 15][:1]

"""Splits of a GPU's SMs: streams keep to their part, and what running prefill and decode side by side costs each."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

from forebay.gpu.cuda_driver import CudaContext
from forebay.gpu.cuda_partition import Partitions
from forebay.gpu.device_name import parse_device
from forebay.gpu.errors import DeviceError
from forebay.sched.partition import SPLITS

pytestmark = [pytest.mark.timeout(300)]

SIZE = 8192


@pytest.fixture(scope="module")
def context() -> Iterator[CudaContext]:
    torch.cuda.init()
    torch.zeros(1, device="cuda:0")
    found = CudaContext(parse_device("cuda:0"))
    yield found
    torch.cuda.synchronize()
    found.close()


@pytest.fixture(scope="module")
def partitions(context: CudaContext) -> Iterator[Partitions]:
    with Partitions(context, SPLITS) as made:
        yield made
        torch.cuda.synchronize()


def external(partitions: Partitions, share: int) -> Any:
    return torch.cuda.ExternalStream(partitions.stream(share), device="cuda:0")


def rate(seconds: float) -> float:
    """TFLOP/s of a large product that takes so long."""
    return float(2 * SIZE**3 / seconds / 1e12)


def seconds(stream: Any, work: Any, repeats: int) -> float:
    """Device seconds of one repetition."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        work()
        begin.record(stream)
        for _ in range(repeats):
            work()
        end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / repeats


def test_every_share_has_the_sms_that_it_says(partitions: Partitions) -> None:
    print(
        f"\n{partitions.total} SMs: " + ", ".join(f"{share} % = {partitions.sms(share)}" for share in partitions.shares)
    )
    assert partitions.shares == sorted({*SPLITS, *(100 - share for share in SPLITS)})
    for share in SPLITS:
        assert partitions.sms(share) + partitions.sms(100 - share) <= partitions.total
        assert abs(partitions.sms(share) - partitions.total * share / 100) <= 8
    assert partitions.sms(0) == partitions.sms(100) == partitions.total


def test_a_stream_keeps_to_its_share(partitions: Partitions) -> None:
    """A large product is slower by the SMs that it lacks, and right."""
    a = torch.randn(SIZE, SIZE, device="cuda:0", dtype=torch.bfloat16)
    b = torch.randn(SIZE, SIZE, device="cuda:0", dtype=torch.bfloat16)
    right = a @ b
    out = torch.empty_like(right)
    whole = seconds(external(partitions, 0), lambda: torch.mm(a, b, out=out), 10)
    for share in partitions.shares:
        stream = external(partitions, share)
        took = seconds(stream, lambda: torch.mm(a, b, out=out), 10)
        expected = whole * partitions.total / partitions.sms(share)
        sms = partitions.sms(share)
        print(f"{share:3} % ({sms:3} SMs): {took * 1e3:7.2f} ms, {rate(took):5.0f} TFLOP/s; all: {whole * 1e3:.2f} ms")
        assert 0.7 * expected < took < 1.5 * expected, f"{took} s on {share} %, {whole} s on all, expected {expected} s"
        torch.testing.assert_close(out.float(), right.float(), rtol=0.05, atol=2.0)


def test_a_graph_that_was_captured_on_all_sms_runs_in_a_part(partitions: Partitions) -> None:
    """What a graph captured elsewhere does in a green context's stream: the result must be right, and the time tells
    whether it kept to the part."""
    a = torch.randn(2048, 2048, device="cuda:0", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.mm(a, a, out=out)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(20):
            torch.mm(a, a, out=out)
    right = a @ a
    for share in (0, *partitions.shares):
        out.zero_()
        torch.cuda.synchronize()
        took = seconds(external(partitions, share), graph.replay, 5)
        print(f"graph of 20 products of 2048^3 on {share:3} %: {took * 1e3:.2f} ms")
        torch.testing.assert_close(out.float(), right.float(), rtol=0.05, atol=1.0)


@pytest.mark.parametrize("bound", [False, True], ids=["decode on all SMs", "decode on the rest"])
@pytest.mark.parametrize("share", [0, *SPLITS])
def test_prefill_beside_decode(partitions: Partitions, share: int, bound: bool) -> None:
    """Large products ("prefill") beside reads of 8 GiB ("decode"), each slowed by the other: the figures of
    sched/cost.py's `measured_slowdowns`. Decodes must never be starved."""
    if bound and not share:
        pytest.skip("nothing to be bound to")
    weights = torch.empty(8 << 30, dtype=torch.uint8, device="cuda:0").view(torch.int32)
    small = torch.empty(1, dtype=torch.int64, device="cuda:0")
    a = torch.randn(SIZE, SIZE, device="cuda:0", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    prefill = external(partitions, share)
    decode = external(partitions, 100 - share if bound else 0)

    def read() -> None:
        torch.sum(weights, dim=0, keepdim=True, out=small)

    def multiply() -> None:
        torch.mm(a, a, out=out)

    alone_read, alone_product = seconds(decode, read, 20), seconds(prefill, multiply, 20)
    whole_product = seconds(external(partitions, 0), multiply, 20)
    torch.cuda.synchronize()
    # As many products as last for well longer than the reads.
    with torch.cuda.stream(prefill):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(201)]
        for mark in marks:
            mark.record(prefill)
            multiply()
    while not marks[2].query():  # the products run
        pass
    beside_read = seconds(decode, read, 6)
    done = sum(mark.query() for mark in marks) - 1
    torch.cuda.synchronize()
    beside_product = float(marks[0].elapsed_time(marks[max(1, done)])) / 1e3 / max(1, done)
    print(
        f"\nprefill on {share or 100} %, decode on {100 - share if bound else 100} %: decode {alone_read * 1e3:.2f} -> "
        f"{beside_read * 1e3:.2f} ms ({beside_read / alone_read:.2f}x), TFLOP/s of products: "
        f"{rate(whole_product):.0f} alone, {rate(alone_product):.0f} in their part, {rate(beside_product):.0f} beside "
        f"({beside_product / whole_product:.2f}x)"
    )
    assert done < len(marks) - 1, "the products ended before the reads: nothing ran beside them"
    assert beside_read < 8 * alone_read
    weights = torch.empty(0)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("splits", [(0,), (100,), (50,), (48, 52), (10, 10), (20, 30, 40, 45)])
def test_splits_that_are_none(context: CudaContext, splits: tuple[int, ...]) -> None:
    with pytest.raises(DeviceError, match="split"):
        Partitions(context, splits)


def test_a_share_that_was_not_split_off_is_named(partitions: Partitions) -> None:
    with pytest.raises(DeviceError, match="no part of 47 % of its SMs; it was split into 39, 45, 48, 52, 55, 61"):
        partitions.stream(47)


def test_closing_gives_back_what_splitting_took(context: CudaContext) -> None:
    def free() -> int:
        torch.cuda.synchronize()
        return int(torch.cuda.mem_get_info()[0])

    for number in range(6):
        if number == 2:  # the first make what the driver keeps
            before = free()
        made = Partitions(context, SPLITS)
        streams = [made.stream(share) for share in made.shares]
        during = free()
        assert len(set(streams)) == len(streams)
        made.close()
        made.close()
    print(
        f"\nthree splits with six streams take {(before - during) >> 20} MiB; four times left {before - free() >> 20}"
    )
    assert free() >= before - (32 << 20)
    with pytest.raises(DeviceError):
        made.stream(SPLITS[0])

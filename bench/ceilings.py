"""What a device does at most, measured on the spot: a large copy and a large matrix product."""

import time
from collections.abc import Callable

import torch

from forebay.bench.arithmetic import Ceilings

GPU_BYTES, CPU_BYTES = 2 << 30, 256 << 20
"""Of each of the two buffers of a copy: far more than any cache holds."""

GPU_SIDE, CPU_SIDE = 8192, 1536
SECONDS = 0.5
WARM_UP = 2


def measure_ceilings(device: str, dtype: str, threads: int) -> Ceilings:
    """Takes about two seconds. `threads` 0 is the library's own choice. The best of several runs counts: a ceiling is
    what can be reached, not what one meets on average."""
    kind, _, index = device.partition(":")
    place = torch.device("cuda", int(index)) if kind == "cuda" else torch.device("cpu")
    if threads and kind == "cpu":
        torch.set_num_threads(threads)
    copied = GPU_BYTES if kind == "cuda" else CPU_BYTES
    side = GPU_SIDE if kind == "cuda" else CPU_SIDE
    ceilings = Ceilings(
        2 * copied / _copy_seconds(place, copied), 2 * side**3 / _product_seconds(place, side, getattr(torch, dtype))
    )
    if kind == "cuda":
        torch.cuda.empty_cache()
    return ceilings


def _copy_seconds(place: torch.device, size: int) -> float:
    source = torch.ones(size, dtype=torch.uint8, device=place)
    target = torch.zeros_like(source)
    return _best(place, lambda: target.copy_(source))


def _product_seconds(place: torch.device, side: int, dtype: torch.dtype) -> float:
    # Random ones: a GPU multiplies zeros faster.
    left, right = (torch.randn(side, side, dtype=dtype, device=place) for _ in range(2))
    out = torch.empty_like(left)
    return _best(place, lambda: torch.mm(left, right, out=out))


def _best(place: torch.device, work: Callable[[], object]) -> float:
    """Seconds of the fastest of the runs that fit into SECONDS."""

    def once() -> float:
        begin = time.perf_counter()
        work()
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        return time.perf_counter() - begin

    for _ in range(WARM_UP):
        once()
    best, deadline = once(), time.perf_counter() + SECONDS
    while time.perf_counter() < deadline:
        best = min(best, once())
    return best

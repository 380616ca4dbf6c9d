"""Runs the parts of `python -m bench.lending`, prints each figure as it is measured, and writes them."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from forebay.bench.figures import Figure, write_figures
from forebay.bench.host_memory import host_memory
from forebay.bench.lease_latency import grants, reclaim
from forebay.bench.lender_tax import tax
from forebay.bench.lending_processes import SchedulerProcess
from forebay.bench.link_sweep import sweep
from forebay.gpu.backend import memory_backend

GPU_RECLAIM = 10
"""Times the largest piece is what a GPU takes back."""


def measure(
    devices: list[str], parts: list[str], largest: int, seconds: float, json: Path | None, arguments: list[str] | None
) -> int:
    """`largest` in bytes. Returns the exit status."""
    figures: dict[str, Figure] = {}
    described: dict[str, str] = {}
    for device in devices:
        with memory_backend(device) as backend:
            described[device] = backend.describe()
    for name, figure in _figures(devices, parts, largest, seconds):
        figures[name] = figure
        share = f"{figure.value / figure.baseline:6.3f}" if figure.value and figure.baseline else ""
        baseline = f"{figure.baseline:>10,.4g}" if figure.baseline else f"{'':>10}"
        print(f"{name:44}{figure.value or 0:>10,.4g} {figure.unit:6} raw:{baseline} {share}", flush=True)
    if json is not None:
        command = ["python", "-m", "bench.lending", *(arguments or [])]
        write_figures(json, "bench.lending", command, figures, described)
    return 0


def _figures(devices: list[str], parts: list[str], largest: int, seconds: float) -> Iterator[tuple[str, Figure]]:
    own, neighbour = devices[0], devices[-1]
    if "sweep" in parts:
        with ExitStack() as held:
            borrower = held.enter_context(memory_backend(own))
            lender = held.enter_context(memory_backend(neighbour)) if len(devices) > 1 else None
            if lender is None:
                print(f"only {own} was named: copies to and from a neighbour are left out")
            yield from sweep(borrower, lender, largest, seconds, held)
    if "host" in parts:
        yield from host_memory(own, largest)
    if set(parts) <= {"sweep", "host"}:
        return
    if own == neighbour:
        print(
            f"only {own} was named: it lends to itself, between processes. Grants, and reclaim to the host, are what "
            "they are between two; copies between lender and borrower stay within the device, so reclaim to a lender "
            "and the tax show the protocol and the sharing of one device, and nothing of a link",
            flush=True,
        )
    with SchedulerProcess() as scheduler:
        if "grants" in parts:
            yield from grants(scheduler, own, neighbour, largest)
        if "reclaim" in parts:
            size = largest * (GPU_RECLAIM if own.startswith("cuda:") else 1)
            yield from reclaim(scheduler, own, neighbour, size)
        if "tax" in parts:
            yield from tax(scheduler, own, neighbour, largest, seconds)

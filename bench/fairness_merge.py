"""Several runs of `python -m bench.fairness` together, of one workload each: a machine may not be ours for so long."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import msgspec
from rich.console import Console
from rich.table import Table

from forebay.bench.errors import BenchError
from forebay.bench.fairness_run import ARMS
from forebay.bench.figures import Figure, FiguresFile, write_figures

BENCHMARK = "bench.fairness"


def merge(paths: Sequence[Path], json: Path | None, arguments: list[str] | None) -> int:
    """Prints each figure's mean over the files, with its least and its largest value, and writes them; returns the exit
    status. Raises BenchError for files that do not belong together."""
    figures = merged([_read(path) for path in paths])
    arms = [arm for arm in ARMS if f"{arm}_failed" in figures]
    table = Table(title=f"mean (least to largest) of {len(paths)} workloads", box=None)
    for column in ("", *arms):
        table.add_column(column, justify="right")
    names = [name.removeprefix(f"{arms[0]}_") for name in figures if name.startswith(f"{arms[0]}_")] if arms else []
    for name in names:
        if not name.endswith(("_least", "_largest")):
            unit = figures[f"{arms[0]}_{name}"].unit
            table.add_row(f"{name} ({unit})", *(_text(figures, f"{arm}_{name}") for arm in arms))
    console = Console()
    console.print(table)
    if "vtc_tenants_ratio" in figures:
        ratio = _text(figures, "vtc_tenants_ratio")
        console.print(f"vtc, both tenants waiting: the most served over the least {ratio}")
    if json is not None:
        write_figures(json, BENCHMARK, ["python", "-m", BENCHMARK, *(arguments or [])], figures)
    return int(any(figures[f"{arm}_failed"].value for arm in arms))


def merged(files: Sequence[FiguresFile]) -> dict[str, Figure]:
    """By name the mean of value and baseline; `NAME_least` and `NAME_largest` are the values furthest from it. Raises
    BenchError where the files are not of the same arms, or not of one workload each."""
    for file in files:
        seeds = file.figures.get("seeds")
        if file.benchmark != BENCHMARK or seeds is None or seeds.value != 1:
            raise BenchError(f"{file.command!r} is no run of {BENCHMARK} with --seeds 1; only such can be merged")
        if file.figures.keys() != files[0].figures.keys():
            raise BenchError(f"{file.command!r} and {files[0].command!r} have different figures; run the same --arms")
    found = {"seeds": Figure(len(files), "1")}
    for name, first in files[0].figures.items():
        if name == "seeds":
            continue
        values = _given([file.figures[name].value for file in files])
        baselines = _given([file.figures[name].baseline for file in files])
        found[name] = Figure(fmean(values) if values else None, first.unit, fmean(baselines) if baselines else None)
        found[f"{name}_least"] = Figure(min(values, default=None), first.unit)
        found[f"{name}_largest"] = Figure(max(values, default=None), first.unit)
    return found


def _given(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _read(path: Path) -> FiguresFile:
    try:
        return msgspec.json.decode(path.read_bytes(), type=FiguresFile)
    except OSError as error:
        raise BenchError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise BenchError(f"{path}: holds no figures of a benchmark: {error}") from error


def _text(figures: dict[str, Figure], name: str) -> str:
    values = [figures[f"{name}{end}"].value for end in ("", "_least", "_largest")]
    mean, least, largest = (float("nan") if value is None else value for value in values)
    return f"{mean:.3g} ({least:.3g} to {largest:.3g})"

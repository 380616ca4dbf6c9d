"""The profile of models on one device: which settings, in how much time; the rows; table, cost file and figures."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from forebay.bench.arithmetic import Arithmetic, Ceilings, read_arithmetic
from forebay.bench.ceilings import measure_ceilings
from forebay.bench.cost_file import Phase, Setting, write_cost_file
from forebay.bench.errors import BenchError
from forebay.bench.figures import Figure, write_figures
from forebay.bench.profile_steps import EXTRA_TOKENS, FEWEST_STEPS, WARM_UP_STEPS, StepDriver, Took
from forebay.gpu.device import Device, open_device
from forebay.gpu.errors import StepError
from forebay.transport.messages import BLOCK_TOKENS, DeviceSettings, ModelSpec

MOST_PREFILL_TOKENS = 16
"""Steps of `step_tokens` in the largest prefill that is measured: a longer one takes as much longer as it is longer."""

AGAIN_SHARE = 0.003
"""Of the time for a model: what took less is measured twice, and the faster one counts."""

FILL_SHARE = 0.15
"""Of the time for a model, to fill its blocks with real keys and values first."""


@dataclass(frozen=True)
class Profile:
    """What to measure. `shares` are per cent of the SMs, 100 for all; `seconds` bounds the time for one model, without
    loading it: what does not fit into it, or into `memory` bytes of KV pool, counts as not measured."""

    models: Sequence[tuple[str, Path]]
    device: str
    dtype: str
    load_format: str
    batches: Sequence[int]
    lengths: Sequence[int]
    shares: Sequence[int]
    seconds: float
    memory: int
    slab: int
    step_tokens: int
    threads: int


@dataclass(frozen=True)
class Row:
    """One setting of one model. `took` is None where it was not measured, for the reason in `why`; `limit_s` is what
    the measured ceilings of the device allow at best, with all SMs."""

    model: str
    setting: Setting
    phase: Phase
    took: Took | None
    limit_s: float
    why: str = ""


def profile(plan: Profile, tell: Callable[[str], None], ceilings: Ceilings | None = None) -> tuple[Ceilings, list[Row]]:
    """Measures all, and the ceilings first unless they are given; `tell` gets a line now and then. Raises BenchError,
    DeviceError and ModelLoadError."""
    arithmetic = {name: read_arithmetic(folder, plan.dtype) for name, folder in plan.models}
    ceilings = ceilings or measure_ceilings(plan.device, plan.dtype, plan.threads)
    tell(
        f"{plan.device}: copies {ceilings.bytes_per_s / 1e9:,.0f} GB/s (read + write), multiplies "
        f"{ceilings.operations_per_s / 1e12:,.2f} TFLOP/s in {plan.dtype}"
    )
    partition = "green" if any(share != 100 for share in plan.shares) else "none"
    settings = DeviceSettings(plan.memory, plan.slab, plan.threads, partition=partition)
    rows: list[Row] = []
    device = open_device(plan.device, settings)
    try:
        for name, folder in plan.models:
            rows += _profile_model(plan, name, folder, device, arithmetic[name], ceilings, tell)
    finally:
        device.close()
    return ceilings, rows


def _profile_model(
    plan: Profile,
    name: str,
    folder: Path,
    device: Device,
    arithmetic: Arithmetic,
    ceilings: Ceilings,
    tell: Callable[[str], None],
) -> list[Row]:
    begin = time.perf_counter()
    spec = ModelSpec(
        name,
        str(folder.resolve()),
        plan.dtype,
        max_sequences=max(plan.batches),
        step_tokens=max(plan.step_tokens, max(plan.batches)),
        load_format=plan.load_format,
    )
    runner = device.load(spec)
    try:
        tell(f"{name}: loaded in {time.perf_counter() - begin:.1f} s")
        driver = StepDriver(runner, arithmetic.vocabulary, lanes=any(share != 100 for share in plan.shares))
        begin = time.perf_counter()
        tokens = runner.blocks * BLOCK_TOKENS
        wanted = min(tokens, max(plan.batches) * (max(plan.lengths) + EXTRA_TOKENS))
        filled = driver.fill(wanted, plan.seconds * FILL_SHARE)
        tell(f"{name}: {filled * BLOCK_TOKENS:,} tokens of KV cache filled in {time.perf_counter() - begin:.1f} s")
        deadline = begin + plan.seconds
        rows: list[Row] = []
        slowest: dict[Phase, float] = {"prefill": 1.0, "decoding": WARM_UP_STEPS + FEWEST_STEPS}
        """Seconds that a measurement took as a multiple of its limit: what the next one may take."""
        # The cheap ones first: if time runs out, it is the largest that are missing.
        for setting in sorted(_settings(plan), key=lambda one: (one.batch * one.sequence_length, one)):
            share = 0 if setting.sm_percent == 100 else setting.sm_percent
            batch, length = setting.batch, setting.sequence_length
            for phase in _PHASES:
                if phase == "prefill":
                    limit = ceilings.seconds(arithmetic.prefill(batch, length, spec.step_tokens))
                    needed, context = length, length
                else:
                    limit = ceilings.seconds(arithmetic.decode(batch, length))
                    needed = context = length + EXTRA_TOKENS
                why = ""
                if batch * -(-needed // BLOCK_TOKENS) > runner.blocks:
                    why = f"the KV pool holds {tokens:,} tokens"
                elif context > runner.max_context:
                    why = f"the model takes {runner.max_context:,} tokens"
                elif phase == "prefill" and batch * length > MOST_PREFILL_TOKENS * spec.step_tokens:
                    why = f"more than {MOST_PREFILL_TOKENS} steps of prompt"
                elif time.perf_counter() + limit * slowest[phase] > deadline:
                    why = f"{plan.seconds:g} s were over"
                took = None
                if not why:
                    measure = driver.prefill if phase == "prefill" else driver.decode
                    started = time.perf_counter()
                    try:
                        took = measure(batch, length, share)
                        spent = time.perf_counter() - started
                        slowest[phase] = max(slowest[phase], spent / limit)
                        # Once more, as what slows a measurement down comes from elsewhere; a long one says enough.
                        if spent < plan.seconds * AGAIN_SHARE:
                            took = min(took, measure(batch, length, share), key=lambda one: one.wall_s)
                    except StepError as error:
                        why = str(error)
                rows.append(Row(name, setting, phase, took, limit, why))
        measured = sum(row.took is not None for row in rows)
        tell(f"{name}: {measured} of {len(rows)} times measured in {time.perf_counter() - begin:.1f} s")
        return rows
    finally:
        device.unload(name)


_PHASES: tuple[Phase, ...] = ("prefill", "decoding")


def _settings(plan: Profile) -> list[Setting]:
    return [
        Setting(1, share, batch, length) for share in plan.shares for batch in plan.batches for length in plan.lengths
    ]


def save_costs(path: Path, rows: Sequence[Row]) -> None:
    costs: dict[str, dict[Setting, dict[Phase, float | None]]] = {}
    for row in rows:
        figures = costs.setdefault(row.model, {}).setdefault(row.setting, {"prefill": None, "decoding": None})
        figures[row.phase] = None if row.took is None else 1e3 * row.took.wall_s
    write_cost_file(path, costs)


def print_profile(rows: Sequence[Row], console: Console) -> None:
    """A table a model. Times in ms, and in brackets the measured time as a multiple of its limit."""
    for model in dict.fromkeys(row.model for row in rows):
        table = Table(box=box.SIMPLE_HEAD, title=f"{model}: measured time beside its limit")
        for column in ("SM %", "batch", "length", "prefill ms", "limit", "x", "decode step ms", "device", "limit", "x"):
            table.add_column(column, justify="right", no_wrap=True)
        own = {(row.setting, row.phase): row for row in rows if row.model == model}
        for setting in sorted({row.setting for row in own.values()}):
            prefill, decode = own[setting, "prefill"], own[setting, "decoding"]
            if prefill.took is None and decode.took is None:
                continue
            table.add_row(
                str(setting.sm_percent), str(setting.batch), str(setting.sequence_length),
                _wall(prefill), _ms(prefill.limit_s), _times(prefill), _wall(decode),
                "-" if decode.took is None else _ms(decode.took.device_s), _ms(decode.limit_s), _times(decode),
            )  # fmt: skip
        console.print(table)
        reasons = dict.fromkeys(row.why for row in own.values() if row.why)
        for why in reasons:
            count = sum(row.why == why for row in own.values())
            console.print(f"{count} times not measured: {why}", highlight=False)
    console.print(
        "Limit: the larger of the bytes of weights and KV cache over the measured copy rate, and of the operations "
        "over the measured product rate, all SMs; x: the measured time as a multiple of it. Decode steps are timed "
        "with the next one launched ahead; device: what the device itself worked.",
        highlight=False,
    )


def save_figures(path: Path, command: Sequence[str], ceilings: Ceilings, rows: Sequence[Row]) -> None:
    """Each measured time in seconds, its baseline the limit."""
    figures = {
        "copy_rate": Figure(ceilings.bytes_per_s, "byte/s"),
        "product_rate": Figure(ceilings.operations_per_s, "1/s"),
    }
    for row in rows:
        if row.took is not None:
            _, share, batch, length = row.setting
            key = f"{row.model}_{row.phase}_{share}_{batch}_{length}"
            figures[key] = Figure(row.took.wall_s, "s", row.limit_s)
    write_figures(path, "bench.profile", command, figures)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"


def _wall(row: Row) -> str:
    return "-" if row.took is None else _ms(row.took.wall_s)


def _times(row: Row) -> str:
    return "-" if row.took is None else f"{row.took.wall_s / row.limit_s:.2f}"


def check_names(models: Sequence[tuple[str, Path]]) -> None:
    """Raises BenchError where two models have one name, which keys the cost file."""
    names = [name for name, _ in models]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BenchError(f"two models are called {twice!r}: give one of them another name, NAME=FOLDER")

"""The tables of a comparison, and its file of figures."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from forebay.bench.compare_arms import ARMS, EXPLAINED
from forebay.bench.compare_figures import LATE_S, Comparison
from forebay.bench.figures import Figure, write_figures
from forebay.bench.report import Group, Summary


def print_comparison(comparison: Comparison, remaining: Sequence[str], console: Console) -> None:
    _print_arms(comparison, console)
    _print_points(comparison, console)
    _print_goodput(comparison, console)
    _print_faults(comparison, console)
    for one in remaining:
        console.print(f"remains: {one} requests/s; the same command goes on", highlight=False)


def _print_arms(comparison: Comparison, console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, title="Arms")
    for name in ("arm", "what", "start s", "alone: TTFT ms", "step ms"):
        table.add_column(name, justify="left" if name in ("arm", "what") else "right", overflow="fold")
    for arm in ARMS:
        state = comparison.arms.get(arm)
        if state is None:
            continue
        lone = [] if state.baseline is None else list(state.baseline.models.values())
        ttft = [sample.ttft_s for model in lone for sample in model.samples]
        steps = [model.decode_step_s for model in lone]
        table.add_row(
            arm, EXPLAINED[arm], _cell(state.start_s, 1, 1), _span(ttft), _span(steps)
        )  # fmt: skip
    console.print(table)
    name = comparison.reference
    whose = f"in arm {name}" if name in ARMS else f"as {name} says"
    console.print(f"SLO at scale s: latency at most s x what the request takes alone, {whose}.", highlight=False)


def _print_points(comparison: Comparison, console: Console) -> None:
    scales = [f"{scale:g}" for scale in comparison.scales]
    table = Table(box=box.SIMPLE_HEAD, title="Points: all models together, and each model's share within the SLO")
    columns = ("req/s", "requests", "failed", "tokens/s", "TTFT ms p50 / p99", "TPOT ms p50 / p99")
    table.add_column("arm", no_wrap=True)
    for name in (*columns, *(f"x{scale} %" for scale in scales)):
        table.add_column(name, justify="right", no_wrap=True)
    for arm in comparison.measured:
        for point in comparison.of(arm):
            total = comparison.group(point)
            table.add_row(
                arm, f"{point.rate:g}", str(total.requests), str(total.failed), _cell(total.output_tokens_per_s, 1, 0),
                _pair(total.ttft_s), _pair(total.tpot_s), *_shares(total, scales),
            )  # fmt: skip
            models = sorted({sample.model for sample in point.samples})
            for model in models if len(models) > 1 else []:
                group = comparison.group(point, model)
                table.add_row(
                    f"  {model}", "", str(group.requests), str(group.failed), _cell(group.output_tokens_per_s, 1, 0),
                    _pair(group.ttft_s), _pair(group.tpot_s), *_shares(group, scales), style="dim",
                )  # fmt: skip
    console.print(table)


def _print_goodput(comparison: Comparison, console: Console) -> None:
    arms = comparison.measured
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"Goodput, requests/s with {100 * comparison.target:.4g} % within the SLO, and as a multiple of others'",
    )
    table.add_column("arm", no_wrap=True)
    for scale in comparison.scales:
        table.add_column(f"x{scale:g}", justify="right", no_wrap=True)
    for arm in arms:
        table.add_row(arm, *(str(comparison.goodput(arm, scale) or "-") for scale in comparison.scales))
    for arm in arms:
        for beside in arms:
            if arm != beside and ("vllm" in beside or arm == "auto") and not arm.startswith("vllm"):
                ratios = [comparison.ratio(arm, beside, scale) for scale in comparison.scales]
                cells = ["-" if one is None else str(one) for one in ratios]
                table.add_row(f"{arm} / {beside}", *cells, style="dim")
    console.print(table)
    console.print(
        "Between two swept rates by a straight line; ≥: the highest rate swept was held; <: the lowest was not; "
        "-: the sweep does not tell; *: not measured in one call.",
        highlight=False,
    )


def _print_faults(comparison: Comparison, console: Console) -> None:
    for arm in ARMS:
        state = comparison.arms.get(arm)
        if state is not None and state.failure is not None:
            console.print(f"{arm}: {state.failure}", highlight=False, markup=False)
    for arm in comparison.measured:
        for point in comparison.of(arm):
            where = f"{arm} at {point.rate:g} requests/s"
            total = comparison.group(point)
            for kind, count in total.failures.items():
                console.print(f"{where}: {count} {kind}, first: {point.errors[kind]}", highlight=False, markup=False)
            if total.send_delay_s.p99 is not None and total.send_delay_s.p99 > LATE_S:
                console.print(
                    f"{where}: the load generator was late itself, p99 {1e3 * total.send_delay_s.p99:.0f} ms",
                    highlight=False,
                )


def save_comparison(path: Path, command: Sequence[str], comparison: Comparison) -> None:
    """Goodputs of each arm and scale beside those of stock vLLM under MPS (else without), and the percentiles."""
    figures: dict[str, Figure] = {}
    beside = next((arm for arm in ("vllm-mps", "vllm") if arm in comparison.measured), None)
    for arm in comparison.measured:
        for scale in comparison.scales:
            goodput = comparison.goodput(arm, scale)
            other = None if beside in (None, arm) else comparison.goodput(str(beside), scale)
            figures[f"{arm}_goodput_{scale:g}"] = Figure(
                None if goodput is None else goodput.rate if goodput.bound != "below" else 0.0,
                "1/s",
                None if other is None else other.rate if other.bound != "below" else 0.0,
            )
        for point in comparison.of(arm):
            total = comparison.group(point)
            for name, summary in (("ttft", total.ttft_s), ("tpot", total.tpot_s)):
                for share, value in (("p50", summary.p50), ("p99", summary.p99)):
                    figures[f"{arm}_{name}_{share}_{point.rate:g}"] = Figure(value, "s")
            figures[f"{arm}_failed_{point.rate:g}"] = Figure(total.failed, "1")
            for scale_name, attained in total.slo_attainment.items():
                figures[f"{arm}_attainment_{scale_name}_{point.rate:g}"] = Figure(attained, "1")
    gpus = {state.gpu for state in comparison.arms.values() if state.gpu}
    write_figures(path, "bench.compare", command, figures, {"gpu": "; ".join(sorted(gpus))} if gpus else None)


def _cell(value: float | None, unit: float, digits: int) -> str:
    return "-" if value is None else f"{value / unit:,.{digits}f}"


def _pair(summary: Summary) -> str:
    return f"{_cell(summary.p50, 1e-3, 1)} / {_cell(summary.p99, 1e-3, 1)}"


def _span(values: Sequence[float]) -> str:
    """Least to most, in ms."""
    return "-" if not values else f"{1e3 * min(values):.1f} to {1e3 * max(values):.1f}"


def _shares(group: Group, scales: Sequence[str]) -> list[str]:
    shares = [group.slo_attainment[scale] for scale in scales]
    return ["-" if share is None else f"{100 * share:.1f}" for share in shares]

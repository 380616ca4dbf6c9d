"""Plots of a comparison as PNG files, each with what it shows written under it.

Importing this loads matplotlib: import it where plots are to be drawn."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import PercentFormatter

from forebay.bench.client import Outcome
from forebay.bench.compare_arms import ARMS
from forebay.bench.compare_figures import Comparison
from forebay.bench.plots import COLOURS, DASHES, DOTS_PER_INCH
from forebay.bench.report import tpot_s, ttft_s
from forebay.bench.series import distribution

MOST_RATES = 4
"""A plot of distributions shows so many rates, spread over those that were swept."""

PANEL_INCHES = (4.4, 3.0)
CAPTION_INCHES = 0.65


def draw_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Writes attainment.png, ttft.png and tpot.png; their paths. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        _draw_attainment(comparison, folder / "attainment.png"),
        _draw_distributions(
            comparison,
            folder / "ttft.png",
            "time to first token, s",
            lambda one: [ttft_s(one)],
            "Time to first token at several rates: the share of finished requests whose first token came within the "
            "time on the axis, counted from the scheduled arrival. The further left, the better; a long flat end is a "
            "slow tail.",
        ),
        _draw_distributions(
            comparison,
            folder / "tpot.png",
            "time per output token, ms",
            lambda one: [1e3 * tpot_s(one)] if one.output_tokens > 1 else [],
            "Time per output token at several rates: the share of finished requests whose mean time per output token "
            "after the first is at most that on the axis. The further left, the better.",
        ),
    ]


def _draw_attainment(comparison: Comparison, path: Path) -> Path:
    target = comparison.target
    caption = (
        f"Requests within the SLO over the rate, all models together, an SLO scale a panel: the share of all requests, "
        f"failed ones counting as missed, that took at most so many times as long as alone (yardstick: "
        f"{comparison.reference}). Where a line falls through the dotted one ({100 * target:.4g} %) is that arm's "
        f"goodput."
    )
    canvas, panels = _canvas(len(comparison.scales), caption)
    for axes, scale in zip(panels, comparison.scales, strict=True):
        for arm in comparison.measured:
            points = [(point.rate, comparison.attainment(point, scale)) for point in comparison.of(arm)]
            axes.plot([x for x, _ in points], [y for _, y in points], marker=".", **_line(arm))
        axes.axhline(target, color="0.5", linewidth=1, linestyle=":")
        axes.set_title(f"scale {scale:g}", fontsize="medium")
        axes.set_ylim(0, 1.03)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_xlim(left=0)
        axes.set_xlabel("requests per second")
    return _save(canvas, panels, path)


def _draw_distributions(
    comparison: Comparison, path: Path, label: str, values: Callable[[Outcome], Sequence[float]], caption: str
) -> Path:
    rates = sorted({point.rate for point in comparison.points})
    if len(rates) > MOST_RATES:
        rates = [rates[round(place * (len(rates) - 1) / (MOST_RATES - 1))] for place in range(MOST_RATES)]
    canvas, panels = _canvas(len(rates), caption)
    for axes, rate in zip(panels, rates, strict=True):
        shown: dict[str, list[float]] = {}
        for arm in comparison.measured:
            outcomes = [one for point in comparison.of(arm) if point.rate == rate for one in point.outcomes]
            shown[arm] = [value for one in outcomes if one.failure is None for value in values(one)]
        _distributions(axes, shown)
        axes.set_title(f"{rate:g} requests per second", fontsize="medium")
        axes.set_xlabel(label)
    return _save(canvas, panels, path)


def _distributions(axes: Axes, shown: Mapping[str, Sequence[float]]) -> None:
    for arm, values in shown.items():
        if values:
            ascending, shares = distribution(values)
            axes.step([ascending[0], *ascending], [0.0, *shares], where="post", **_line(arm))
    pooled = [value for values in shown.values() for value in values if value > 0]
    if pooled and max(pooled) > 3 * min(pooled):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        few = max(pooled) < 100 * min(pooled)
        axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if few and f"{value:e}"[0] in "25" else "")
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _canvas(panels: int, caption: str) -> tuple[Canvas, list[Axes]]:
    """Panels in rows of two, the caption below them."""
    columns = min(panels, 2)
    rows = -(-panels // columns)
    width, height = columns * PANEL_INCHES[0] + 1.2, rows * PANEL_INCHES[1] + CAPTION_INCHES
    canvas = Canvas(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained")
    below = CAPTION_INCHES / height
    engine: Any = canvas.get_layout_engine()
    engine.set(rect=(0, below, 1, 1 - below))
    lines = textwrap.fill(caption, int(width * 15.5))
    canvas.text(0.01, below - 0.01, lines, fontsize="small", va="top", ha="left")
    grid = canvas.subplots(rows, columns, squeeze=False)
    axes = [grid[place // columns][place % columns] for place in range(rows * columns)]
    for unused in axes[panels:]:
        unused.set_visible(False)
    for one in axes:
        one.grid(alpha=0.3)
    return canvas, axes[:panels]


def _line(arm: str) -> dict[str, Any]:
    """The same for an arm in every plot: ours that counts in black, others' servers dashed."""
    if arm == "auto":
        return {"label": arm, "color": "black", "linewidth": 2.2, "alpha": 0.8}
    place = list(ARMS).index(arm)
    return {
        "label": arm,
        "color": COLOURS[place % len(COLOURS)],
        "linestyle": DASHES[1] if arm.startswith("vllm") else DASHES[0],
        "linewidth": 1.6,
    }


def _save(canvas: Canvas, panels: Sequence[Axes], path: Path) -> Path:
    labelled = {}
    for axes in panels:
        labelled.update({label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)})
    canvas.legend([*labelled.values()], [*labelled], loc="outside right upper", frameon=False, fontsize="small")
    canvas.savefig(path)
    return path

"""Plots of measurements as PNG files. What they show is computed in series and report; here it is only drawn.

Importing this loads matplotlib, which takes as long as all the rest: import it where a plot was asked for."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator, PercentFormatter

from forebay.bench.client import Outcome
from forebay.bench.measure import Measurement
from forebay.bench.report import Report, tpot_s, ttft_s
from forebay.bench.series import ALL, Plot, distribution, timeline

MOST_MODELS = 12
"""A plot shows the models with the most requests, at most so many; more lines than this cannot be told apart."""

SIZE_INCHES = (7.6, 4.0)
DOTS_PER_INCH = 100

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Told apart also by people who see few colours (after Okabe and Ito)."""

DASHES = ("-", "--", ":")


def shown_models(requests: Mapping[str, int]) -> list[str]:
    """The models to draw, sorted by name, of `requests` a model."""
    most = sorted(requests, key=lambda name: (-requests[name], name))[:MOST_MODELS]
    return sorted(most)


def draw_measurement(measurement: Measurement, folder: Path) -> list[Plot]:
    """Writes the plots of a replay into `folder`, which is made. Raises OSError where it cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    report, run = measurement.report, measurement.run
    names = shown_models({name: group.requests for name, group in report.models.items()})
    outcomes = {name: [outcome for outcome in run.outcomes if outcome.model == name] for name in names}
    left_out = ""
    if len(names) < len(report.models):
        left_out = f" Shown are the {len(names)} models with the most requests of {len(report.models)}."
    plots = [
        _draw_attainment(report, names, folder),
        _draw_distribution(
            {name: [1.0 * ttft_s(one) for one in group if one.failure is None] for name, group in outcomes.items()},
            folder,
            Plot(
                "ttft.png",
                "Time to first token",
                "Share of the finished requests whose first token came within the time on the axis, counted from the "
                "scheduled arrival. The further left, the better; a long flat end is a slow tail.",
            ),
            "time to first token, s",
        ),
        _draw_distribution(
            {
                name: [1e3 * tpot_s(one) for one in group if one.failure is None and one.output_tokens > 1]
                for name, group in outcomes.items()
            },
            folder,
            Plot(
                "tpot.png",
                "Time per output token",
                "Share of the finished requests whose mean time per output token after the first is at most that on "
                "the axis. A step far to the right is requests that were held back in the middle of their answers.",
            ),
            "time per output token, ms",
        ),
        _draw_timeline(outcomes, run.begin, folder),
    ]
    return [Plot(plot.file, plot.title, plot.caption + left_out) for plot in plots]


def _draw_attainment(report: Report, names: Sequence[str], folder: Path) -> Plot:
    canvas, axes = _canvas()
    groups = {**{name: report.models[name] for name in names}, ALL: report.total}
    for name, group in groups.items():
        points = [(float(scale), share) for scale, share in group.slo_attainment.items() if share is not None]
        axes.plot([x for x, _ in points], [y for _, y in points], marker=".", **_line(name, names))
    axes.set_xlabel("SLO scale: allowed latency as a multiple of that of the request alone")
    axes.set_ylabel("requests within the SLO")
    _shares(axes)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    _save(canvas, axes, folder / "attainment.png")
    return Plot(
        "attainment.png",
        "SLO attainment",
        "Share of all requests, failed ones counting as missed, that took at most so many times as long as alone on "
        "the server. The higher and the further left, the better.",
    )


def _draw_distribution(values: Mapping[str, Sequence[float]], folder: Path, plot: Plot, label: str) -> Plot:
    canvas, axes = _canvas()
    pooled = [value for group in values.values() for value in group]
    for name, group in {**values, ALL: pooled}.items():
        ascending, shares = distribution(group)
        # A line from the axis up to the first value, so that a group of one value is seen too.
        axes.step(
            [*ascending[:1], *ascending], [0.0, *shares] if shares else [], where="post", **_line(name, [*values])
        )
    positive = [value for value in pooled if value > 0]
    if positive and max(positive) > 3 * min(positive):
        axes.set_xscale("log")
        axes.grid(which="minor", axis="x", alpha=0.12)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        if max(positive) < 30 * min(positive):
            axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    axes.set_xlabel(label)
    axes.set_ylabel("requests")
    _shares(axes)
    axes.set_ylim(bottom=0)
    _save(canvas, axes, folder / plot.file)
    return plot


def _draw_timeline(outcomes: Mapping[str, Sequence[Outcome]], begin: float, folder: Path) -> Plot:
    canvas = Canvas(figsize=(SIZE_INCHES[0], 1.4 * SIZE_INCHES[1]), dpi=DOTS_PER_INCH, layout="constrained")
    upper, lower = canvas.subplots(2, 1, sharex=True)
    for name, group in outcomes.items():
        line = timeline(group, begin)
        for axes, counts in ((upper, line.waiting), (lower, line.running)):
            axes.step([0.0, *line.times_s], [0, *counts], where="post", **_line(name, [*outcomes]))
    for axes, label in ((upper, "waiting requests"), (lower, "running requests")):
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.grid(alpha=0.3)
    lower.set_xlabel("seconds since the replay began")
    lower.set_xlim(left=0)
    _save(canvas, upper, folder / "timeline.png")
    return Plot(
        "timeline.png",
        "Requests in flight",
        "Above, requests that were sent and had no token yet; below, requests between their first token and their end. "
        "A waiting line that grows says that the model gets more than it is served.",
    )


def draw_attainment_over_rate(
    points: Sequence[tuple[float, Mapping[str, float | None]]], *, scale: float, target: float, found: float | None,
    path: Path,
) -> Plot:  # fmt: skip
    """`points` hold (requests per second, attainment by model, the total under ALL), one for each probe."""
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas, axes = _canvas()
    names = sorted({name for _, shares in points for name in shares} - {ALL})[:MOST_MODELS]
    for name in (*names, ALL):
        line = sorted((rate, share) for rate, shares in points if (share := shares.get(name)) is not None)
        axes.plot([rate for rate, _ in line], [share for _, share in line], marker=".", **_line(name, names))
    axes.axhline(target, color="0.5", linewidth=1, linestyle="-.", label=f"target, {100 * target:.4g} %")
    if found is not None:
        axes.axvline(found, color="0.5", linewidth=1, linestyle=":", label=f"goodput, {found:.3g}/s")
    axes.set_xlabel("requests per second, all models together")
    axes.set_ylabel(f"requests within the SLO at scale {scale:g}")
    _shares(axes)
    lowest = min((share for _, shares in points for share in shares.values() if share is not None), default=0.0)
    # What matters is near the target: no empty half of a plot below it.
    bottom = max(0.0, min(0.95, 1 - 1.1 * (1 - min(lowest, target))))
    axes.set_ylim(bottom, 1 + 0.03 * (1 - bottom))
    axes.set_xlim(left=0)
    _save(canvas, axes, path)
    return Plot(
        path.name,
        "SLO attainment over rate",
        f"Each point is a replay at that rate: the share of its requests that took at most {scale:g} times as long as "
        f"alone on the server. The goodput is the highest rate at which all models together reach the target.",
    )


def _canvas() -> tuple[Canvas, Axes]:
    canvas = Canvas(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    axes = canvas.subplots()
    axes.grid(alpha=0.3)
    return canvas, axes


def _line(name: str, names: Sequence[str]) -> dict[str, Any]:
    """How the line of a model looks, the same in every plot."""
    if name == ALL:
        return {"label": name, "color": "black", "linewidth": 2.2, "alpha": 0.75, "zorder": 1}
    place = list(names).index(name)
    return {
        "label": name if len(name) <= 24 else name[:10] + "…" + name[-13:],
        "color": COLOURS[place % len(COLOURS)],
        "linestyle": DASHES[place // len(COLOURS) % len(DASHES)],
        "linewidth": 1.4,
        "zorder": 2,
    }


def _shares(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(top=1.03)


def _save(canvas: Canvas, axes: Axes, path: Path) -> None:
    """With a legend of `axes` beside the plot, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside right upper", frameon=False, fontsize="small")
    canvas.savefig(path)

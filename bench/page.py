"""A replay as one HTML file: tables and plots, nothing to load from anywhere."""

import base64
import shlex
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from forebay.bench.report import Group, Report, Summary
from forebay.bench.series import ALL, Plot

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 60em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto; }
th, td { padding: 0.2em 0.7em; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1.5em 0; } figcaption { color: #555; } img { max-width: 100%; height: auto; }
code { overflow-wrap: anywhere; } .bad { color: #a00; }
"""

ENDINGS = {
    "complete": "The replay ran to its end.",
    "server_lost": "The server was gone before the replay's end: these numbers are partial.",
    "interrupted": "The replay was interrupted: these numbers are partial.",
}


def write_page(path: Path, report: Report, plots: Sequence[Plot], folder: Path) -> None:
    """`plots` lie in `folder`. Raises OSError."""
    path.write_text(page(report, plots, folder), encoding="utf-8")


def page(report: Report, plots: Sequence[Plot], folder: Path) -> str:
    rows = [*sorted(report.models.items()), (ALL, report.total)]
    parts = [
        f"<h1>Replay of {escape(report.workload)}</h1>",
        f"<p>{ENDINGS[report.ended]} {report.total.completed} of {report.total.requests} requests finished in "
        f"{report.duration_s:.1f} s against {escape(report.base_url)}.</p>",
        "<h2>Latency</h2>",
        "<p>p50 / p90 / p99 over the finished requests. Time to first token and latency count from the scheduled "
        "arrival; time per output token leaves the first token out; cached is the share of prompt tokens that the "
        "server took from its prefix cache, where it says so.</p>",
        _table(
            (
                "model",
                "requests",
                "failed",
                "first token, s",
                "per output token, ms",
                "latency, s",
                "tokens/s",
                "cached",
            ),
            ([name, *_latencies(group)] for name, group in rows),
        ),
        "<h2>Within the SLO</h2>",
        "<p>Share of all requests, failed ones counting as missed, that took at most so many times as long as alone on "
        "the server.</p>",
        _table(
            ("scale", *report.total.slo_attainment),
            ([name, *(_percent(share) for share in group.slo_attainment.values())] for name, group in rows),
        ),
    ]
    if report.total.failures:
        parts += [
            "<h2>Failures</h2>",
            _table(
                ("kind", "requests", "the first one"),
                ([kind, str(count), report.errors[kind]] for kind, count in report.total.failures.items()),
            ),
        ]
    for plot in plots:
        image = base64.b64encode((folder / plot.file).read_bytes()).decode()
        parts += [
            f"<h2>{escape(plot.title)}</h2>",
            f'<figure><img alt="{escape(plot.title)}" src="data:image/png;base64,{image}">'
            f"<figcaption>{escape(plot.caption)}</figcaption></figure>",
        ]
    parts += ["<h2>How it was measured</h2>", _table(("", ""), _circumstances(report))]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(report.workload)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n<body>\n'
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"


def _latencies(group: Group) -> list[str]:
    speed = "-" if group.output_tokens_per_s is None else f"{group.output_tokens_per_s:.1f}"
    return [
        str(group.requests),
        str(group.failed),
        _percentiles(group.ttft_s),
        _percentiles(group.tpot_s, unit=1e-3, digits=1),
        _percentiles(group.latency_s),
        speed,
        _percent(group.prefix_cache_hit_rate),
    ]


def _percentiles(summary: Summary, unit: float = 1.0, digits: int = 2) -> str:
    values = (summary.p50, summary.p90, summary.p99)
    return " / ".join("-" if value is None else f"{value / unit:.{digits}f}" for value in values)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _circumstances(report: Report) -> Iterable[Sequence[str]]:
    yield "command", shlex.join(report.command)
    yield "commit", report.commit or "not a checkout"
    yield "arrival times multiplied by", f"{report.time_scale:g}"
    for name, value in report.machine.items():
        yield f"load generator: {name}", str(value)
    for name, baseline in sorted(report.baseline.models.items()):
        yield (
            f"{name} alone",
            f"prefill {baseline.prefill_base_s:.4g} s + {1e3 * baseline.prefill_token_s:.4g} ms a prompt token, "
            f"{1e3 * baseline.decode_step_s:.4g} ms a decode step",
        )

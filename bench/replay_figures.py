"""The figures of a replay, each beside what the same requests take alone on the server."""

from collections.abc import Callable, Sequence

from forebay.bench.baseline import ModelBaseline
from forebay.bench.client import Outcome
from forebay.bench.figures import Figure
from forebay.bench.measure import Measurement
from forebay.bench.report import Summary


def replay_figures(measurement: Measurement) -> dict[str, Figure]:
    """Seconds and shares over all models. The baselines are percentiles of what the baseline says of the finished
    requests, which is about all of them where none failed."""
    total = measurement.report.total
    models = measurement.report.baseline.models
    finished = [outcome for outcome in measurement.run.outcomes if outcome.failure is None]

    def alone(seconds: Callable[[ModelBaseline, Outcome], float], of: Sequence[Outcome] = finished) -> Summary:
        return Summary.of([seconds(models[outcome.model], outcome) for outcome in of])

    lone_ttft = alone(lambda model, outcome: model.latency_s(outcome.prompt_tokens, 0))
    lone_tpot = alone(lambda model, _: model.decode_step_s, [one for one in finished if one.output_tokens > 1])
    lone_latency = alone(lambda model, outcome: model.latency_s(outcome.prompt_tokens, outcome.output_tokens))
    figures = {
        "requests": Figure(total.requests, "1"),
        "failed_requests": Figure(total.failed, "1"),
        "output_tokens_per_s": Figure(total.output_tokens_per_s, "1/s"),
        "prefix_cache_hit_rate": Figure(total.prefix_cache_hit_rate, "1"),
    }
    for name, measured, lone in (
        ("ttft", total.ttft_s, lone_ttft),
        ("tpot", total.tpot_s, lone_tpot),
        ("latency", total.latency_s, lone_latency),
    ):
        figures[f"{name}_p50_s"] = Figure(measured.p50, "s", lone.p50)
        figures[f"{name}_p99_s"] = Figure(measured.p99, "s", lone.p99)
    for scale, share in total.slo_attainment.items():
        figures[f"slo_attainment_at_{scale}"] = Figure(share, "1")
    return figures

"""What Prometheus reads at /metrics: the scheduler's latest word on models and workers, as gauges and counters."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from forebay.transport.messages import LendingStatus, Status

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(status: Status, lending: LendingStatus) -> bytes:
    """The metrics of one moment, in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Snapshot(status))
    registry.register(_Lending(lending))
    return generate_latest(registry)


class _Snapshot:
    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        waiting = GaugeMetricFamily("forebay_requests_waiting", "Requests that wait in the scheduler", labels=["model"])
        running = GaugeMetricFamily("forebay_requests_running", "Requests that workers hold", labels=["model"])
        replicas = GaugeMetricFamily("forebay_replicas_ready", "Replicas that are loaded", labels=["model"])
        prompts = CounterMetricFamily(
            "forebay_prompt_tokens", "Tokens that requests came with, of those that ended", labels=["model"]
        )
        cached = CounterMetricFamily(
            "forebay_prefix_cache_hit_tokens", "Of these, tokens found in the prefix cache", labels=["model"]
        )
        evictions = CounterMetricFamily(
            "forebay_weights_evictions", "How often weights left a device for another model's", labels=["model"]
        )
        restores = CounterMetricFamily(
            "forebay_weights_restores", "How often weights came onto a device where they come and go", labels=["model"]
        )
        restore_s = GaugeMetricFamily(
            "forebay_weights_restore_seconds", "What the last of these took", labels=["model"]
        )
        for model in self._status.models:
            for family, value in (
                (waiting, model.waiting),
                (running, model.running),
                (replicas, model.replicas),
                (prompts, model.prompt_tokens),
                (cached, model.cached_tokens),
                (evictions, model.evictions),
                (restores, model.restores),
                (restore_s, model.restore_seconds),
            ):
                family.add_metric([model.name], value)
        held = GaugeMetricFamily("forebay_worker_requests", "Requests that a worker holds", labels=["worker", "gpu"])
        given = GaugeMetricFamily(
            "forebay_worker_pool_given_bytes",
            "KV memory that a worker has given back to its device, because another process takes memory there",
            labels=["worker", "gpu"],
        )
        for worker in self._status.workers:
            held.add_metric([worker.id, worker.gpu], worker.running)
            given.add_metric([worker.id, worker.gpu], worker.given)
        yield from (waiting, running, replicas, prompts, cached, evictions, restores, restore_s, held, given)


class _Lending:
    def __init__(self, status: LendingStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        free = GaugeMetricFamily("forebay_lending_free_bytes", "Memory that is offered and nobody has", labels=["gpu"])
        lent = GaugeMetricFamily("forebay_lending_lent_bytes", "Memory of the GPU that others have", labels=["gpu"])
        borrowed = GaugeMetricFamily("forebay_lending_borrowed_bytes", "Memory that it has of others", labels=["gpu"])
        for gpu in self._status.gpus:
            for family, value in ((free, gpu.free), (lent, gpu.lent), (borrowed, gpu.borrowed)):
                family.add_metric([str(gpu.index)], value)
        yield from (free, lent, borrowed)
        for name, value in self._status.counters:
            what = f"Since the scheduler started: {name.replace('_', ' ')}"
            yield CounterMetricFamily(f"forebay_lending_{name}", what, value=value)

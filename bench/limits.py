"""The largest values that files and options may ask for: beyond them lie slips of the pen, endless loops and lack of
memory, never a workload."""

from forebay.bench.errors import BenchError

MOST_TOKENS = 10_000_000
"""Of a prompt, and of an answer."""

MOST_REQUESTS = 10_000_000
"""Of a workload."""

LEAST_RATE, MOST_RATE = 1e-6, 1e6
"""Requests per second, of a model and of all."""


def check_count(expected: float) -> None:
    """Raises BenchError where a workload would have more requests than MOST_REQUESTS."""
    if expected > MOST_REQUESTS:
        raise BenchError(
            f"the workload would have about {expected:.3g} requests; at most {MOST_REQUESTS:,} are allowed: lower the "
            f"rate, the duration or the number of requests"
        )

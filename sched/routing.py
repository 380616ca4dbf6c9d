"""Which replica serves a request: the one with the least work outstanding, counted in tokens."""

from collections.abc import Iterable

from forebay.transport.messages import ModelSpec

OUTPUT_SMOOTHING = 0.05
"""Weight of the newest request in a model's mean output length."""


def window(spec: ModelSpec) -> int:
    """Requests of a model that a worker may hold at once: a full batch, and enough waiting to refill it without a
    round trip. The rest waits in the scheduler, where any replica can take it."""
    return spec.max_sequences + max(2, spec.max_sequences // 4)


def outstanding_tokens(known: int, prompt: int, max_tokens: int, mean_output: float) -> int:
    """Work that a request brings: the tokens it comes with, and those it will probably still make."""
    generated = known - prompt
    return known + int(min(max_tokens - generated, max(1.0, mean_output - generated)))


def updated_mean(mean: float, sample: int) -> float:
    return mean + OUTPUT_SMOOTHING * (sample - mean)


def least_loaded(loads: Iterable[tuple[int, str]]) -> str | None:
    """`loads` are (outstanding tokens, worker); ties go to the first by name, so that the choice is repeatable."""
    return min(loads, default=(0, None))[1]

"""Which replica serves a request: the one with the least work outstanding, counted in tokens."""

from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from forebay.transport.messages import ModelSpec

OUTPUT_SMOOTHING = 0.05
"""Weight of the newest request in a model's mean output length."""


def window(spec: ModelSpec) -> int:
    """Requests of a model that a worker may hold at once: a full batch, and enough waiting to refill it without a
    round trip. The rest waits in the scheduler, where any replica can take it."""
    return spec.max_sequences + max(2, spec.max_sequences // 4)


FAIR_WINDOW = 1024
"""The same for a worker that shares its time fairly (cfs, vtc): it can only be fair to requests that it has. What it
then holds back from other replicas is the price."""


def outstanding_tokens(known: int, prompt: int, max_tokens: int, mean_output: float) -> int:
    """Work that a request brings: the tokens it comes with, and those it will probably still make."""
    generated = known - prompt
    return known + int(min(max_tokens - generated, max(1.0, mean_output - generated)))


def updated_mean(mean: float, sample: int) -> float:
    return mean + OUTPUT_SMOOTHING * (sample - mean)


class Ranking:
    """The workers that may take a request of one model, the one with the least work outstanding first; ties go to the
    first by name, so that the choice is repeatable. An update costs the logarithm of their number."""

    def __init__(self) -> None:
        self._loads: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []

    def update(self, worker: str, load: int) -> None:
        """The worker may take one, and has `load` tokens outstanding."""
        if self._loads.get(worker) == load:
            return
        self._loads[worker] = load
        heappush(self._heap, (load, worker))
        if len(self._heap) > 16 + 4 * len(
            self._loads
        ):  # entries of the past, which `best` skips, are not kept for ever
            self._heap = [(current, name) for name, current in self._loads.items()]
            heapify(self._heap)

    def remove(self, worker: str) -> None:
        """The worker is full, or gone."""
        self._loads.pop(worker, None)

    def best(self) -> str | None:
        while self._heap:
            load, worker = self._heap[0]
            if self._loads.get(worker) == load:
                return worker
            heappop(self._heap)
        return None

    @property
    def loads(self) -> Mapping[str, int]:
        return self._loads

"""How long steps take on this device: a table of measured times where there is one, corrected by the steps that landed.

A step's time has three parts: what it takes while no step of the other phase runs (`decode_s`, `prefill_s`), by what
the table's figure is off on this device (a factor for each model and phase), and by what it slows while the other phase
runs beside it on a share of the SMs (`Slowdown`, a factor for each share).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from forebay.sched.cost_table import CostRow, CostTable

SMOOTHING = 0.1
"""Weight of the newest step."""

DECODE_S, PREFILL_S = 0.02, 0.0005
"""A decode step and a token of a prompt, until there were steps."""

RIDE_S = 0.00003
"""By what a token of a prompt that goes along lengthens a decode step, until there were such steps: one H200 takes 22
microseconds a token for Llama-3.1-8B's shape once it is busy computing."""

MEASURED_SHARE = 8
"""Where a table lists several shares of the SMs, they are taken to be this near (in points) to the one that is
asked."""


@dataclass(slots=True)
class Slowdown:
    """By what factor a decode step slows while a prefill runs beside it, and that prefill beside decodes."""

    decode: float
    prefill: float


def measured_slowdowns() -> dict[int, Slowdown]:
    """By the share of the SMs that the prefill may use (0: all). Until steps show better: one H200, decode steps of
    32 rows (Llama-3.1-8B's shape, urgent streams, all SMs) of 6.0 ms beside chunks of 2,048 tokens of another such
    model, which alone reads 34,500 tokens/s (python -m bench.interference)."""
    return {
        0: Slowdown(4.0, 1.24),
        61: Slowdown(1.47, 2.19),
        55: Slowdown(1.42, 2.35),
        48: Slowdown(1.3, 2.8),
    }


@dataclass(slots=True)
class Factors:
    """What a model's measured times are over what was expected, by phase. `unknown`: no step has landed yet."""

    decode: float = 1.0
    prefill: float = 1.0
    ride: float = 1.0
    seen: set[str] = field(default_factory=set)


class Costs:
    """`rows`: of a cost file, or none."""

    def __init__(self, rows: Iterable[CostRow] = ()) -> None:
        self._table = CostTable(rows)
        self._names: dict[str, str] = {}
        self._factors: dict[str, Factors] = {}
        self.slow = measured_slowdowns()

    def add_model(self, model: str, name: str = "") -> None:
        """`name`: what the table calls it, if not the same."""
        self._names[model] = name or model
        self._factors[model] = Factors()

    def prefill_s(self, model: str, tokens: int) -> float:
        """Seconds of a prefill of so many tokens with the device to itself."""
        return self._factors[model].prefill * self._expected_prefill(model, tokens)

    def decode_s(self, model: str, batch: int, tokens: int) -> float:
        """Seconds of a decode step of `batch` sequences of `tokens` together, beside the decodes that there are now."""
        return self._factors[model].decode * self._expected_decode(model, batch, tokens)

    def ride_s(self, model: str, tokens: int) -> float:
        """Seconds by which so many tokens of prompts lengthen the decode step that they go along with."""
        return self._factors[model].ride * self._expected_ride(model, tokens)

    def _expected_prefill(self, model: str, tokens: int) -> float:
        known = self._table.prefill_s(self._names[model], tokens)
        return PREFILL_S * tokens if known is None else known

    def _expected_ride(self, model: str, tokens: int) -> float:
        known = self._table.prefill_s(self._names[model], tokens)
        return RIDE_S * tokens if known is None else known

    def _expected_decode(self, model: str, batch: int, tokens: int) -> float:
        known = self._table.decode_s(self._names[model], batch, tokens / max(1, batch))
        return DECODE_S if known is None else known

    def decode_landed(self, model: str, batch: int, tokens: int, seconds: float, beside: int | None) -> None:
        """A decode step took so long; `beside`: the share of the prefill that ran all the while, None if none did."""
        expected = self._expected_decode(model, batch, tokens)
        if beside is None:
            factors = self._factors[model]
            factors.decode = _learn(factors.decode, seconds / expected, "decode" in factors.seen)
            factors.seen.add("decode")
        elif "decode" in self._factors[model].seen and beside in self.slow:
            sample = max(1.0, seconds / (expected * self._factors[model].decode))
            self.slow[beside].decode += SMOOTHING * (sample - self.slow[beside].decode)

    def ride_landed(self, model: str, batch: int, tokens: int, along: int, seconds: float) -> None:
        """A decode step as for `decode_landed`, with `along` tokens of prompts, took so long while no prefill ran."""
        factors = self._factors[model]
        if "decode" in factors.seen:
            more = max(0.0, seconds - self.decode_s(model, batch, tokens))
            factors.ride = _learn(factors.ride, more / self._expected_ride(model, along), "ride" in factors.seen)
            factors.seen.add("ride")

    def prefill_landed(self, model: str, tokens: int, seconds: float, share: int, beside: bool) -> None:
        """A prefill took so long on a share of the SMs; `beside`: whether decodes ran all the while."""
        expected = self._expected_prefill(model, tokens)
        factors = self._factors[model]
        if not beside and not share:
            factors.prefill = _learn(factors.prefill, seconds / expected, "prefill" in factors.seen)
            factors.seen.add("prefill")
        elif beside and share in self.slow and "prefill" in factors.seen:
            sample = max(1.0, seconds / (expected * factors.prefill))
            self.slow[share].prefill += SMOOTHING * (sample - self.slow[share].prefill)


def _learn(value: float, sample: float, seen: bool) -> float:
    """The first sample counts whole: what was before it is a guess."""
    return value + SMOOTHING * (sample - value) if seen else sample

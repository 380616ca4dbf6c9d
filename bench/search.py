"""The search for goodput: which rate to try next, given what was seen so far. No clock, no files, no server."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Seen:
    """A rate that was tried (requests per second) and the share of its requests within the SLO."""

    rate: float
    attainment: float


@dataclass(frozen=True)
class Search:
    """The highest rate from `lowest` to `highest` (requests per second) at which the attainment reaches `target`, to a
    relative `precision`, beginning with `first`. Attainment is taken to fall with the rate; where it wavers, the
    lowest rate that missed counts, so a lucky pass above it does not."""

    target: float
    first: float
    lowest: float
    highest: float
    precision: float

    def next_rate(self, seen: Sequence[Seen]) -> float | None:
        """What to try next; None when the search is over. It follows from `seen` alone, in any order, so a search
        that was broken off goes on where it was."""
        passed, missed = self.bracket(seen)
        if passed is None and missed is None:
            return _rounded(min(max(self.first, self.lowest), self.highest))
        if missed is None and passed is not None:
            return None if passed >= self.highest else _rounded(min(2 * passed, self.highest))
        if passed is None and missed is not None:
            return None if missed <= self.lowest else _rounded(max(missed / 2, self.lowest))
        assert passed is not None
        assert missed is not None
        middle = _rounded(math.sqrt(passed * missed))
        if missed <= passed * (1 + self.precision) or not passed < middle < missed:
            return None
        return middle

    def bracket(self, seen: Sequence[Seen]) -> tuple[float | None, float | None]:
        """The highest rate that passed below every miss, and the lowest that missed; None where there is none."""
        missed = min((one.rate for one in seen if one.attainment < self.target), default=None)
        below = [one.rate for one in seen if one.attainment >= self.target and (missed is None or one.rate < missed)]
        return max(below, default=None), missed

    def verdict(self, seen: Sequence[Seen]) -> Literal["found", "above", "below"]:
        """Of a search that is over: whether the goodput lies in the range, at its upper end or above, or below it."""
        passed, missed = self.bracket(seen)
        if missed is None:
            return "above"
        return "below" if passed is None else "found"


def _rounded(rate: float) -> float:
    """To four digits: enough for any precision that a replay has, and short in names of files."""
    return float(f"{rate:.4g}")

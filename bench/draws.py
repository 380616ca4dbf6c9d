"""Random draws that repeat bit for bit: raw PCG64 words, whose sequence numpy guarantees, and arithmetic of ours."""

import bisect
import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

_NORMAL = NormalDist()


class Draws:
    """One stream of random numbers. The same `seed` and `purpose` give the same numbers on every machine and with
    every release of numpy; streams of different purposes do not depend on each other, so that for instance a change
    of lengths leaves the arrivals as they were."""

    def __init__(self, seed: int, purpose: str) -> None:
        entropy = [seed, *purpose.encode()]
        self._bits = np.random.PCG64(np.random.SeedSequence(entropy))

    def uniform(self) -> float:
        """A number in [0, 1)."""
        return float(int(self._bits.random_raw()) >> 11) * 2.0**-53

    def exponential(self, rate: float) -> float:
        """A gap of a Poisson process, in units of 1 / `rate`."""
        return -math.log1p(-self.uniform()) / rate

    def normal(self) -> float:
        """A standard normal number."""
        return _NORMAL.inv_cdf(self.uniform() or 2.0**-53)

    def gamma(self, shape: float) -> float:
        """A gamma-distributed number of this shape and of scale 1 (so of mean `shape`): Marsaglia and
        Tsang's method, "A simple method for generating gamma variables", 2000."""
        if shape < 1:
            return self.gamma(shape + 1) * math.pow(self.uniform(), 1 / shape)
        size = shape - 1 / 3
        while True:
            normal = self.normal()
            cube = (1 + normal / math.sqrt(9 * size)) ** 3
            if cube > 0 and math.log1p(-self.uniform()) < normal**2 / 2 + size * (1 - cube + math.log(cube)):
                return size * cube

    def below(self, count: int) -> int:
        """An integer in [0, count)."""
        return int(self.uniform() * count)

    def many_below(self, count: int, size: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """`size` integers in [0, count), for `count` up to 2**31."""
        words = np.asarray(self._bits.random_raw(size), dtype=np.uint64) >> np.uint64(32)
        return ((words * np.uint64(count)) >> np.uint64(32)).astype(np.int64)

    def choose(self, cumulative: Sequence[float]) -> int:
        """An index, weighted: `cumulative` holds the running sums of the weights."""
        target = self.uniform() * cumulative[-1]
        return bisect.bisect_right(cumulative, target, hi=len(cumulative) - 1)

    def permutation(self, count: int) -> list[int]:
        """0 .. count - 1 in random order."""
        order = list(range(count))
        for last in range(count - 1, 0, -1):
            other = self.below(last + 1)
            order[last], order[other] = order[other], order[last]
        return order

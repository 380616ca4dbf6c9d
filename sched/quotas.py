"""How a pool's bytes are divided among models: by expected load at first, then by need. Conserved at every step.

From MuxServe (ICML 2024): quotas start at rate x layers x heads, and every 8 s a model at 90 % of its quota that has a
queue grows by a tenth, at the expense of the one with most to spare. Here they count bytes, not sequences.
"""

from dataclasses import dataclass

ADAPT_S = 8.0
FULL = 0.9
STEP = 0.1


@dataclass(frozen=True, slots=True)
class Need:
    """One model's situation: bytes in use, and whether requests wait."""

    used: int
    queued: bool


class Quotas:
    """Bytes of a pool by model."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.bytes: dict[str, int] = {}
        self._weights: dict[str, float] = {}

    def add(self, model: str, weight: float) -> None:
        """`weight`: expected rate times the KV bytes of a token, in any unit. All quotas are divided anew."""
        self._weights[model] = weight
        total = sum(self._weights.values())
        self.bytes = {name: int(self.capacity * share / total) for name, share in self._weights.items()}
        self.bytes[model] += self.capacity - sum(self.bytes.values())

    def resize(self, capacity: int) -> None:
        """The pool has become smaller or larger, and all quotas with it, in proportion."""
        old, self.capacity = self.capacity, capacity
        self.bytes = {name: share * capacity // old for name, share in self.bytes.items()}
        if self.bytes:
            largest = max(self.bytes, key=lambda name: (self.bytes[name], name))
            self.bytes[largest] += capacity - sum(self.bytes.values())

    def adapt(self, needs: dict[str, Need]) -> bool:
        """Moves quota from models with most to spare to those that are full and have a queue. Whether any moved."""
        moved = False
        hungry = [name for name, need in needs.items() if need.queued and need.used >= FULL * self.bytes[name]]
        for name in sorted(hungry, key=lambda name: self.bytes[name]):
            spare = {other: self.bytes[other] - needs[other].used for other in needs if other not in hungry}
            donor = max(spare, key=lambda other: (spare[other], other), default=None)
            if donor is None:
                break
            share = min(max(1, int(STEP * self.bytes[name])), spare[donor])
            if share > 0:
                self.bytes[donor] -= share
                self.bytes[name] += share
                moved = True
        return moved

    def check(self) -> None:
        assert not self.bytes or sum(self.bytes.values()) == self.capacity, "quota was lost or invented"
        assert all(quota >= 0 for quota in self.bytes.values()), self.bytes

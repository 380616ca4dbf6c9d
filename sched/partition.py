"""How prefills and decodes share the SMs of a device, decided for each chunk of a prefill.

`none`: one step after the other, decodes and prefills of a model together; the only one where SMs cannot be shared, as
on a CPU. `streams`: prefills beside decodes without bound, which gets most work done. `green`: prefills keep to a part
of the SMs, while decodes run; decodes may use all, and find those free that the prefill may not use. `auto`: whichever
of these lets the running answers keep to their targets. And under `auto` prefills go along in their model's decode
steps, where weights are read once for both: all of them while the model is the only one at work, short ones always.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from forebay.sched.cost import Costs
from forebay.sched.cost_table import CostRow
from forebay.sched.overlap import Overlaps
from forebay.sched.policy import PATIENCE
from forebay.sched.sequence import Lane, Sequence, prefills
from forebay.transport.messages import StepDone, StepPlan, Targets

SPLITS = (55, 61, 48)
"""Shares of the SMs that a prefill may be bound to, in per cent; the device splits each off when it is first asked
for. Of an H200's 132 SMs they are 72, 80 and 64. The first is the one that `green` keeps to."""

SMALLEST_CHUNK = 64
"""Tokens: a smaller chunk reads all weights for too little."""

CHUNK_STEP = 16
"""Chunks are cut to multiples of so many tokens."""

MARGIN = 0.9
"""To change to a split that slows decodes more, they have to come within this part of their target: else it would
change with every step."""

CROWDED_S = 0.25
"""For so long after another model had work a model is not the only one."""

SHORT_STEP = 256
"""Tokens of prompts that go along with a decode step while other models are at work. A step of 200 tokens takes little
longer than one of few: until then an H200 waits for the weights (790 TFLOP/s over 4.2 TB/s, two operations a parameter
of two bytes)."""

LARGEST_SHORT_STEP = 512
"""With the decodes: so far a step is launched at once (gpu/cuda_mixed.py)."""

SHORT_STEPS = 4
"""What goes along in so many short steps does not need the prefill lane."""

LATE = 0.5
"""A prompt that has waited for this part of its target is not held back any more."""


class Chunk(NamedTuple):
    """What the next step of the prefill lane may be: so many tokens, on a share of the SMs (0: all)."""

    tokens: int
    share: int


class Decoding(NamedTuple):
    """A model with a decode step in flight: of how many sequences, of how many tokens together, and of each the time of
    its first token and how many there were since."""

    lane: Lane
    batch: int
    tokens: int
    answers: tuple[tuple[float, int], ...]


class Partition(Protocol):
    name: str
    divides: bool
    """Whether decodes and prefills have lanes of their own."""

    def add_model(self, model: str, cost_name: str) -> None: ...

    def look(self, now: float, busy: list[Lane]) -> None:
        """These models have something to do; asked before each round of launches."""
        ...

    def ride(self, lane: Lane) -> int:
        """How many tokens of prefill go along in the model's next decode step."""
        ...

    def chunk(self, now: float, lane: Lane, oldest: Sequence, decoding: Iterable[Decoding]) -> Chunk | None:
        """The next prefill of a model, beside these decodes (at least one), or None: it waits. `oldest`: the first of
        its sequences that wait for it. Not asked where no decode is in flight."""
        ...

    def decode_share(self) -> int:
        """The share of the SMs of the next decode step; 0: all."""
        ...

    def launched(self, now: float, plan: StepPlan) -> None: ...

    def landed(self, now: float, plan: StepPlan, done: StepDone | None) -> None:
        """A step has landed, or failed (None)."""
        ...


class Turns:
    """One step after the other."""

    name = "none"
    divides = False

    def add_model(self, model: str, cost_name: str) -> None:
        pass

    def look(self, now: float, busy: list[Lane]) -> None:
        pass

    def ride(self, lane: Lane) -> int:
        return 0

    def chunk(self, now: float, lane: Lane, oldest: Sequence, decoding: Iterable[Decoding]) -> Chunk | None:
        return Chunk(lane.step_tokens, 0)

    def decode_share(self) -> int:
        return 0

    def launched(self, now: float, plan: StepPlan) -> None:
        pass

    def landed(self, now: float, plan: StepPlan, done: StepDone | None) -> None:
        pass


class Streams(Turns):
    """Prefills beside decodes, without bound."""

    name = "streams"
    divides = True


class Green(Turns):
    """Prefills beside decodes, on a part of the SMs."""

    name = "green"
    divides = True

    def chunk(self, now: float, lane: Lane, oldest: Sequence, decoding: Iterable[Decoding]) -> Chunk | None:
        return Chunk(lane.step_tokens, SPLITS[0])


class Auto(Turns):
    """By the costs and the targets of each model (PATIENCE times what it takes alone where there are none)."""

    name = "auto"
    divides = True

    def __init__(self, targets: Mapping[str, Targets] | None = None, rows: Iterable[CostRow] = ()) -> None:
        self.costs = Costs(rows)
        self._targets = dict(targets or {})
        self._overlaps = Overlaps(self.costs)
        self._share = 0
        self._alone: Lane | None = None
        self._rides: dict[str, int] = {}
        self._crowded_until = 0.0
        self._delays: dict[int, float] = {}
        self._delay = 0.0

    def add_model(self, model: str, cost_name: str) -> None:
        self.costs.add_model(model, cost_name)

    def tpot_s(self, model: str) -> float:
        """Seconds between two tokens of an answer that are enough."""
        target = self._targets.get(model)
        return target.tpot_s if target is not None and target.tpot_s else PATIENCE * self.costs.decode_s(model, 1, 1)

    def ttft_s(self, model: str, tokens: int) -> float:
        """Seconds to the first token that are enough for a prompt of so many tokens."""
        target = self._targets.get(model)
        return target.ttft_s if target is not None and target.ttft_s else PATIENCE * self.costs.prefill_s(model, tokens)

    # Along with decodes ----------------------------------------------------------------------------------------------

    def look(self, now: float, busy: list[Lane]) -> None:
        if len(busy) > 1:
            self._crowded_until = now + CROWDED_S
        self._alone = busy[0] if len(busy) == 1 and now >= self._crowded_until else None
        self._rides.clear()

    def _along(self, lane: Lane) -> int:
        """Tokens of prefill with which a step still comes within the target of the answers that it delays."""
        decodes, known, backlog = 0, 0, 0
        for sequence in lane:
            if prefills(sequence):
                backlog += sequence.pending
            else:
                decodes += 1
                known += sequence.known
        most = lane.step_tokens - decodes
        if lane is not self._alone:
            most = min(most, SHORT_STEP, LARGEST_SHORT_STEP - decodes)
            if backlog > SHORT_STEPS * most:
                return 0
        if not backlog or most < min(SMALLEST_CHUNK, lane.step_tokens - decodes):
            return 0
        if not decodes:
            return most
        room = self.tpot_s(lane.model) - self.costs.decode_s(lane.model, decodes, known)
        if room < 0 and lane is not self._alone:
            return most  # they are too slow by themselves, and would be slower beside the prefill lane
        whole = self.costs.ride_s(lane.model, most)
        tokens = most if whole <= room else _cut(most * room / whole)
        return tokens if tokens >= min(SMALLEST_CHUNK, most) else 0

    def ride(self, lane: Lane) -> int:
        if lane.model not in self._rides:
            self._rides[lane.model] = self._along(lane)
        return self._rides[lane.model]

    # Beside decodes --------------------------------------------------------------------------------------------------

    def chunk(self, now: float, lane: Lane, oldest: Sequence, decoding: Iterable[Decoding]) -> Chunk | None:
        if self.ride(lane):
            return None
        self._delay = 0.0
        within: list[tuple[Decoding, float]] = []
        room = float("inf")
        for other in decoding:
            step_s = self.costs.decode_s(other.lane.model, other.batch, other.tokens)
            target_s = self.tpot_s(other.lane.model)
            if step_s <= target_s:  # an answer that is too slow by itself would gain nothing
                within.append((other, target_s))
                room = min(room, target_s / step_s)
        slow = self.costs.slow
        for share in sorted(slow, key=lambda share: slow[share].prefill):
            harsher = slow[share].decode > slow[self._share].decode
            if slow[share].decode <= room * (MARGIN if harsher else 1.0):
                self._share = share
                return Chunk(lane.step_tokens, share)
        share = self._share = min(slow, key=lambda share: slow[share].decode)
        if now - oldest.came >= LATE * self.ttft_s(lane.model, oldest.came_with):
            return Chunk(lane.step_tokens, share)
        # What the answers are ahead of their targets by may be spent on a prefill.
        ahead = [target_s * drawn - (now - began) for other, target_s in within for began, drawn in other.answers]
        whole = self._delay_s(lane, lane.step_tokens, share)
        spent = sum(self._delays.values())
        tokens = lane.step_tokens
        if ahead and min(ahead) - spent < whole:
            tokens = _cut(tokens * (min(ahead) - spent) / whole)
        if tokens < min(SMALLEST_CHUNK, lane.step_tokens):
            return None
        self._delay = whole * tokens / lane.step_tokens
        return Chunk(tokens, share)

    def _delay_s(self, lane: Lane, tokens: int, share: int) -> float:
        """By how much a chunk delays the answers that run beside it."""
        slow = self.costs.slow[share]
        return self.costs.prefill_s(lane.model, tokens) * slow.prefill * (1 - 1 / slow.decode)

    # What steps show -------------------------------------------------------------------------------------------------

    def launched(self, now: float, plan: StepPlan) -> None:
        self._overlaps.launched(now, plan)
        if plan.lane == "prefill":
            self._delays[plan.step], self._delay = self._delay, 0.0

    def landed(self, now: float, plan: StepPlan, done: StepDone | None) -> None:
        self._overlaps.landed(now, plan, done)
        self._delays.pop(plan.step, None)


def _cut(tokens: float) -> int:
    return max(0, int(tokens) // CHUNK_STEP * CHUNK_STEP)


PARTITIONS: Mapping[str, type[Turns]] = {kind.name: kind for kind in (Auto, Streams, Green, Turns)}
"""By the name that a configuration or a journal gives."""


def make_partition(name: str, targets: Mapping[str, Targets] | None = None, rows: Iterable[CostRow] = ()) -> Partition:
    """Raises ValueError for a name that is none. Targets and costs count under `auto` alone."""
    if name not in PARTITIONS:
        raise ValueError(f"partition {name!r} is unknown; there is: {', '.join(PARTITIONS)}")
    return Auto(targets, rows) if name == "auto" else PARTITIONS[name]()

"""What the lane core keeps about one request on its device, and about one model. Records with a few rules."""

from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from forebay.sched.pace import Pace
from forebay.sched.policy import PATIENCE
from forebay.sched.prefix import KeyChain
from forebay.sched.states import SEQUENCE, move
from forebay.transport.messages import BLOCK_TOKENS, LaneKind, Start


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on this device.

    `known` counts the tokens that exist or that a step in flight will have drawn by the time the next one runs;
    `computed` those whose keys and values are in blocks, or will be, `landed` those of which it is certain. `delivered`
    counts output tokens that were handed out. `in_flight` counts steps and copies that were launched and have not
    landed; the steps are all in `lane`. The first `placed` of its blocks are in the runner's table, the first
    `published` can be found by others. `cached` tokens of what it came with were found in blocks that others had
    computed. `held`: it makes room for that one, and is not launched until that one was planned anew; `leaving`: it
    makes room for one that has had less, and is launched no more until it was away. `stretch` counts the tokens that it
    has drawn since it came (back) onto the device, at `began`; `away_since` is the fairness policy's. While it is
    spilled, or on its way, `away` names the block of the arena that holds each of its blocks, None where only the text
    is known, of `saved` tokens together. `started` and `reported`: the scheduler was told of its start, everybody of
    its end. `came`: when it did."""

    number: int
    arrival: int
    start: Start
    state: str = "waiting"
    known: int = 0
    computed: int = 0
    landed: int = 0
    delivered: int = 0
    in_flight: int = 0
    blocks: list[int] = field(default_factory=list)
    placed: int = 0
    published: int = 0
    cached: int = 0
    held: "Sequence | None" = None
    leaving: bool = False
    stretch: int = 0
    away_since: int = 0
    away: list[int | None] = field(default_factory=list)
    saved: int = 0
    started: bool = False
    reported: bool = False
    lane: LaneKind = "mixed"
    came: float = 0.0
    began: float = 0.0
    keys: KeyChain = field(init=False)

    def __post_init__(self) -> None:
        self.known = len(self.start.tokens) // 4
        self.delivered = self.known - self.start.prompt_tokens
        self.keys = KeyChain(self.start.tokens)

    @property
    def model(self) -> str:
        return self.start.model

    @property
    def came_with(self) -> int:
        """Tokens that the request had when it came here."""
        return len(self.start.tokens) // 4

    @property
    def pending(self) -> int:
        """Tokens that the next steps must compute: 1 in decode, more in prefill."""
        return self.known - self.computed

    @property
    def last_known(self) -> int:
        """The value of `known` beyond which nothing may be drawn."""
        return self.start.prompt_tokens + self.start.sampling.max_tokens

    @property
    def exhausted(self) -> bool:
        """All its tokens are drawn, or in flight."""
        return self.known >= self.last_known

    def blocks_for(self, tokens: int) -> int:
        """Blocks it lacks to hold that many tokens."""
        return max(0, -(-tokens // BLOCK_TOKENS) - len(self.blocks))

    def move(self, event: str) -> None:
        self.state = move(SEQUENCE, "sequence", self.number, self.state, event)

    def __lt__(self, other: "Sequence") -> bool:
        return self.arrival < other.arrival


def prefills(sequence: Sequence) -> bool:
    """Whether it has prefill ahead of it."""
    return sequence.state != "running" or sequence.pending > 1


Blocked = Literal["", "slots", "memory"]


@dataclass(slots=True, eq=False)
class Lane:
    """One model on this device. `waiting` are those without memory, spilled ones among them, `running` those with, or
    being loaded, `going` those whose blocks are being written to the arena; the first two oldest first. `blocked`: what
    the next one waited for when it was last looked at. `launched` is the number of its latest step, 0 before the first.
    `present`: its weights are on the device; `admits`: and are to stay, so that new sequences may have memory."""

    model: str
    block_bytes: int
    max_sequences: int
    step_tokens: int
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    going: list[Sequence] = field(default_factory=list)
    launched: int = 0
    pace: Pace = field(default_factory=Pace)
    blocked: Blocked = ""
    present: bool = True
    admits: bool = True

    def wait(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence)

    def run(self, sequence: Sequence) -> None:
        insort(self.running, sequence)

    @property
    def oldest(self) -> int:
        """Arrival of its oldest sequence; call it only on a lane that has one."""
        return min(group[0].arrival for group in (self.waiting, self.running, self.going) if group)

    def due(self, now: float, among: Iterable[Sequence] | None = None) -> float | None:
        """When the first of its answers (or of those `among` them) is due that can still be in time: if it had the
        device to itself from now on. None where there is no such answer.

        An answer that may stop by itself is taken to end with its next token: so it is in time whenever it does, and
        nobody's length is guessed. What it takes is what the pace says now, not what it said when the request came: the
        first requests of a model would keep dues that were guesses."""
        first: float | None = None
        for sequence in self if among is None else among:
            if sequence.exhausted:
                continue
            start = sequence.start
            made = sequence.known - start.prompt_tokens
            whole = start.sampling.max_tokens if start.sampling.ignore_eos else made + 1
            came_with = sequence.came_with
            alone_s = self.pace.alone_s(came_with, whole - (came_with - start.prompt_tokens))
            due = sequence.came + PATIENCE * alone_s
            if now + self.pace.alone_s(sequence.pending, whole - made) <= due and (first is None or due < first):
                first = due
        return first

    def remove(self, sequence: Sequence) -> None:
        """Takes it out of the list that its state says."""
        match sequence.state:
            case "waiting" | "spilled":
                self.waiting.remove(sequence)
            case "spilling":
                self.going.remove(sequence)
            case _:
                self.running.remove(sequence)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.going
        yield from self.waiting

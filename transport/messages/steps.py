"""What a lane core and a model runner say to each other, inside one worker.

They are messages, and live here, because sched and gpu never import each other, and because a journal records them.
"""

from typing import Literal

from forebay.transport.messages.base import Message, Part
from forebay.transport.messages.common import Sampling

LaneKind = Literal["mixed", "decode", "prefill"]

BLOCK_TOKENS = 16
"""Tokens in a KV block, of whatever model."""


class OpenSequence(Message, frozen=True):
    """A sequence to be run: its known tokens (uint32, little-endian), of which `prompt_tokens` are the prompt.
    `sequence` is the lane core's own number, never used twice."""

    sequence: int
    model: str
    tokens: bytes
    prompt_tokens: int
    sampling: Sampling


class CloseSequence(Message, frozen=True):
    """No later step names this sequence."""

    sequence: int
    model: str


class Work(Part, frozen=True):
    """One sequence's share of a step: compute the tokens at positions start .. start + count - 1.

    Of the sequence's block table the first `kept` entries stay and `blocks` follow them (indices of the model's blocks
    in the pool), before anything is computed. Positions before `start` are in those blocks already, computed by this
    sequence or by another one with the same text. With `sample` the last position is that of the last token known, and
    the step draws the next one, which thereby becomes known."""

    sequence: int
    start: int
    count: int
    kept: int
    blocks: tuple[int, ...]
    sample: bool


class StepPlan(Message, frozen=True):
    """One forward pass of one model over a packed batch.

    `lane` is where it runs: steps of a lane run one after the other, in the order of their launch; lanes overlap. Each
    model has a "decode" lane, the device one "prefill" lane and one "mixed" lane (the only one where it is not
    partitioned, as on a CPU device). Prefills may go along in a step of a decode lane. A sequence is in flight in one
    lane at a time. `share`: per cent of the device's
    SMs that it may use, one of those that were made ahead (see sched/partition.py); 0: no bound."""

    step: int
    model: str
    work: tuple[Work, ...]
    lane: LaneKind = "mixed"
    share: int = 0


class StepDone(Message, frozen=True):
    """`tokens` uint32[n] and `stopped` uint8[n] for the n shares with `sample`, in the plan's order; stopped is 1
    where the token is an end-of-sequence token (and counts: not ignored, not before `min_tokens`), 2 where the
    logits were not finite (the token means nothing). `seconds` is what the step took on the device."""

    step: int
    tokens: bytes
    stopped: bytes
    seconds: float


class StepFailed(Message, frozen=True):
    """The whole step raised; its sequences are lost, the model lives on."""

    step: int
    reason: str


class CopyBlocks(Message, frozen=True):
    """Copy KV blocks of a model: "out" from the pool to the spill arena, "in" from the arena to the pool, "move" within
    the arena. Block `source[i]` goes to block `target[i]`: block b lies b times the model's block size from the base of
    its range. Answered by `CopyDone` or `CopyFailed`, in any order; until then neither end belongs to anybody else.
    `copy` is the lane core's own number, never used twice."""

    copy: int
    model: str
    kind: Literal["out", "in", "move"]
    source: tuple[int, ...]
    target: tuple[int, ...]


class CopyDone(Message, frozen=True):
    """All bytes are there, and may be read or copied on."""

    copy: int


class CopyFailed(Message, frozen=True):
    """What is at the copy's target means nothing, and what is at its source may mean nothing either."""

    copy: int
    reason: str


class EvictWeights(Message, frozen=True):
    """A model's weights give their memory up; nothing in flight needs them. Answered by `WeightsGone` or
    `WeightsFailed` (they are still there)."""

    model: str


class RestoreWeights(Message, frozen=True):
    """A model's weights come (back) onto the device. Answered by `WeightsBack` or `WeightsFailed` (they are not
    there, and hold no memory)."""

    model: str


class WeightsGone(Message, frozen=True):
    """The memory of a model's weights is free."""

    model: str


class WeightsBack(Message, frozen=True):
    """A model can take steps; bringing its weights took `seconds`."""

    model: str
    seconds: float


class WeightsFailed(Message, frozen=True):
    """Bringing a model's weights, or making room, failed; nothing changed."""

    model: str
    reason: str

"""What the scheduler and the workers tell a front door."""

from typing import Literal

from forebay.transport.messages.base import Message, Part
from forebay.transport.messages.common import FinishReason, Heartbeat
from forebay.transport.messages.lending import LendingAnswer
from forebay.transport.messages.to_worker import Refused, Rejoin, Stop

ModelState = Literal["waiting", "loading", "ready", "failed"]
"""A model over all its replicas: no worker yet, being loaded, at least one replica ready, or failed everywhere."""

WorkerState = Literal["loading", "ready", "draining", "lost"]

RejectKind = Literal["unknown_model", "context_too_long", "not_ready", "queue_full", "draining", "failed"]


class ModelStatus(Part, frozen=True):
    """`max_context` in tokens, the most of its ready replicas (0 before the first is ready). `was_ready` stays true
    once the model was ready: from then on requests queue while its workers are away. `prompt_tokens` counts what ended
    requests came with, `cached_tokens` how much of it was found in the prefix cache. `restores` counts how often its
    weights came onto a device on which models come and go, and `evictions` how often they left one;
    `restore_seconds` is what the last one took."""

    name: str
    path: str
    state: ModelState
    was_ready: bool
    max_context: int
    replicas: int
    waiting: int
    running: int
    reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    evictions: int = 0
    restores: int = 0
    restore_seconds: float = 0.0


class WorkerStatus(Part, frozen=True):
    id: str
    gpu: str
    pid: int
    state: WorkerState
    models: tuple[str, ...]
    running: int
    given: int = 0
    """Bytes of its KV pool that it has given back to the device, because another process takes the memory."""


class Opened(Message, frozen=True):
    """Answers `Open`, and all that follows belongs to that `session`, in which requests are numbered upwards from
    `first_request`."""

    version: int
    session: int
    heartbeat_s: float
    first_request: int


class Catalog(Message, frozen=True):
    """All models, sent whenever one of them changes its state. `draining`: the server takes no new requests."""

    models: tuple[ModelStatus, ...]
    draining: bool


class Rejected(Message, frozen=True):
    """A request ended without running further."""

    request: int
    epoch: int
    kind: RejectKind
    reason: str


class Interrupted(Message, frozen=True):
    """The worker of a request was lost: submit it again, with what was delivered, as epoch + 1, or abort it."""

    request: int
    epoch: int
    reason: str


class Status(Message, frozen=True):
    query: int
    models: tuple[ModelStatus, ...]
    workers: tuple[WorkerStatus, ...]


class Tokens(Message, frozen=True):
    """New tokens of one step, from a worker: three columns of equal length n, little-endian. `requests` uint64[n],
    `epochs` uint32[n], `tokens` uint32[n]. A frame whose epoch is not the current one is dropped."""

    requests: bytes
    epochs: bytes
    tokens: bytes


class Finished(Message, frozen=True):
    """A request's last word, after its last tokens. `detail` explains a failure; `cached` counts its prompt's tokens
    that were found in the prefix cache."""

    request: int
    epoch: int
    reason: FinishReason
    detail: str = ""
    cached: int = 0


ToFrontDoor = (
    Opened
    | Refused
    | Rejoin
    | Catalog
    | Rejected
    | Interrupted
    | Status
    | Tokens
    | Finished
    | Stop
    | Heartbeat
    | LendingAnswer
)

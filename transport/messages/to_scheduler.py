"""What workers, front doors and the parties to a loan tell the scheduler."""

from forebay.transport.messages.base import Message
from forebay.transport.messages.common import FinishReason, Heartbeat, Sampling
from forebay.transport.messages.lending import FromParty, LendingWish


class Join(Message, frozen=True):
    """A worker's first message, again after every `Rejoin`: it has dropped all its requests. `session` counts these."""

    version: int
    session: int
    gpu: str
    pid: int
    host: str


class ModelReady(Message, frozen=True):
    """`max_context` in tokens: what fits the model and the worker's pool. `blocks` of `block_bytes` are the most that
    the model could ever hold."""

    model: str
    max_context: int
    blocks: int
    block_bytes: int


class ModelFailed(Message, frozen=True):
    model: str
    reason: str


class Started(Message, frozen=True):
    """The first step of a request was launched."""

    request: int
    epoch: int


class Ended(Message, frozen=True):
    """A request ended on this worker. `generated` counts the tokens delivered in this epoch, `cached` those of what it
    came with that were found in the prefix cache."""

    request: int
    epoch: int
    reason: FinishReason
    generated: int
    cached: int = 0


class WeightsMoved(Message, frozen=True):
    """A model's weights came onto a worker's device (`resident`), which took `seconds`, or left it: there they come and
    go (`weights_memory`)."""

    model: str
    resident: bool
    seconds: float


class PoolResized(Message, frozen=True):
    """The worker's KV pool has so many bytes now; `given` bytes of it are the device's, because another process takes
    its memory."""

    size: int
    given: int


class Leave(Message, frozen=True):
    """A worker goes: whatever it still holds is interrupted."""

    reason: str


class Open(Message, frozen=True):
    """A front door's first message, again after every `Rejoin`. `sink` is the endpoint at which it collects tokens from
    workers, `url` where people reach it."""

    version: int
    session: int
    pid: int
    sink: str
    url: str


class Submit(Message, frozen=True):
    """A request, or after a loss the same one again under the next epoch.

    `tokens` holds little-endian uint32: the prompt, then what was already delivered. The first `prompt_tokens` of
    them are the prompt. `tenant`: on whose account it runs, where that matters (fairness `vtc`)."""

    request: int
    epoch: int
    model: str
    tokens: bytes
    prompt_tokens: int
    sampling: Sampling
    tenant: str = ""


class Abort(Message, frozen=True):
    """The client is gone, or has all it wants (a stop string was found)."""

    request: int


class Concluded(Message, frozen=True):
    """The front door has a request's last word. Until it says so, the loss of the worker counts as the loss of the
    request: what the worker sent last may have died with it."""

    request: int


class Query(Message, frozen=True):
    """Asks for a `Status`; `query` comes back in it."""

    query: int


ServingToScheduler = (
    Join
    | ModelReady
    | ModelFailed
    | Started
    | Ended
    | WeightsMoved
    | PoolResized
    | Leave
    | Open
    | Submit
    | Abort
    | Concluded
    | Query
    | Heartbeat
)
"""What the central core hears."""

ToScheduler = ServingToScheduler | FromParty | LendingWish

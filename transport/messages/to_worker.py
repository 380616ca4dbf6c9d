"""What the scheduler tells a worker."""

from forebay.transport.messages.base import Message
from forebay.transport.messages.common import DeviceSettings, Heartbeat, ModelSpec, Sampling


class Welcome(Message, frozen=True):
    """Answers `Join`, and all that follows belongs to that `session`. `settings` is None where the configuration does
    not name this device: nothing to load."""

    version: int
    session: int
    heartbeat_s: float
    settings: DeviceSettings | None


class Refused(Message, frozen=True):
    """Answers `Join` or `Open`: you cannot take part, and trying again will not help."""

    reason: str


class Rejoin(Message, frozen=True):
    """The scheduler does not know this peer (either was away): drop all requests and join anew."""

    reason: str


class Load(Message, frozen=True):
    model: ModelSpec


class Start(Message, frozen=True):
    """Run a request. `tokens`, `prompt_tokens` and `tenant` as in `Submit`; tokens go to `sink`."""

    request: int
    epoch: int
    model: str
    tokens: bytes
    prompt_tokens: int
    sampling: Sampling
    sink: str
    tenant: str = ""


class Cancel(Message, frozen=True):
    """End a request now. The worker answers `Ended` if it had not ended by itself."""

    request: int
    epoch: int


class Stop(Message, frozen=True):
    """End the process in good order."""

    reason: str


ToWorker = Welcome | Refused | Rejoin | Load | Start | Cancel | Stop | Heartbeat

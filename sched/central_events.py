"""What enters the central core and what it answers. The core itself is in central.py."""

from collections.abc import Mapping

import msgspec

from forebay.transport.messages import DeviceSettings, Message, ModelSpec, ToFrontDoor, ToScheduler, ToWorker


class Placement(msgspec.Struct, frozen=True):
    """A model and the devices that hold a replica of it."""

    spec: ModelSpec
    gpus: tuple[str, ...]


class CentralSettings(msgspec.Struct, frozen=True):
    """`queue_bound`: requests of one model that may wait in the scheduler. A peer silent for `silence_s` is lost."""

    models: tuple[Placement, ...] = ()
    devices: Mapping[str, DeviceSettings] = msgspec.field(default_factory=dict)
    queue_bound: int = 256
    heartbeat_s: float = 1.0
    silence_s: float = 10.0


class Received(Message, frozen=True):
    peer: str
    message: ToScheduler


class PeerGone(Message, frozen=True):
    """The process behind a peer has ended."""

    peer: str
    reason: str


class Tick(Message, frozen=True):
    """Time has passed."""


class Drain(Message, frozen=True):
    """Take no new requests; say `Drained` once the last one has ended."""


CentralEvent = Received | PeerGone | Tick | Drain


class Send(Message, frozen=True):
    peer: str
    message: ToWorker | ToFrontDoor


class Dismiss(Message, frozen=True):
    """The peer counts as lost: end its process if we started it."""

    peer: str
    reason: str


class Drained(Message, frozen=True):
    """No request is left."""


CentralCommand = Send | Dismiss | Drained

"""Messages to bytes and back: a frame is a msgpack array of messages, all that one turn of an event loop had to say."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from forebay.transport.messages import PROTOCOL_VERSION, Message, ToFrontDoor, ToPartyLink, ToScheduler, ToWorker

Incoming = TypeVar("Incoming")

_encoder = msgspec.msgpack.Encoder()


class UnreadableFrame(Exception):
    """Bytes that are no frame of this protocol; says what did not fit."""


def encode(messages: Sequence[Message]) -> bytes:
    """One frame. Any msgpack library reads it."""
    return _encoder.encode(messages)


class Reader(Generic[Incoming]):
    """Decodes frames whose messages all belong to one union."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[list[Incoming]] = msgspec.msgpack.Decoder(list[union])

    def __call__(self, frame: bytes) -> list[Incoming]:
        """Raises UnreadableFrame; then no message of the frame counts."""
        try:
            return self._decoder.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UnreadableFrame(
                f"{len(frame)} bytes are no frame of protocol {PROTOCOL_VERSION}: {error}; "
                "do both sides run the same version of forebay?"
            ) from error


class Receiver(Generic[Incoming]):
    """What a channel does with each frame: decode it and hand the messages over, or report what was wrong with it."""

    def __init__(
        self,
        read: Reader[Incoming],
        on_messages: Callable[[str, list[Incoming]], None],
        on_unreadable: Callable[[str, Exception], None],
    ) -> None:
        self._read = read
        self._on_messages = on_messages
        self._on_unreadable = on_unreadable

    def __call__(self, peer: str, frame: bytes) -> None:
        try:
            messages = self._read(frame)
        except UnreadableFrame as error:
            self._on_unreadable(peer, error)
            return
        self._on_messages(peer, messages)


def read_to_scheduler() -> Reader[ToScheduler]:
    return Reader(ToScheduler)


def read_to_worker() -> Reader[ToWorker]:
    return Reader(ToWorker)


def read_to_front_door() -> Reader[ToFrontDoor]:
    return Reader(ToFrontDoor)


def read_to_party() -> Reader[ToPartyLink]:
    return Reader(ToPartyLink)

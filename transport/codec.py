"""Messages to bytes and back: a frame is a msgpack array of messages, all that one turn of an event loop had to say."""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from forebay.transport.messages import PROTOCOL_VERSION, Message, ToFrontDoor, ToScheduler, ToWorker

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


def read_to_scheduler() -> Reader[ToScheduler]:
    return Reader(ToScheduler)


def read_to_worker() -> Reader[ToWorker]:
    return Reader(ToWorker)


def read_to_front_door() -> Reader[ToFrontDoor]:
    return Reader(ToFrontDoor)

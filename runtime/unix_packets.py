"""What both ends of the handover need of Unix sockets: who is at the other end, and waiting in an event loop."""

import asyncio
import errno
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

AGAIN_S = 0.01
"""Pause before something is tried again that has no event of its own."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Peer:
    """The other end of a connection, as the kernel knows it."""

    pid: int
    uid: int


def peer_of(connection: socket.socket) -> Peer:
    """SO_PEERCRED: who was at the other end when it connected (or listened)."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return Peer(pid, uid)


def when_ready(connection: socket.socket, attempt: Callable[[], Result]) -> Awaitable[Result]:
    """Tries until the kernel no longer says that it would block, waiting for the connection in between. Too many
    descriptors in flight (ETOOMANYREFS) is a matter of time, too."""

    async def until_done() -> Result:
        loop = asyncio.get_running_loop()
        while True:
            try:
                return attempt()
            except BlockingIOError:
                pass
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    raise
                await asyncio.sleep(AGAIN_S)
                continue
            ready = loop.create_future()
            wake = _setter(ready)
            loop.add_reader(connection.fileno(), wake)
            try:
                await asyncio.wait([ready], timeout=AGAIN_S * 5)  # a full send buffer has no event of its own here
            finally:
                loop.remove_reader(connection.fileno())

    return until_done()


def _setter(ready: "asyncio.Future[None]") -> Callable[[], None]:
    return lambda: None if ready.done() else ready.set_result(None)

"""What a channel is, whatever carries it. Four kinds: a hub talks with many links, a sink hears many feeds.

All of them belong to one event loop. `send` never blocks and never fails: what is sent in one turn of the loop goes out
together, in order, at its end. What arrives is handed over as a list, one call a frame, to the callback that the
channel was made with. Closing is idempotent; what was sent before is still delivered where the other side lives.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

from forebay.transport.messages import Message

Out = TypeVar("Out", bound=Message, contravariant=True)
In = TypeVar("In")

FromPeer = Callable[[str, list[In]], None]
"""(peer, messages of one frame)"""

FromSource = Callable[[list[In]], None]

Unreadable = Callable[[str, Exception], None]
"""(peer, what was wrong): a frame that could not be decoded. The channel itself goes on."""


class Hub(Protocol[Out]):
    """Talks with many links, each known by the name it chose. A message to a peer that is not there is dropped."""

    def send(self, peer: str, message: Out) -> None: ...

    def close(self) -> None: ...


class Link(Protocol[Out]):
    """Talks with one hub, which may come later or come back: what was sent meanwhile waits."""

    def send(self, message: Out) -> None: ...

    def close(self) -> None: ...


class Feed(Protocol[Out]):
    """One way, to a sink."""

    def send(self, message: Out) -> None: ...

    def close(self) -> None: ...


class Sink(Protocol):
    """One way, from many feeds, which it does not tell apart."""

    def close(self) -> None: ...

"""Channels inside one process, with the same codec: what passes here would pass a socket too."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from forebay.transport.channel import FromPeer, FromSource, Unreadable
from forebay.transport.codec import Reader, Receiver, encode
from forebay.transport.messages import Message

Out = TypeVar("Out", bound=Message)
In = TypeVar("In")


class _Outbox:
    """What one turn of the loop has to say to one receiver."""

    def __init__(self, deliver: Callable[[bytes], None]) -> None:
        self._deliver = deliver
        self._messages: list[Message] = []

    def send(self, message: Message) -> None:
        if not self._messages:
            asyncio.get_running_loop().call_soon(self.flush)
        self._messages.append(message)

    def flush(self) -> None:
        if self._messages:
            messages, self._messages = self._messages, []
            frame = encode(messages)
            asyncio.get_running_loop().call_soon(self._deliver, frame)


class LocalNetwork:
    """Endpoints by name, as ZeroMQ has them by address: links and feeds may come before their hub or sink, and what
    they send waits for it."""

    def __init__(self) -> None:
        self._receivers: dict[str, Callable[[str, bytes], None]] = {}
        self._links: dict[str, Callable[[bytes], None]] = {}
        self._waiting: dict[str, list[tuple[str, bytes]]] = {}

    def listen(self, endpoint: str, receive: Callable[[str, bytes], None]) -> None:
        if endpoint in self._receivers:
            raise OSError(f"somebody listens at {endpoint} already")
        self._receivers[endpoint] = receive
        for peer, frame in self._waiting.pop(endpoint, []):
            receive(peer, frame)

    def unlisten(self, endpoint: str) -> None:
        self._receivers.pop(endpoint, None)

    def to_endpoint(self, endpoint: str, peer: str, frame: bytes) -> None:
        receive = self._receivers.get(endpoint)
        if receive is None:
            self._waiting.setdefault(endpoint, []).append((peer, frame))
        else:
            receive(peer, frame)

    def attach(self, name: str, receive: Callable[[bytes], None]) -> None:
        self._links[name] = receive

    def detach(self, name: str) -> None:
        self._links.pop(name, None)

    def to_link(self, name: str, frame: bytes) -> None:
        if (receive := self._links.get(name)) is not None:
            receive(frame)


class LocalHub(Generic[Out, In]):
    def __init__(
        self,
        network: LocalNetwork,
        endpoint: str,
        read: Reader[In],
        on_messages: FromPeer[In],
        on_unreadable: Unreadable,
    ) -> None:
        self.endpoint = endpoint
        self._network = network
        self._outboxes: dict[str, _Outbox] = {}
        self._closed = False
        network.listen(endpoint, Receiver(read, on_messages, on_unreadable))

    def send(self, peer: str, message: Out) -> None:
        if self._closed:
            return
        outbox = self._outboxes.get(peer)
        if outbox is None:
            outbox = self._outboxes[peer] = _Outbox(lambda frame: self._network.to_link(peer, frame))
        outbox.send(message)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._network.unlisten(self.endpoint)
            for outbox in self._outboxes.values():
                outbox.flush()


class LocalLink(Generic[Out, In]):
    def __init__(
        self,
        network: LocalNetwork,
        endpoint: str,
        name: str,
        read: Reader[In],
        on_messages: FromSource[In],
        on_unreadable: Unreadable,
    ) -> None:
        self._network, self._name = network, name
        self._outbox = _Outbox(lambda frame: network.to_endpoint(endpoint, name, frame))
        self._closed = False
        receive = Receiver(read, lambda peer, messages: on_messages(messages), on_unreadable)
        network.attach(name, lambda frame: receive("hub", frame))

    def send(self, message: Out) -> None:
        if not self._closed:
            self._outbox.send(message)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._network.detach(self._name)
            self._outbox.flush()


class LocalSink(Generic[In]):
    def __init__(
        self,
        network: LocalNetwork,
        endpoint: str,
        read: Reader[In],
        on_messages: FromSource[In],
        on_unreadable: Unreadable,
    ) -> None:
        self.endpoint = endpoint
        self._network = network
        receive = Receiver(read, lambda peer, messages: on_messages(messages), on_unreadable)
        network.listen(endpoint, lambda peer, frame: receive("feed", frame))

    def close(self) -> None:
        self._network.unlisten(self.endpoint)


class LocalFeed(Generic[Out]):
    def __init__(self, network: LocalNetwork, endpoint: str) -> None:
        self._outbox = _Outbox(lambda frame: network.to_endpoint(endpoint, "", frame))
        self._closed = False

    def send(self, message: Out) -> None:
        if not self._closed:
            self._outbox.send(message)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._outbox.flush()

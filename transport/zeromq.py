"""Channels over ZeroMQ sockets, driven straight from the event loop's file-descriptor events.

pyzmq's own asyncio sockets make a future for each receive; here a readable descriptor drains the socket and calls back.
"""

import asyncio
import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Generic, TypeVar

import zmq

from forebay.transport.addresses import RefusedAddress, check_endpoint, check_socket_path, is_answered
from forebay.transport.channel import FromPeer, FromSource, Unreadable
from forebay.transport.codec import Reader, Receiver, encode
from forebay.transport.messages import Message

Out = TypeVar("Out", bound=Message)
In = TypeVar("In")

FRAMES_A_TURN = 32
"""Frames read before other callbacks of the loop get their turn."""

MESSAGES_A_FRAME = 64
"""Messages that travel in one frame; more make more frames, so that one peer's burst does not hold up the others."""

LINGER_MS = 1000
"""How long a closed socket goes on delivering what was sent before."""


class AddressInUse(OSError):
    """Another process listens there."""


class _Socket:
    """A ZeroMQ socket on an event loop: reads when readable, writes what piled up at the end of a turn."""

    def __init__(self, kind: int, on_frames: Callable[[list[bytes]], None] | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_frames = on_frames
        self._flush_scheduled = False
        self._pump_scheduled = False
        self._closed = False
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        # Bounded by what our protocols have in flight and by heartbeats; a silent drop would cost a request.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._descriptor: int = self._socket.getsockopt(zmq.FD)

    def _listen(self) -> None:
        self._loop.add_reader(self._descriptor, self._pump)
        self._loop.call_soon(self._pump)

    def _schedule_pump(self) -> None:
        # Never twice: each flush reads on, too, and under load their number would grow from turn to turn.
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self._pump_on)

    def _pump_on(self) -> None:
        self._pump_scheduled = False
        self._pump()

    def _pump(self) -> None:
        """The descriptor only tells of changes, so the socket is read until it is empty, and again after sending."""
        for _ in range(FRAMES_A_TURN):
            if self._closed:
                return
            try:
                frames = self._read()
            except zmq.Again:
                return
            if self._on_frames is not None:
                self._on_frames(frames)
        self._schedule_pump()

    def _read(self) -> list[bytes]:
        """Raises zmq.Again when there is nothing."""
        return self._socket.recv_multipart(zmq.NOBLOCK)

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled and not self._closed:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self._closed:
            return
        self._write()
        if not self._pump_scheduled:
            self._pump()

    def _write(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        if self._closed:
            return
        self._write()
        self._closed = True
        self._loop.remove_reader(self._descriptor)
        self._socket.close()


class _Bound:
    """A lock beside a listening Unix socket: ZeroMQ would take over the address of a living process without a word.
    Socket and lock go when it is closed; what a killed process left of both is taken over."""

    def __init__(self, socket: "zmq.Socket[bytes]", endpoint: str, mode: int = 0o600) -> None:
        self._made: list[Path] = []
        self._lock: int | None = None
        check_endpoint(endpoint)
        path = Path(endpoint.removeprefix("ipc://")) if endpoint.startswith("ipc://") else None
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            if path is not None:
                check_socket_path(path)
                self._take_lock(path.with_name(f"{path.name}.lock"), endpoint)
                if is_answered(path):
                    raise AddressInUse(f"another program listens at {endpoint}; stop it, or use another endpoint")
            try:
                socket.bind(endpoint)
            except zmq.ZMQError as error:
                raise AddressInUse(f"cannot listen at {endpoint}: {error.strerror or error}") from error
            if path is not None:
                self._made.insert(0, path)
                path.chmod(mode)
            undo.pop_all()
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _take_lock(self, path: Path, endpoint: str) -> None:
        while self._lock is None:
            try:
                lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
            except OSError as error:
                raise RefusedAddress(f"{endpoint} is refused: {path} cannot be made: {error.strerror}") from error
            with contextlib.ExitStack() as undo:
                undo.callback(os.close, lock)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise AddressInUse(
                        f"another process listens at {endpoint}; stop it, or use another endpoint"
                    ) from None
                status = os.fstat(lock)
                if not stat.S_ISREG(status.st_mode) or status.st_size:
                    raise RefusedAddress(f"{endpoint} is refused: {path} is no lock of ours; move it away")
                # Whoever held it may have removed it between our opening and our locking.
                if status.st_nlink:
                    undo.pop_all()
                    self._lock = lock
                    self._made.append(path)

    def close(self) -> None:
        for path in self._made:
            path.unlink(missing_ok=True)
        self._made.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class ZmqHub(_Socket, Generic[Out, In]):
    """A hub that listens at `endpoint` (tcp port `*`: any free one; then read `.endpoint`). At a Unix socket the
    processes of `uids` may connect beside this user's; while their messages are handed over, `foreign` is true, by the
    kernel's word. Raises RefusedAddress, AddressInUse."""

    def __init__(
        self,
        endpoint: str,
        read: Reader[In],
        on_messages: FromPeer[In],
        on_unreadable: Unreadable,
        uids: Collection[int] = (),
    ) -> None:
        self._receive = Receiver(read, on_messages, on_unreadable)
        super().__init__(
            zmq.ROUTER,
            lambda frames: self._receive(frames[0].decode(errors="backslashreplace"), frames[-1]),
        )
        self._out: dict[str, list[Message]] = {}
        self.foreign = False
        self._watched = bool(set(uids) - {os.getuid()})
        # A peer that reconnects under its name takes the place of its own dead connection. Among several users nobody
        # takes anybody's place: the kernel closes what is dead.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, int(not self._watched))
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if endpoint.startswith("ipc://"):
            for uid in {os.getuid(), *uids}:
                self._socket.setsockopt(zmq.IPC_FILTER_UID, uid)
        try:
            self._bound = _Bound(self._socket, endpoint, 0o666 if self._watched else 0o600)
        except BaseException:
            self._socket.close(linger=0)
            raise
        self.endpoint = self._bound.endpoint
        self._listen()

    def _read(self) -> list[bytes]:
        if not self._watched:
            return super()._read()
        frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        # libzmq writes what the kernel says of a Unix socket's other end: "localhost:UID:GID:PID".
        address = str(frames[-1].get("Peer-Address")).split(":")
        self.foreign = address[1:2] != [str(os.getuid())]
        return [frame.bytes for frame in frames]

    def send(self, peer: str, message: Out) -> None:
        self._out.setdefault(peer, []).append(message)
        self._schedule_flush()

    def _write(self) -> None:
        out, self._out = self._out, {}
        for peer, messages in out.items():
            name = peer.encode()
            try:
                for frame in _frames(messages):
                    self._socket.send_multipart([name, frame], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:  # gone: its heartbeats, or their absence, will say so
                    raise

    def close(self) -> None:
        super().close()
        self._bound.close()


class ZmqLink(_Socket, Generic[Out, In]):
    """A link named `name` to the hub at `endpoint`, which need not be there yet; reconnects by itself."""

    def __init__(
        self, endpoint: str, name: str, read: Reader[In], on_messages: FromSource[In], on_unreadable: Unreadable
    ) -> None:
        receive = Receiver(read, lambda peer, messages: on_messages(messages), on_unreadable)
        super().__init__(zmq.DEALER, lambda frames: receive("hub", frames[-1]))
        self._out: list[Message] = []
        self._socket.setsockopt(zmq.ROUTING_ID, name.encode())
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        _connect(self._socket, endpoint)
        self._listen()

    def send(self, message: Out) -> None:
        self._out.append(message)
        self._schedule_flush()

    def _write(self) -> None:
        if self._out:
            out, self._out = self._out, []
            for frame in _frames(out):
                self._socket.send(frame, zmq.NOBLOCK)


class ZmqSink(_Socket, Generic[In]):
    """A sink that listens at `endpoint`. Raises RefusedAddress, AddressInUse."""

    def __init__(self, endpoint: str, read: Reader[In], on_messages: FromSource[In], on_unreadable: Unreadable) -> None:
        receive = Receiver(read, lambda peer, messages: on_messages(messages), on_unreadable)
        super().__init__(zmq.PULL, lambda frames: receive("feed", frames[-1]))
        try:
            self._bound = _Bound(self._socket, endpoint)
        except BaseException:
            self._socket.close(linger=0)
            raise
        self.endpoint = self._bound.endpoint
        self._listen()

    def _write(self) -> None:
        pass

    def close(self) -> None:
        super().close()
        self._bound.close()


class ZmqFeed(_Socket, Generic[Out]):
    """A feed to the sink at `endpoint`, which need not be there yet."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(zmq.PUSH, None)
        self._out: list[Message] = []
        _connect(self._socket, endpoint)

    def send(self, message: Out) -> None:
        self._out.append(message)
        self._schedule_flush()

    def _pump(self) -> None:
        pass

    def _write(self) -> None:
        if self._out:
            out, self._out = self._out, []
            for frame in _frames(out):
                self._socket.send(frame, zmq.NOBLOCK)


def _frames(messages: list[Message]) -> Iterator[bytes]:
    if len(messages) <= MESSAGES_A_FRAME:
        yield encode(messages)
        return
    for first in range(0, len(messages), MESSAGES_A_FRAME):
        yield encode(messages[first : first + MESSAGES_A_FRAME])


def _connect(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ValueError(
            f"{endpoint!r} is no endpoint to connect to (ipc:///PATH, tcp://HOST:PORT): {error}"
        ) from error

"""How descriptors change hands: at a Unix socket of the lender, out of the scheduler's sight.

Packets, not a stream (SOCK_SEQPACKET). The lender looks at the kernel's word for who is calling before it reads
anything, then at the lease's secret, and only then sends descriptors. Every connection is bounded: in time, in bytes
(one small packet is read), and there are only so many at once.
"""

import asyncio
import contextlib
import hmac
import os
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import msgspec

from forebay.runtime.unix_packets import AGAIN_S, peer_of, when_ready
from forebay.transport.addresses import check_endpoint, check_socket_path, is_answered
from forebay.transport.messages.handover import (
    LONGEST_ASK,
    MOST_DESCRIPTORS,
    Ask,
    Denied,
    FromBorrower,
    Handed,
)

MOST_CALLERS = 64
"""Connections that are served at once; further ones are turned away and may try again."""

UNKNOWN_WAIT_S = 1.0
"""How long a caller waits for the scheduler's word about its lease, which may arrive after the caller itself."""

ASK_S = 1.0
"""How long a caller may take to say what it wants."""

HAND_S = 5.0
"""How long a caller may take to fetch what it asked for."""

SOCKET_PREFIX = "lend-"

_encode = msgspec.msgpack.Encoder().encode
_read_ask = msgspec.msgpack.Decoder(FromBorrower).decode


@dataclass
class Admission:
    """What the holder of a lease's secret may fetch: descriptors by slab number. `uids`: who has."""

    epoch: int
    token: str
    descriptors: dict[int, int]
    uids: set[int]


def socket_path(folder: Path) -> Path:
    """A free path for a lender's socket. What killed lenders left in the folder is removed."""
    for stale in folder.glob(f"{SOCKET_PREFIX}*.sock"):
        if not is_answered(stale):
            stale.unlink(missing_ok=True)
    return folder / f"{SOCKET_PREFIX}{os.getpid()}-{os.urandom(4).hex()}.sock"


class HandoverServer:
    """Listens at `path` in the running loop. Only processes of `uids` get anything; the socket has `mode`. Raises
    RefusedAddress, OSError."""

    def __init__(self, path: Path, mode: int, uids: Collection[int], report: Callable[[str], None]) -> None:
        self.path = path
        self._uids = frozenset(uids)
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._admissions: dict[int, Admission] = {}
        self._news = asyncio.Event()
        self._callers: set[asyncio.Task[None]] = set()
        check_endpoint(f"ipc://{path}")
        check_socket_path(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            # The mode is that of the moment of binding: nobody slips in between bind and chmod.
            before = os.umask(0o777 & ~mode)
            try:
                self._socket.bind(str(path))
            finally:
                os.umask(before)
            self._socket.listen(MOST_CALLERS)
        except BaseException:
            self._socket.close()
            raise
        self._loop.add_reader(self._socket.fileno(), self._accept)

    @property
    def endpoint(self) -> str:
        return str(self.path)

    def admit(self, lease: int, epoch: int, token: str, descriptors: dict[int, int]) -> None:
        """From now on whoever shows the token gets these descriptors (by slab number), which stay the caller's."""
        known = self._admissions.get(lease)
        self._admissions[lease] = Admission(epoch, token, descriptors, known.uids if known else set())
        news, self._news = self._news, asyncio.Event()
        news.set()

    def withdraw(self, lease: int, slabs: Collection[int]) -> None:
        """These slabs are not handed over any more."""
        admission = self._admissions.get(lease)
        if admission is not None:
            for slab in slabs:
                admission.descriptors.pop(slab, None)
            if not admission.descriptors:
                del self._admissions[lease]

    def fetched_by(self, lease: int) -> frozenset[int]:
        """The users whose processes have fetched the lease; ask before the last slab is withdrawn."""
        admission = self._admissions.get(lease)
        return frozenset() if admission is None else frozenset(admission.uids)

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # Out of descriptors: the caller stays in the queue, and we look again when others may have been closed.
            self._report(f"cannot accept a caller: {error.strerror}")
            self._loop.remove_reader(self._socket.fileno())
            self._loop.call_later(AGAIN_S * 10, self._listen_again)
            return
        connection.setblocking(False)
        if len(self._callers) >= MOST_CALLERS:
            with connection, contextlib.suppress(OSError):
                connection.send(_encode(Denied(f"{MOST_CALLERS} callers are being served", again=True)))
            return
        task = self._loop.create_task(self._serve(connection))
        self._callers.add(task)
        task.add_done_callback(self._callers.discard)

    def _listen_again(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket.fileno(), self._accept)

    async def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                await self._answer(connection)
            except (TimeoutError, OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
                self._report(f"a caller at {self.path} got nothing: {str(error) or 'it was silent for too long'}")

    async def _answer(self, connection: socket.socket) -> None:
        peer = peer_of(connection)
        if peer.uid not in self._uids:
            allowed = ", ".join(map(str, sorted(self._uids)))
            self._deny(connection, f"user {peer.uid} may not borrow here (allowed: {allowed})")
            # Closing with something unread would tell the caller of a broken connection instead of the reason.
            async with asyncio.timeout(ASK_S):
                await when_ready(connection, lambda: connection.recv(LONGEST_ASK))
            return None
        async with asyncio.timeout(ASK_S):
            packet = await when_ready(connection, lambda: connection.recv(LONGEST_ASK + 1))
        if not packet:
            return  # a look whether anybody listens
        if len(packet) > LONGEST_ASK:
            return self._deny(connection, f"the packet has more than {LONGEST_ASK} bytes")
        ask = _read_ask(packet)
        admission = await self._admission(ask)
        # The comparison takes the same time whether there is such a lease or not, and wherever the secrets differ.
        expected = ("\0", -1) if admission is None else (admission.token, admission.epoch)
        same = hmac.compare_digest(expected[0].encode(), ask.token.encode())
        if admission is None or not same or expected[1] != ask.epoch:
            return self._deny(connection, f"lease {ask.lease} of epoch {ask.epoch} is not known here with that token")
        admission.uids.add(peer.uid)
        slabs = list(admission.descriptors.items())
        async with asyncio.timeout(HAND_S):
            for first in range(0, len(slabs), MOST_DESCRIPTORS):
                some = slabs[first : first + MOST_DESCRIPTORS]
                if any(admission.descriptors.get(number) != descriptor for number, descriptor in some):
                    return self._deny(connection, f"lease {ask.lease} came back while it was handed over")
                header = _encode(Handed(tuple(number for number, _ in some), len(slabs) - first - len(some)))
                await when_ready(connection, _sending(connection, header, [descriptor for _, descriptor in some]))

    async def _admission(self, ask: Ask) -> Admission | None:
        """What the ledger said about the lease, waiting a moment for it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UNKNOWN_WAIT_S):
                while ask.lease not in self._admissions:
                    await self._news.wait()
        return self._admissions.get(ask.lease)

    def _deny(self, connection: socket.socket, reason: str) -> None:
        self._report(f"a caller at {self.path} was refused: {reason}")
        with contextlib.suppress(OSError):
            connection.send(_encode(Denied(reason)))

    def close(self) -> None:
        """Nobody new is let in, and the socket is removed. Closing twice is fine."""
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self.path.unlink(missing_ok=True)
        self._admissions.clear()
        for task in self._callers:
            task.cancel()

    async def aclose(self) -> None:
        """The same, and waits until everybody is gone."""
        self.close()
        await asyncio.gather(*self._callers, return_exceptions=True)


def _sending(connection: socket.socket, header: bytes, descriptors: list[int]) -> Callable[[], int]:
    return lambda: socket.send_fds(connection, [header], descriptors)

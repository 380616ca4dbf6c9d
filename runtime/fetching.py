"""A borrower's side of the handover (handover.py): asks a lender for the descriptors of a lease."""

import asyncio
import contextlib
import errno
import os
import socket
from array import array
from collections.abc import Callable, Collection

import msgspec

from forebay.runtime.lending_errors import HandoverFailed
from forebay.runtime.unix_packets import AGAIN_S, peer_of, when_ready
from forebay.transport.messages.handover import MOST_DESCRIPTORS, Ask, Denied, FromLender, Handed

LONGEST_ANSWER = 16384
"""Bytes of a packet from the lender: the numbers of at most 253 slabs, or a reason."""

_encode = msgspec.msgpack.Encoder().encode
_read_answer: Callable[[bytes], FromLender] = msgspec.msgpack.Decoder(FromLender).decode


async def fetch(path: str, ask: Ask, uids: Collection[int], timeout_s: float) -> dict[int, int]:
    """The descriptors of a lease, by slab number; from now on the caller's to close. The lender must run as one of
    `uids`. Raises HandoverFailed, also after `timeout_s`."""
    got: dict[int, int] = {}
    with contextlib.ExitStack() as undo:
        undo.callback(_close_all, got)
        try:
            async with asyncio.timeout(timeout_s):
                while await _ask_once(path, ask, uids, got):  # noqa: ASYNC110 (the lender is another process)
                    await asyncio.sleep(AGAIN_S)
        except TimeoutError:
            raise HandoverFailed(f"the lender at {path} did not hand over anything within {timeout_s:g} s") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise HandoverFailed(f"the lender at {path} does not speak the protocol: {error}") from error
        except OSError as error:
            ours = error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
            raise HandoverFailed(
                f"the lender at {path} cannot be asked: {error.strerror or error}", not ours
            ) from error
        undo.pop_all()
    return got


def _close_all(got: dict[int, int]) -> None:
    for descriptor in got.values():
        os.close(descriptor)


async def _ask_once(path: str, ask: Ask, uids: Collection[int], got: dict[int, int]) -> bool:
    """Puts what it is handed into `got`. True: the lender is busy."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as connection:
        try:
            connection.connect(path)
        except BlockingIOError:
            return True  # more callers wait there than its queue holds
        lender = peer_of(connection)
        if lender.uid not in uids:
            raise HandoverFailed(f"the lender at {path} runs as user {lender.uid}; allowed: {sorted(uids)}")
        with contextlib.suppress(BrokenPipeError):  # it may have answered already
            connection.send(_encode(ask))
        while True:
            try:
                answer = await when_ready(connection, lambda: _receive(connection, got))
            except ConnectionResetError:
                if got:
                    raise
                return True  # it closed before it read what we want: too busy, or dying
            if isinstance(answer, Denied):
                if answer.again and not got:
                    return True
                raise HandoverFailed(f"the lender at {path} refused: {answer.reason}")
            if not answer.left:
                return False


def _receive(connection: socket.socket, got: dict[int, int]) -> FromLender:
    # socket.recv_fds drops its flags (CPython 3.11), and children would inherit what it receives.
    descriptors = array("i")
    data, ancillary, flags, _ = connection.recvmsg(
        LONGEST_ANSWER, socket.CMSG_LEN(MOST_DESCRIPTORS * descriptors.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    with contextlib.ExitStack() as undo:
        for descriptor in descriptors:
            undo.callback(os.close, descriptor)
        if flags & socket.MSG_CTRUNC:
            raise HandoverFailed("this process has no room for more open files (ulimit -n)", lender_fault=False)
        if not data:
            raise HandoverFailed("the lender hung up")
        if flags & socket.MSG_TRUNC:
            raise HandoverFailed(f"the lender sent a packet of more than {LONGEST_ANSWER} bytes")
        answer = _read_answer(data)
        numbers = answer.slabs if isinstance(answer, Handed) else ()
        fresh = set(numbers) - got.keys()
        if len(numbers) != len(descriptors) or len(fresh) != len(numbers) or (isinstance(answer, Handed) and not fresh):
            raise HandoverFailed(f"the lender sent {len(descriptors)} descriptors and named slabs {list(numbers)}")
        got.update(zip(numbers, descriptors, strict=True))
        undo.pop_all()
    return answer

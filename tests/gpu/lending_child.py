"""The other process of the memory tests: maps what it is sent or lends what it made, one command a line, until the
socket closes. Run as `python lending_child.py DEVICE SOCKET_NUMBER`."""

import contextlib
import json
import socket
import sys
from typing import Any

from forebay.gpu.backend import memory_backend


def main(device: str, number: int) -> None:
    assert "torch" not in sys.modules
    with contextlib.ExitStack() as held, socket.socket(fileno=number) as peer, memory_backend(device) as backend:
        held.enter_context(contextlib.ExitStack())
        arena: Any = None
        while True:
            data, descriptors, _, _ = socket.recv_fds(peer, 1 << 20, 1)
            if not data:
                break
            command, *arguments = json.loads(data)
            answer: Any = None
            sent: list[int] = []
            if command in ("borrow", "lend"):
                (size,) = arguments
                slab = backend.adopt(descriptors[0], size) if command == "borrow" else backend.slab(size)
                arena = backend.arena(size, 1)
                arena.map(0, slab)
                if command == "lend":
                    sent = [slab.fileno()]
                else:
                    slab.close()
            elif command == "read":
                offset, count = arguments
                answer = backend.read(arena.base + offset, count).hex()
            elif command == "write":
                offset, text = arguments
                backend.write(arena.base + offset, bytes.fromhex(text))
            elif command == "close":
                arena.close()
            socket.send_fds(peer, [json.dumps(answer).encode()], sent)
        if arena is not None:
            arena.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

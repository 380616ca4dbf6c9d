"""Compares spilled blocks with what was written, for tests: a checksum of each, kept for as long as its place is."""

from zlib import crc32

from forebay.gpu.backend import MemoryBackend
from forebay.gpu.errors import DeviceError
from forebay.transport.messages import CopyBlocks


class SpillChecks:
    """`pool` and `arena` are the addresses of the ranges that blocks are copied between. Used in one thread."""

    def __init__(self, memory: MemoryBackend, pool: int, arena: int) -> None:
        self._memory = memory
        self._pool = pool
        self._arena = arena
        self._written: dict[tuple[str, int], int] = {}
        self.checked = 0

    def check(self, command: CopyBlocks, block_bytes: int) -> DeviceError | None:
        """After a copy has landed, while both ends are still its own: what is wrong with it, or None."""
        source = self._arena if command.kind != "out" else self._pool
        target = self._arena if command.kind != "in" else self._pool
        for block, place in zip(command.source, command.target, strict=True):
            found = self._sum(target, place, block_bytes)
            wanted = (
                self._sum(source, block, block_bytes)
                if command.kind == "out"
                else self._written.get((command.model, block))
            )
            if found != wanted:
                return DeviceError(
                    f"copy {command.copy} ({command.kind}) of block {block} of {command.model!r} to {place}: its "
                    f"checksum is {found:08x}, not {wanted}"
                )
            if command.kind != "in":
                self._written[command.model, place] = found
            self.checked += 1
        return None

    def _sum(self, base: int, block: int, block_bytes: int) -> int:
        return crc32(self._memory.read(base + block * block_bytes, block_bytes))

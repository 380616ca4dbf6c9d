"""The host memory of one borrower: slabs in the place of lent ones, and slabs kept ready for what may be asked back.

Pinned memory is made at about 4 GB/s and written over PCIe at 54 GB/s (256 MiB on an H200's host: 63 and 4.9 ms), so
there is a place for it before it is. Lives in the borrower's event loop; memory is made in threads of its own.
"""

import asyncio
import os
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor

from forebay.gpu.backend import MemoryBackend, MemorySlab
from forebay.gpu.errors import DeviceError
from forebay.runtime.background import Background, log
from forebay.runtime.host_budget import HostBudget

MAKERS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""Threads that make memory at once."""

LINGER_S = 10.0
"""How long slabs that no loan needs any more are kept for the next one."""


class HostStock:
    """`most` bytes are kept ready at most, and never more than loans have lent memory mapped. `budget` bounds all of
    it."""

    def __init__(
        self, background: Background, memory: MemoryBackend, slab_bytes: int, budget: HostBudget, most: int
    ) -> None:
        self.budget = budget
        self._background = background
        self._memory = memory
        self._slab_bytes = slab_bytes
        self._most = most // slab_bytes
        self._threads = ThreadPoolExecutor(MAKERS, thread_name_prefix=f"{background.name} host memory")
        self._needs: dict[Hashable, int] = {}
        self._ready: list[MemorySlab] = []
        self._making = 0
        self._waiting = 0
        self._news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def keeps(self) -> bool:
        """Whether anything is ever kept ready; then slabs that come back should come with their handles."""
        return self._most > 0

    @property
    def ready(self) -> int:
        """Bytes that can be taken at once."""
        return len(self._ready) * self._slab_bytes

    def need(self, holder: Hashable, slabs: int) -> None:
        """So many slabs of the holder's are lent, and may be asked back."""
        if slabs:
            self._needs[holder] = slabs
        else:
            self._needs.pop(holder, None)
        self._adjust()

    async def take(self, *, zero: bool = False) -> MemorySlab | None:
        """Memory for the place of a slab: one that is ready, or made now. It counts as used until `give` has it.
        `zero`: it is zero. None: the host has none left. Raises DeviceError, OSError."""
        while True:
            if self._ready:
                slab = self._ready.pop()
                self.budget.use_ready(self._slab_bytes)
                # Whether another one is made in its place is for `need` to say: now the link is busy.
                return await self._zeroed(slab) if zero else slab
            if self._making <= self._waiting:
                break
            self._waiting += 1
            try:
                await self._news.wait()
            finally:
                self._waiting -= 1
        if not self.budget.take(self._slab_bytes):
            return None
        try:
            return await self._background.move(self._memory.host_slab, self._slab_bytes, zero=zero)
        except BaseException:
            self.budget.give_back(self._slab_bytes)
            raise

    async def _zeroed(self, slab: MemorySlab) -> MemorySlab:
        try:
            await self._background.move(self._memory.zero, slab)
        except BaseException:
            self.budget.give_back(self._slab_bytes)
            slab.close()
            raise
        return slab

    async def give(self, slab: MemorySlab | None) -> None:
        """A slab that was taken is in use no longer, and mapped nowhere (None: its handle was closed)."""
        if slab is None or self._closed or len(self._ready) + self._making >= self._most:
            self.budget.give_back(self._slab_bytes)
            if slab is not None:
                await self._background.move(slab.close)
            return
        self.budget.keep_used(self._slab_bytes)
        self._making += 1
        self._background.spawn(self._prepare(slab))

    def _adjust(self) -> None:
        """Makes what is missing, and sees to it that what is too much goes one day."""
        wanted = min(self._most, sum(self._needs.values()))
        while not self._closed and len(self._ready) + self._making < wanted:
            if not self.budget.set_aside(self._slab_bytes):
                return  # the next change of anything tries again
            self._making += 1
            self._background.spawn(self._prepare(None))
        if len(self._ready) > wanted and self._timer is None and not self._closed:
            self._timer = self._background.loop.call_later(LINGER_S, self._trim)

    def _trim(self) -> None:
        self._timer = None
        wanted = min(self._most, sum(self._needs.values()))
        surplus, self._ready = self._ready[wanted:], self._ready[:wanted]
        for slab in surplus:
            self.budget.drop_ready(self._slab_bytes)
            self._background.spawn(self._background.whole(self._threads, slab.close))

    async def _prepare(self, slab: MemorySlab | None) -> None:
        """In the end the slab, or a new one, is ready."""
        made: MemorySlab | None = None
        try:
            made = await self._background.whole(self._threads, self._made, slab)
        except (DeviceError, OSError) as error:
            log.debug("%s: no host memory was made ready: %s", self._background.name, error)
        finally:
            self._making -= 1
            if made is None:
                self.budget.drop_ready(self._slab_bytes)
            else:
                self._ready.append(made)
            news, self._news = self._news, asyncio.Event()
            news.set()
        if made is not None:
            self._adjust()

    def _made(self, slab: MemorySlab | None) -> MemorySlab:
        """In a thread. What cannot be made ready is closed."""
        made = self._memory.host_slab(self._slab_bytes, zero=False) if slab is None else slab
        try:
            self._memory.prepare(made)
        except BaseException:
            made.close()
            raise
        return made

    async def close(self) -> None:
        """Gives back what is ready; what loans have taken they have given back before. Closing twice is fine."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        ready, self._ready = self._ready, []
        for slab in ready:
            self.budget.drop_ready(self._slab_bytes)
            await self._background.work(slab.close)
        await self._background.work(self._threads.shutdown)

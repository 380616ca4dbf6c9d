"""Lends memory of one device to other processes: `Lender`, for asyncio and for plain threads alike.

What it has lent stays the borrower's until it comes back, whatever becomes of the scheduler; only the scheduler decides
to whom a slab goes, so that two can never have the same one.
"""

import asyncio
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from forebay.gpu.backend import MemoryBackend, MemorySlab, memory_backend
from forebay.gpu.errors import DeviceError
from forebay.runtime.background import Background, close_at_exit
from forebay.runtime.config_schema import Configuration
from forebay.runtime.handover import socket_path
from forebay.runtime.lender_loop import Callback, Callbacks, LenderLoop, LenderStatus
from forebay.runtime.party import Identity, party_name
from forebay.runtime.takeback import Reclaimed
from forebay.transport.addresses import runtime_folder

DEFAULT_SLAB_BYTES = 256 << 20

Result = TypeVar("Result")


class Lender:
    """`gpu` is the device's physical number, `device` its name here (`cpu:N`, `cuda:N`). Memory is lent in slabs of
    `slab_bytes`.

    `scheduler` is its control endpoint ("": where a scheduler of this user listens unless told otherwise). It need not
    be there yet. `credential` is the tenant's bearer token. Only processes of `uids` (own user) are handed anything, at
    a socket in `folder` (a private one) with mode `socket_mode`; other users need a folder that they may enter.

    Callbacks run one at a time in a thread of their own and may call the lender: `on_lent(lease, borrower, bytes)`,
    `on_returned(lease, borrower, bytes)`, `on_yielded(Reclaimed)` for memory that came back without anybody waiting for
    it in `take_back`, `on_replaced(old, new)` when a slab given to `offer_slabs` had to be made anew because somebody
    may still map it: the old one is closed when the callback returns.

    Methods block; `offer_async` and so on are the same for asyncio. Raises RefusedAddress, OSError, DeviceError."""

    def __init__(
        self,
        scheduler: str,
        gpu: int,
        device: str = "cpu:0",
        *,
        slab_bytes: int = DEFAULT_SLAB_BYTES,
        credential: str = "",
        uids: Collection[int] | None = None,
        folder: Path | None = None,
        socket_mode: int = 0o600,
        on_lent: Callback | None = None,
        on_returned: Callback | None = None,
        on_yielded: Callable[[Reclaimed], object] | None = None,
        on_replaced: Callable[[MemorySlab, MemorySlab], object] | None = None,
    ) -> None:
        self._memory = open_memory(device, slab_bytes)
        self._slab_bytes = slab_bytes
        self._name = party_name("lender", gpu)
        path = socket_path(folder or runtime_folder())
        identity = Identity(self._name, gpu, credential, str(path), slab_bytes)
        callbacks = Callbacks(on_lent, on_returned, on_yielded, on_replaced)
        allowed = frozenset({os.getuid()} if uids is None else uids)
        endpoint = scheduler or default_scheduler()
        self._background = Background(self._name)

        async def open_all() -> LenderLoop:
            return LenderLoop(endpoint, identity, self._background, self._memory, path, socket_mode, allowed, callbacks)

        self._loop = self._background.run_first(open_all())
        self._stay_open = close_at_exit(self)

    @property
    def name(self) -> str:
        """The party's name, as the ledger and `GET /leases` show it."""
        return self._name

    @property
    def slab_bytes(self) -> int:
        return self._slab_bytes

    def ready(self, timeout_s: float = 10.0) -> bool:
        """Waits until the scheduler knows this lender; False if it does not in that time, or will not (see
        `status`)."""
        return self._background.run(self._loop.party.wait_attached(timeout_s))

    async def ready_async(self, timeout_s: float = 10.0) -> bool:
        return await self._background.wait(self._loop.party.wait_attached(timeout_s))

    def offer(self, size: int) -> int:
        """Makes new memory of `size` bytes, rounded up to slabs, and offers it. Returns the bytes offered by this."""
        return self._background.run(self._loop.offer(size))

    async def offer_async(self, size: int) -> int:
        return await self._background.wait(self._loop.offer(size))

    def grow(self, size: int) -> int:
        """Offers `size` bytes more, on top of what is offered and lent already."""
        return self.offer(size)

    async def grow_async(self, size: int) -> int:
        return await self.offer_async(size)

    def offer_slabs(self, slabs: Sequence[MemorySlab]) -> None:
        """Offers memory of the caller's, which is zeroed first. The slabs stay open and untouched by the caller until
        `take_back` or `on_yielded` hands them back, or `on_replaced` puts others in their place."""
        self._background.run(self._loop.offer_slabs(slabs))

    async def offer_slabs_async(self, slabs: Sequence[MemorySlab]) -> None:
        await self._background.wait(self._loop.offer_slabs(slabs))

    def take_back(self, size: int, deadline_s: float) -> Reclaimed:
        """Takes `size` bytes, rounded up to slabs, of what is offered or lent; borrowers have `deadline_s` to move.
        Returns when all is back, or at the deadline with what is missing and who holds it; what comes later goes to
        `on_yielded`. Never raises because the scheduler is away: then what nobody has comes back at once."""
        return self._background.run(self._loop.take_back(size, deadline_s))

    async def take_back_async(self, size: int, deadline_s: float) -> Reclaimed:
        return await self._background.wait(self._loop.take_back(size, deadline_s))

    def status(self) -> LenderStatus:
        return self._background.run(self._loop.status())

    async def status_async(self) -> LenderStatus:
        return await self._background.wait(self._loop.status())

    def close(self) -> None:
        """Goes. What is lent lives on for as long as its borrowers map it; they are told to move. Slabs given to
        `offer_slabs` are the caller's again: it destroys those that may be lent. Closing twice is fine."""
        self._stay_open()
        self._background.close(self._loop.close())
        self._memory.close()

    async def close_async(self) -> None:
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def default_scheduler() -> str:
    """Where a scheduler of this user listens unless its configuration says otherwise. Raises RefusedAddress."""
    return Configuration().control_endpoint()


def open_memory(device: str, slab_bytes: int) -> MemoryBackend:
    """The device's memory. Raises DeviceError, also for a size that no slab of it can have."""
    memory = memory_backend(device)
    if slab_bytes < 1 or slab_bytes % memory.granularity:
        memory.close()
        raise DeviceError(
            f"slab_bytes is {slab_bytes}; on {device} it must be a positive multiple of {memory.granularity}"
        )
    return memory

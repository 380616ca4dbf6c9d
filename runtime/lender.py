"""Lends memory of one device to other processes: `Lender`, for asyncio and for plain threads alike.

What it has lent stays the borrower's until it comes back, whatever becomes of the scheduler; only the scheduler decides
to whom a slab goes, so that two can never have the same one.
"""

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from forebay.gpu.backend import MemorySlab
from forebay.runtime.facade import DEFAULT_SLAB_BYTES, Facade, default_scheduler
from forebay.runtime.handover import socket_path
from forebay.runtime.lender_loop import Callback, Callbacks, LenderLoop, LenderStatus
from forebay.runtime.party import Identity
from forebay.runtime.takeback import Reclaimed
from forebay.transport.addresses import runtime_folder


class Lender(Facade[LenderStatus]):
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
        super().__init__("lender", gpu, device, slab_bytes)
        allowed = frozenset({os.getuid()} if uids is None else uids)

        async def open_all() -> LenderLoop:
            path = socket_path(folder or runtime_folder())
            identity = Identity(self._name, gpu, credential, str(path), slab_bytes)
            callbacks = Callbacks(on_lent, on_returned, on_yielded, on_replaced)
            endpoint = scheduler or default_scheduler()
            return LenderLoop(endpoint, identity, self._background, self._memory, path, socket_mode, allowed, callbacks)

        self._loop = self._open(open_all())
        self._party = self._loop.party

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

    def close(self) -> None:
        """Goes. What is lent lives on for as long as its borrowers map it; they are told to move. Slabs given to
        `offer_slabs` are the caller's again: it destroys those that may be lent. Closing twice is fine."""
        super().close()

    async def _status(self) -> LenderStatus:
        return await self._loop.status()

    async def _close(self) -> None:
        await self._loop.close()

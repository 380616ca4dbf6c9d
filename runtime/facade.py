"""What `Lender` and `Borrower` are to whoever uses them, from plain threads and from asyncio: a name, and a thread of
their own that does the work until they are closed."""

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from forebay.gpu.backend import MemoryBackend, memory_backend
from forebay.gpu.errors import DeviceError
from forebay.runtime.background import Background, close_at_exit
from forebay.runtime.config_schema import Configuration
from forebay.runtime.party import Party, party_name

DEFAULT_SLAB_BYTES = 256 << 20

Status = TypeVar("Status")
Opened = TypeVar("Opened")


class Facade(Generic[Status]):
    """`role` begins the name. Every method that blocks has a counterpart `..._async` to await. Raises DeviceError."""

    _party: Party

    def __init__(self, role: str, gpu: int, device: str, slab_bytes: int) -> None:
        self._memory = open_memory(device, slab_bytes)
        self._slab_bytes = slab_bytes
        self._name = party_name(role, gpu)
        self._background = Background(self._name)

    def _open(self, opening: Coroutine[Any, Any, Opened]) -> Opened:
        """Makes in the loop what lives there; where it raises, everything is closed."""
        try:
            opened = self._background.run_first(opening)
        except BaseException:
            self._memory.close()
            raise
        self._stay_open = close_at_exit(self)
        return opened

    @property
    def name(self) -> str:
        """The party's name, as the ledger and `GET /leases` show it."""
        return self._name

    @property
    def slab_bytes(self) -> int:
        return self._slab_bytes

    def ready(self, timeout_s: float = 10.0) -> bool:
        """Waits until the scheduler knows this party; False if it does not in that time, or will not (see
        `status`)."""
        return self._background.run(self._party.wait_attached(timeout_s))

    async def ready_async(self, timeout_s: float = 10.0) -> bool:
        return await self._background.wait(self._party.wait_attached(timeout_s))

    def status(self) -> Status:
        return self._background.run(self._status())

    async def status_async(self) -> Status:
        return await self._background.wait(self._status())

    def close(self) -> None:
        """Closing twice is fine."""
        self._stay_open()
        self._background.close(self._close())
        self._memory.close()

    async def close_async(self) -> None:
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # In the loop -----------------------------------------------------------------------------------------------------

    async def _status(self) -> Status:
        raise NotImplementedError

    async def _close(self) -> None:
        raise NotImplementedError


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

"""Device memory that processes lend each other, one contract for both kinds of device: memfds on `cpu:N`, CUDA's
virtual memory on `cuda:N`. Neither needs torch.

A *slab* is memory behind a file descriptor. An *arena* is a range of addresses with slots for slabs of one size: what
is mapped into it is addressed as one space. A live handle is live memory: a slab's memory lasts until its handle is
closed and it is unmapped everywhere, in every process. Closing twice is fine everywhere.
"""

from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from forebay.gpu.device_name import DeviceName, parse_device

if TYPE_CHECKING:
    from forebay.gpu.copies import Copier


@dataclass(frozen=True)
class MemoryInfo:
    """Of the whole device, in bytes; on `cpu:N` of the machine."""

    free: int
    total: int


class Closing(Protocol):
    """Lives until `close()`, or the end of its `with` block."""

    @property
    def closed(self) -> bool: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...


class MemorySlab(Closing, Protocol):
    """`size` in bytes, a multiple of the backend's granularity."""

    @property
    def size(self) -> int: ...

    def fileno(self) -> int:
        """The descriptor, to be passed over a Unix socket; it stays this slab's own. Children do not inherit it.
        Raises DeviceError once the slab is closed."""


class Arena(Closing, Protocol):
    """`slots` places of `slab_bytes` each. Touching a place without a slab ends the process (cpu) or makes the CUDA
    context unusable: whoever hands out addresses knows which places have one."""

    slab_bytes: int
    slots: int
    size: int

    @property
    def base(self) -> int:
        """First address; slot i begins at `base + i * slab_bytes`. On `cuda:N` a device pointer."""

    @property
    def mapped(self) -> frozenset[int]:
        """The slots that hold a slab."""

    def map(self, slot: int, slab: MemorySlab) -> None:
        """Puts a slab into an empty slot; its handle is not needed afterwards. Raises DeviceError, and changes
        nothing, for a slot that is taken or not there and for a slab of another size."""

    def replace(self, slot: int, slab: MemorySlab) -> None:
        """Puts a slab in the place of another. On `cpu:N` there is no moment without memory between them; on `cuda:N`
        there is: nothing may touch the slot meanwhile."""

    def unmap(self, slot: int) -> None:
        """Empties a slot. Nothing may be touching it, no copy either."""

    def buffer(self) -> Any:
        """All of the arena for others to look at, without a copy: on `cpu:N` a writable buffer of bytes, on `cuda:N`
        an object with `__cuda_array_interface__` (uint8, which torch.as_tensor and cupy.asarray take). It keeps the
        addresses, also beyond `close()`."""


class HostMemory(Closing, Protocol):
    """`size` bytes of the host's memory that the device reads and writes itself (pinned); it is all there from the
    beginning."""

    size: int

    @property
    def base(self) -> int:
        """First address, the same for the host and the device."""

    def buffer(self) -> Any:
        """All of it as a writable buffer of bytes, which keeps the memory, also beyond `close()`."""


class MemoryBackend(Closing, Protocol):
    """The memory of one device. Close what came from it first. All of it may be called from any thread."""

    device: DeviceName
    granularity: int
    """Slab sizes are multiples of so many bytes."""

    def slab(self, size: int) -> MemorySlab:
        """New memory of the device, zero. Raises DeviceError: no multiple of the granularity, or no memory left."""

    def host_slab(self, size: int, *, zero: bool = True) -> MemorySlab:
        """New memory of the host, for an arena of this device: where a lent slab was, or never came. It is zero, unless
        `zero` is False: then who fills it whole at once saves the time."""

    def adopt(self, descriptor: int, size: int) -> MemorySlab:
        """The slab behind a descriptor that another process sent; owns the descriptor from now on, also when this
        raises. Raises DeviceError where it is no slab or not of `size` bytes."""

    def arena(self, slab_bytes: int, slots: int) -> Arena:
        """Reserves addresses. Raises DeviceError."""

    def pinned(self, size: int) -> HostMemory:
        """Raises DeviceError where the host has not that much memory left."""

    def zero(self, slab: MemorySlab) -> None:
        """Makes every byte of the slab zero, in whatever arena it is mapped; returns when it is done."""

    def read(self, address: int, size: int) -> bytes:
        """Copies bytes out of an arena or pinned memory. For more than a little use a copier."""

    def write(self, address: int, data: bytes | bytearray | memoryview) -> None:
        """Copies bytes into an arena or pinned memory. For more than a little use a copier."""

    def move(self, destination: int, source: int, size: int) -> None:
        """Copies between two places of arenas and pinned memory that do not overlap; returns when it is done."""

    def prepare(self, slab: MemorySlab) -> None:
        """Takes what `fill` will need, memory or addresses, so that it has only to copy. They go with the slab. Raises
        DeviceError."""

    def fill(self, slab: MemorySlab, source: int) -> None:
        """Copies what is at an address, as much as the slab holds, into a slab that is mapped nowhere; returns when it
        is done. New memory of the host is filled faster like this than through a mapping."""

    def copier(self) -> "Copier":
        """A new copier, for many pieces in the background; the caller closes it. It copies between any places that the
        device can address, but only of this backend's arenas and pinned memory does it know how far they are. Needs
        numpy."""

    def memory(self) -> MemoryInfo: ...

    def describe(self) -> str:
        """What the device is, for people: "NVIDIA H200, CUDA 13.0"."""


def memory_backend(device: str) -> MemoryBackend:
    """The memory of `device` ("cpu:N" or "cuda:N"). Raises DeviceError, also where CUDA or a package is missing."""
    name = parse_device(device)
    if name.kind == "cpu":
        from forebay.gpu.memfd_backend import MemfdBackend

        return MemfdBackend(name)
    from forebay.gpu.cuda_memory import CudaBackend

    return CudaBackend(name)

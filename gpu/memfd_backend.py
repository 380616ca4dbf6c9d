"""The memory of `cpu:N`: memfds, which every process of the machine can map. No torch, no numpy."""

import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from forebay.gpu.backend import MemoryInfo, MemorySlab
from forebay.gpu.device_name import DeviceName
from forebay.gpu.errors import DeviceError
from forebay.gpu.machine_memory import GROUPS, machine_memory
from forebay.gpu.memory import PAGE_BYTES, Slab, SlabRange

if TYPE_CHECKING:
    from forebay.gpu.copies import CpuCopier


class MemfdBackend:
    """Holds nothing itself; what it makes lives by itself."""

    def __init__(self, device: DeviceName, groups: Path = GROUPS) -> None:
        """`groups`: where the control groups are mounted."""
        self.device = device
        self._groups = groups
        self.granularity = PAGE_BYTES
        self._closed = False

    def slab(self, size: int) -> Slab:
        self._live()
        return Slab(size)

    def host_slab(self, size: int, *, zero: bool = True) -> Slab:
        return self.slab(size)

    def adopt(self, descriptor: int, size: int) -> Slab:
        slab = Slab.adopt(descriptor)
        if self._closed or slab.size != size:
            slab.close()
            self._live()
            raise DeviceError(f"the slab has {slab.size} bytes, not the {size} that were announced")
        return slab

    def arena(self, slab_bytes: int, slots: int) -> SlabRange:
        self._live()
        return SlabRange(slab_bytes, slots)

    def pinned(self, size: int) -> "HostPages":
        self._live()
        free = self.memory().free
        if size > free:
            raise DeviceError(f"the host has {free} bytes of memory left, not {size}; ask for less")
        return HostPages(size)

    def zero(self, slab: MemorySlab) -> None:
        self._live()
        if not isinstance(slab, Slab):
            raise DeviceError(f"{self.device} cannot zero a {type(slab).__name__}: it is another device's")
        slab.zero()

    def read(self, address: int, size: int) -> bytes:
        self._live()
        return ctypes.string_at(address, size)

    def write(self, address: int, data: bytes | bytearray | memoryview) -> None:
        self._live()
        source = memoryview(data).cast("B")
        memoryview((ctypes.c_char * len(source)).from_address(address)).cast("B")[:] = source

    def move(self, destination: int, source: int, size: int) -> None:
        self._live()
        ctypes.memmove(destination, source, size)

    def prepare(self, slab: MemorySlab) -> None:
        self._live()
        if not isinstance(slab, Slab):
            raise DeviceError(f"{self.device} cannot fill a {type(slab).__name__}: it is another device's")
        slab.populate()

    def fill(self, slab: MemorySlab, source: int) -> None:
        self._live()
        # The kernel takes pages as it copies; through a mapping each new page would cost a fault, which takes longer
        # than copying it.
        view = memoryview((ctypes.c_char * slab.size).from_address(source)).cast("B")
        done = 0
        while done < slab.size:
            done += os.pwrite(slab.fileno(), view[done:], done)

    def copier(self) -> "CpuCopier":
        from forebay.gpu.copies import CpuCopier

        self._live()
        return CpuCopier(str(self.device))

    def memory(self) -> MemoryInfo:
        return machine_memory(self._groups)

    def describe(self) -> str:
        return "memory of the host"

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True

    def _live(self) -> None:
        if self._closed:
            raise DeviceError(f"the memory backend of {self.device} is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


class HostPages:
    """Host memory that is all there from the beginning."""

    def __init__(self, size: int) -> None:
        with Slab(size) as slab:
            slab.populate()
            self._range = SlabRange(size, 1)
            self._range.map(0, slab)
        self.size = size

    @property
    def base(self) -> int:
        return self._range.base

    def buffer(self) -> "ctypes.Array[ctypes.c_char]":
        return self._range.buffer()

    @property
    def closed(self) -> bool:
        return self._range.closed

    def close(self) -> None:
        self._range.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

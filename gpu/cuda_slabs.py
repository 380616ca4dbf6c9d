"""Slabs and arenas of `cuda:N`. `gpu/cuda_memory.py` makes them. No torch, no numpy."""

import os
import weakref
from types import TracebackType
from typing import Any, Self

from forebay.gpu.backend import MemorySlab
from forebay.gpu.cuda_driver import CudaContext
from forebay.gpu.cuda_places import Place
from forebay.gpu.errors import DeviceError


class CudaSlab:
    """An allocation of `size` bytes at a `place`, made here or by another process."""

    def __init__(self, context: CudaContext, handle: Any, size: int, place: Place = Place.OWN) -> None:
        self.size = size
        self.place = place
        self._holding = _Holding(context, handle)
        self._finalizer = weakref.finalize(self, self._holding.release)
        # A process that ends gives its memory back itself, and the driver may be gone by then.
        self._finalizer.atexit = False

    @property
    def handle(self) -> Any:
        """The driver's handle. Raises DeviceError once the slab is closed."""
        if self.closed:
            raise DeviceError("this slab is closed")
        return self._holding.handle

    def fileno(self) -> int:
        handle = self.handle
        if self._holding.descriptor < 0:
            context = self._holding.context
            with context.current() as driver:
                kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
                number = int(context.call(driver.cuMemExportToShareableHandle(handle, kind, 0)))
            self._holding.descriptor = number
            os.set_inheritable(number, False)
        return self._holding.descriptor

    def keep_descriptor(self, descriptor: int) -> None:
        self._holding.descriptor = descriptor

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def close(self) -> None:
        """Gives up handle and descriptor. Mappings live on, here and elsewhere."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class _Holding:
    def __init__(self, context: CudaContext, handle: Any) -> None:
        self.context = context
        self.handle = handle
        self.descriptor = -1

    def release(self) -> None:
        number, self.descriptor = self.descriptor, -1
        if number >= 0:
            os.close(number)
        self.context.driver.cuMemRelease(self.handle)


class Addresses:
    """Reserved addresses and what is mapped at them."""

    def __init__(self, context: CudaContext, size: int) -> None:
        self.context = context
        self.size = size
        self.sizes: dict[int, int] = {}
        with context.current() as driver:
            try:
                self.base = int(context.call(driver.cuMemAddressReserve(size, 0, 0, 0)))
            except DeviceError as error:
                raise DeviceError(f"cannot map {size} bytes: {error}") from error

    def map(self, address: int, slab: CudaSlab, size: int) -> None:
        """Maps the slab for reading and writing by this device, wherever it lies."""
        context = self.context
        with context.current() as driver:
            context.call(driver.cuMemMap(address, size, 0, slab.handle, 0))
            try:
                access = driver.CUmemAccessDesc()
                access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
                access.location.id = int(context.handle)
                access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                context.call(driver.cuMemSetAccess(address, size, [access], 1))
            except BaseException:
                driver.cuMemUnmap(address, size)
                raise
        self.sizes[address] = size
        context.places.add(address, size, slab.place)

    def unmap(self, address: int) -> None:
        context = self.context
        with context.current() as driver:
            context.call(driver.cuMemUnmap(address, self.sizes[address]))
        del self.sizes[address]
        context.places.remove(address)

    def fits(self, slab: CudaSlab, size: int) -> bool:
        """Whether so many bytes of the slab can be mapped."""
        with self.context.current() as driver:
            (status,) = driver.cuMemMap(self.base, size, 0, slab.handle, 0)
            if int(status) == 0:
                driver.cuMemUnmap(self.base, size)
        return int(status) == 0

    def release(self) -> None:
        driver = self.context.driver
        for address, size in self.sizes.items():
            driver.cuMemUnmap(address, size)
            self.context.places.remove(address)
        self.sizes.clear()
        base, self.base = self.base, 0
        if base:
            driver.cuMemAddressFree(base, self.size)


class _Reservation:
    """Keeps addresses until the arena is closed and the last view of them is gone."""

    def __init__(self, addresses: Addresses) -> None:
        self.addresses = addresses
        finalizer = weakref.finalize(self, addresses.release)
        finalizer.atexit = False


class CudaArena:
    """Slots in one range of device addresses."""

    def __init__(self, context: CudaContext, slab_bytes: int, slots: int) -> None:
        if slots <= 0:
            raise DeviceError(f"an arena needs at least one slot, not {slots}")
        self.slab_bytes = slab_bytes
        self.slots = slots
        self.size = slab_bytes * slots
        self._context = context
        self._mapped: set[int] = set()
        self._reservation: _Reservation | None = _Reservation(Addresses(context, self.size))

    @property
    def base(self) -> int:
        return self._live().base

    @property
    def mapped(self) -> frozenset[int]:
        return frozenset(self._mapped)

    @property
    def closed(self) -> bool:
        return self._reservation is None

    def map(self, slot: int, slab: MemorySlab) -> None:
        addresses = self._live()
        self._require_slot(slot)
        if slot in self._mapped:
            raise DeviceError(f"slot {slot} already holds a slab; unmap it first")
        addresses.map(addresses.base + slot * self.slab_bytes, self._fitting(slab), self.slab_bytes)
        self._mapped.add(slot)

    def replace(self, slot: int, slab: MemorySlab) -> None:
        self._live()
        self._require_slot(slot)
        self._fitting(slab)
        self.unmap(slot)
        self.map(slot, slab)

    def unmap(self, slot: int) -> None:
        addresses = self._live()
        self._require_slot(slot)
        if slot not in self._mapped:
            raise DeviceError(f"slot {slot} holds no slab")
        addresses.unmap(addresses.base + slot * self.slab_bytes)
        self._mapped.remove(slot)

    def buffer(self) -> "ArenaView":
        self._live()
        assert self._reservation is not None
        return ArenaView(self._reservation, self.size)

    def close(self) -> None:
        """Unmaps everything, once no buffer of the arena is left. Closing twice is fine."""
        self._mapped.clear()
        self._reservation = None

    def _fitting(self, slab: MemorySlab) -> CudaSlab:
        if not isinstance(slab, CudaSlab):
            raise DeviceError(f"an arena of {self._context.device} takes no {type(slab).__name__}")
        if slab.size != self.slab_bytes:
            raise DeviceError(f"a slab of {slab.size} bytes does not fit slots of {self.slab_bytes}")
        return slab

    def _live(self) -> Addresses:
        if self._reservation is None:
            raise DeviceError("this arena is closed")
        return self._reservation.addresses

    def _require_slot(self, slot: int) -> None:
        if not 0 <= slot < self.slots:
            raise DeviceError(f"slot {slot} is outside 0..{self.slots - 1}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class ArenaView:
    """What torch.as_tensor and cupy.asarray take: uint8[size] of device memory, without a copy."""

    def __init__(self, reservation: _Reservation, size: int) -> None:
        self._reservation = reservation
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (reservation.addresses.base, False), "version": 3,
        }  # fmt: skip

"""Slabs and arenas of `cuda:N`. `gpu/cuda_memory.py` makes them. No torch, no numpy."""

import os
import weakref
from typing import Any

from forebay.gpu.backend import MemorySlab
from forebay.gpu.cuda_driver import CudaContext
from forebay.gpu.cuda_places import Place
from forebay.gpu.errors import DeviceError
from forebay.gpu.handles import SlabHandle, SlotRange


class CudaSlab(SlabHandle):
    """An allocation of `size` bytes at a `place`, made here or by another process."""

    def __init__(self, context: CudaContext, handle: Any, size: int, place: Place = Place.OWN) -> None:
        self.size = size
        self.place = place
        self._holding = _Holding(context, handle)
        # A process that ends gives its memory back itself, and the driver may be gone by then.
        super().__init__(self._holding.release, at_exit=False)

    @property
    def handle(self) -> Any:
        """The driver's handle. Raises DeviceError once the slab is closed."""
        self.require_open()
        return self._holding.handle

    def stage(self) -> int:
        """An address of its own at which the slab is mapped until it is closed: where it is filled before it takes a
        place in an arena. Raises DeviceError."""
        handle, holding = self.handle, self._holding
        if holding.staging is None:
            staging = Addresses(holding.context, self.size)
            try:
                staging.map(staging.base, handle, self.size, self.place)
            except BaseException:
                staging.release()
                raise
            holding.staging = staging
        return holding.staging.base

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


class _Holding:
    def __init__(self, context: CudaContext, handle: Any) -> None:
        self.context = context
        self.handle = handle
        self.descriptor = -1
        self.staging: Addresses | None = None

    def release(self) -> None:
        staging, self.staging = self.staging, None
        if staging is not None:
            staging.release()
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

    def map(self, address: int, handle: Any, size: int, place: Place) -> None:
        """Maps an allocation for reading and writing by this device, wherever it lies."""
        context = self.context
        with context.current() as driver:
            context.call(driver.cuMemMap(address, size, 0, handle, 0))
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
        context.places.add(address, size, place)

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


class CudaArena(SlotRange[_Reservation]):
    """Slots in one range of device addresses."""

    NOUN = "arena"

    def __init__(self, context: CudaContext, slab_bytes: int, slots: int) -> None:
        super().__init__(slab_bytes, slots)
        self._context = context
        self._reservation = _Reservation(Addresses(context, self.size))

    @property
    def base(self) -> int:
        return self._live().addresses.base

    def map(self, slot: int, slab: MemorySlab) -> None:
        self._require_empty(slot)
        self._place(slot, self._fitting(slab))

    def replace(self, slot: int, slab: MemorySlab) -> None:
        self._require_full(slot)
        fitting = self._fitting(slab)
        self.unmap(slot)
        self._place(slot, fitting)

    def unmap(self, slot: int) -> None:
        addresses = self._live().addresses
        self._require_full(slot)
        addresses.unmap(addresses.base + slot * self.slab_bytes)
        self._mapped.remove(slot)

    def _place(self, slot: int, slab: CudaSlab) -> None:
        addresses = self._live().addresses
        addresses.map(addresses.base + slot * self.slab_bytes, slab.handle, self.slab_bytes, slab.place)
        self._mapped.add(slot)

    def _fitting(self, slab: MemorySlab) -> CudaSlab:
        if not isinstance(slab, CudaSlab):
            raise DeviceError(f"an arena of {self._context.device} takes no {type(slab).__name__}")
        self._require_size(slab)
        return slab

    def buffer(self) -> "ArenaView":
        return ArenaView(self._live(), self.size)


class ArenaView:
    """What torch.as_tensor and cupy.asarray take: uint8[size] of device memory, without a copy."""

    def __init__(self, reservation: _Reservation, size: int) -> None:
        self._reservation = reservation
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (reservation.addresses.base, False), "version": 3,
        }  # fmt: skip

"""The memory of `cuda:N`: CUDA's virtual memory, whose allocations travel as file descriptors. No torch, no numpy.

The driver counts references as the kernel does for memfds: an allocation lives until its handles are released, its
descriptors closed, and it is unmapped everywhere; it survives the process that made it. A process that maps one need
not see the GPU it lies on.
"""

import contextlib
import ctypes
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

from forebay.gpu.backend import MemoryInfo, MemorySlab
from forebay.gpu.cuda_driver import CudaContext
from forebay.gpu.cuda_places import Place
from forebay.gpu.cuda_slabs import Addresses, CudaArena, CudaSlab
from forebay.gpu.device_name import DeviceName
from forebay.gpu.errors import DeviceError
from forebay.gpu.handles import Closes

if TYPE_CHECKING:
    from forebay.gpu.cuda_copies import CudaCopier


class CudaBackend(Closes):
    def __init__(self, device: DeviceName) -> None:
        self.device = device
        self.context = CudaContext(device)
        with contextlib.ExitStack() as undo:
            undo.callback(self.context.close)
            with self.context.current() as driver:
                prop = self._properties()
                minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
                self.granularity = int(self.context.call(driver.cuMemGetAllocationGranularity(prop, minimum)))
            self._stream = self.context.stream()
            self._moves = threading.Lock()
            self._undo = undo.pop_all()

    def slab(self, size: int) -> CudaSlab:
        return self._new(size, self._properties())

    def host_slab(self, size: int, *, zero: bool = True) -> CudaSlab:
        return self._new(size, self._properties(host=True), Place.HOST, zero)

    def _properties(self, *, host: bool = False) -> Any:
        """Of an allocation on this device, or on the part of the host that is nearest to it."""
        driver = self.context.driver
        prop = driver.CUmemAllocationProp()
        prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        if host:
            node = self.context.attribute(driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID)
            prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA
            prop.location.id = max(0, node)  # -1: the host has no nodes
        else:
            prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            prop.location.id = int(self.context.handle)
        return prop

    def _new(self, size: int, prop: Any, place: Place = Place.OWN, zero: bool = True) -> CudaSlab:
        self.require_size("slab_bytes", size)
        with contextlib.ExitStack() as undo:
            with self.context.current() as driver:
                slab = CudaSlab(self.context, self.context.call(driver.cuMemCreate(size, prop, 0)), size, place)
            undo.callback(slab.close)
            if zero:
                self.zero(slab)  # nothing says that the driver does
            undo.pop_all()
        return slab

    def require_size(self, name: str, size: int) -> None:
        """Raises DeviceError unless `size` is a positive multiple of the granularity."""
        if size <= 0 or size % self.granularity:
            raise DeviceError(f"{name} is {size}; it must be a positive multiple of {self.granularity}")

    def adopt(self, descriptor: int, size: int) -> CudaSlab:
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, descriptor)
            self.require_size("slab_bytes", size)
            os.set_inheritable(descriptor, False)
            with self.context.current() as driver:
                kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
                try:
                    handle = self.context.call(driver.cuMemImportFromShareableHandle(descriptor, kind))
                except DeviceError as error:
                    raise DeviceError(f"this descriptor is no slab: {error}") from error
                slab = CudaSlab(self.context, handle, size, Place.PEER)
            undo.callback(slab.close)
            self._require_true_size(slab)
            undo.pop_all()
        slab.keep_descriptor(descriptor)
        return slab

    def _require_true_size(self, slab: CudaSlab) -> None:
        """The driver does not tell a handle's size, but maps no more of it than there is."""
        addresses = Addresses(self.context, slab.size + self.granularity)
        try:
            if not addresses.fits(slab, slab.size):
                raise DeviceError(f"the slab has fewer bytes than the {slab.size} that were announced")
            if addresses.fits(slab, slab.size + self.granularity):
                raise DeviceError(f"the slab has more bytes than the {slab.size} that were announced")
        finally:
            addresses.release()

    def arena(self, slab_bytes: int, slots: int) -> CudaArena:
        self.require_size("slab_bytes", slab_bytes)
        return CudaArena(self.context, slab_bytes, slots)

    def pinned(self, size: int) -> "CudaHostMemory":
        if size <= 0:
            raise DeviceError(f"pinned memory needs at least one byte, not {size}")
        return CudaHostMemory(self.context, size)

    def zero(self, slab: MemorySlab) -> None:
        with CudaArena(self.context, slab.size, 1) as arena:
            arena.map(0, slab)
            with self.context.current() as driver:
                self.context.call(driver.cuMemsetD8Async(arena.base, 0, slab.size, self._stream))
                self.context.call(driver.cuStreamSynchronize(self._stream))

    def read(self, address: int, size: int) -> bytes:
        data = ctypes.create_string_buffer(max(1, size))
        self.move(ctypes.addressof(data), address, size)
        return data.raw[:size]

    def write(self, address: int, data: bytes | bytearray | memoryview) -> None:
        source = ctypes.create_string_buffer(bytes(data), max(1, len(data)))
        self.move(address, ctypes.addressof(source), memoryview(data).nbytes)

    def move(self, destination: int, source: int, size: int) -> None:
        if not size:
            return
        with self.context.current() as driver:
            done = self.context.call(driver.cuEventCreate(int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)))
            try:
                # Whoever moves waits for its own copy, not for those that other threads put behind it.
                with self._moves:
                    self.context.call(driver.cuMemcpyAsync(destination, source, size, self._stream))
                    self.context.call(driver.cuEventRecord(done, self._stream))
                self.context.call(driver.cuEventSynchronize(done))
            finally:
                driver.cuEventDestroy(done)

    def prepare(self, slab: MemorySlab) -> None:
        self._own(slab).stage()

    def fill(self, slab: MemorySlab, source: int) -> None:
        self.move(self._own(slab).stage(), source, slab.size)

    def _own(self, slab: MemorySlab) -> CudaSlab:
        if not isinstance(slab, CudaSlab):
            raise DeviceError(f"{self.device} cannot fill a {type(slab).__name__}: it is another device's")
        return slab

    def copier(self) -> "CudaCopier":
        from forebay.gpu.cuda_copies import CudaCopier

        return CudaCopier(self)

    def memory(self) -> MemoryInfo:
        with self.context.current() as driver:
            free, total = self.context.call(driver.cuMemGetInfo())
        return MemoryInfo(int(free), int(total))

    def describe(self) -> str:
        with self.context.current() as driver:
            name = self.context.call(driver.cuDeviceGetName(128, self.context.handle))
            version = int(self.context.call(driver.cuDriverGetVersion()))
        return f"{bytes(name).split(bytes(1))[0].decode()}, CUDA {version // 1000}.{version % 1000 // 10}"

    @property
    def closed(self) -> bool:
        return self.context.closed

    def close(self) -> None:
        if not self.closed:
            with self.context.current() as driver:
                driver.cuStreamDestroy(self._stream)
        self._undo.close()


class CudaHostMemory(Closes):
    """Pinned memory at one address for the host and all devices."""

    def __init__(self, context: CudaContext, size: int) -> None:
        self.size = size
        self._pages: _HostPages | None = _HostPages(context, size)

    @property
    def base(self) -> int:
        return self._live().base

    def buffer(self) -> "ctypes.Array[ctypes.c_char]":
        pages = self._live()
        kind: type[ctypes.Array[ctypes.c_char]] = type("HostView", (ctypes.c_char * self.size,), {})
        view = kind.from_address(pages.base)
        view.pages = pages  # type: ignore[attr-defined]
        return view

    def _live(self) -> "_HostPages":
        if self._pages is None:
            raise DeviceError("this pinned memory is closed")
        return self._pages

    @property
    def closed(self) -> bool:
        return self._pages is None

    def close(self) -> None:
        self._pages = None


class _HostPages:
    def __init__(self, context: CudaContext, size: int) -> None:
        with context.current() as driver:
            try:
                portable = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
                self.base = int(context.call(driver.cuMemHostAlloc(size, portable)))
            except DeviceError as error:
                raise DeviceError(f"the host has not {size} bytes of memory left to pin: {error}") from error
        context.places.add(self.base, size, Place.HOST)
        finalizer = weakref.finalize(self, _free_host, context, self.base)
        finalizer.atexit = False


def _free_host(context: CudaContext, base: int) -> None:
    context.places.remove(base)
    if not context.closed:
        with context.current() as driver:
            driver.cuMemFreeHost(base)

"""CUDA's driver interface, as little of it as memory and copies need. Loaded only when a cuda device is opened."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from forebay.gpu.cuda_places import Places
from forebay.gpu.device_name import DeviceName
from forebay.gpu.errors import DeviceError

INSTALL = "pip install 'forebay[cuda13]'"


class CudaContext:
    """The primary context of one device, which torch and CuPy use too, held until `close()`."""

    def __init__(self, device: DeviceName) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise DeviceError(f"{device} needs the package cuda-bindings ({error}); install it: {INSTALL}") from error
        self.device = device
        self.driver: Any = driver
        try:
            (result,) = driver.cuInit(0)
        except RuntimeError as error:
            raise DeviceError(f"{device} cannot be opened: no NVIDIA driver is here ({error})") from error
        self._require(result, f"{device} cannot be opened")
        count = self.call(driver.cuDeviceGetCount())
        if device.index >= count:
            raise DeviceError(
                f"{device} is not there: this process sees {count} CUDA devices ({', '.join(self._names(count))}; "
                f"CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})"
            )
        self.handle = self.call(driver.cuDeviceGet(device.index))
        attributes = driver.CUdevice_attribute
        for name in ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"):
            if not self.attribute(getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}")):
                raise DeviceError(f"{device} cannot lend memory: its driver says {name} is 0")
        self._context = self.call(driver.cuDevicePrimaryCtxRetain(self.handle))
        self.places = Places()
        self.closed = False

    def _names(self, count: int) -> Iterator[str]:
        for index in range(count):
            name = self.call(self.driver.cuDeviceGetName(128, self.call(self.driver.cuDeviceGet(index))))
            yield f"cuda:{index} {bytes(name).split(bytes(1))[0].decode()}"

    def attribute(self, which: Any) -> int:
        return int(self.call(self.driver.cuDeviceGetAttribute(which, self.handle)))

    def call(self, result: tuple[Any, ...]) -> Any:
        """What a driver call returned besides its status: nothing, a value, or a tuple. Raises DeviceError."""
        status, *values = result
        self._require(status, f"{self.device}: a CUDA call failed")
        if len(values) > 1:
            return tuple(values)
        return values[0] if values else None

    def _require(self, status: Any, problem: str) -> None:
        if int(status) == 0:
            return
        error, text = self.driver.cuGetErrorString(status)
        meaning = text.decode() if int(error) == 0 and text else "unknown error"
        raise DeviceError(f"{problem}: {getattr(status, 'name', status)}: {meaning}")

    @contextmanager
    def current(self) -> Iterator[Any]:
        """Makes the context this thread's own, for calls that need one; gives the driver."""
        if self.closed:
            raise DeviceError(f"the memory backend of {self.device} is closed")
        self.call(self.driver.cuCtxPushCurrent(self._context))
        try:
            yield self.driver
        finally:
            self.driver.cuCtxPopCurrent()

    def stream(self, *, urgent: bool = False) -> Any:
        """A new stream that does not wait for the default one. As SMs become free, what waits in an urgent stream goes
        before what waits in others; what runs is not interrupted."""
        with self.current() as driver:
            least, greatest = self.call(driver.cuCtxGetStreamPriorityRange())
            flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
            return self.call(driver.cuStreamCreateWithPriority(flags, greatest if urgent else least))

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.driver.cuDevicePrimaryCtxRelease(self.handle)

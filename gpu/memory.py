"""Device memory of the CPU backend: slabs, and the address ranges they are mapped into. No torch here.

A slab is memory that can be handed to another process as a file descriptor (here a memfd). A range is one contiguous
stretch of addresses in which slabs are mapped and unmapped one by one. Both are live from construction to `close()`;
a process that maps a slab keeps its memory alive, whoever else closes it.
"""

import ctypes
import fcntl
import mmap
import os
import weakref
from typing import Self

from forebay.gpu.backend import MemorySlab
from forebay.gpu.errors import DeviceError
from forebay.gpu.handles import SlabHandle, SlotRange
from forebay.gpu.machine_memory import available

PAGE_BYTES = mmap.PAGESIZE

_NO_ACCESS = 0  # PROT_NONE, which the mmap module does not name
_FIXED = 0x10  # MAP_FIXED, the same on all Linux architectures Python runs on
_NO_RESERVE = 0x4000  # MAP_NORESERVE
_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def require_slab_bytes(slab_bytes: int) -> None:
    """Raises DeviceError unless `slab_bytes` is a positive multiple of the page size."""
    if slab_bytes <= 0 or slab_bytes % PAGE_BYTES:
        raise DeviceError(f"slab_bytes is {slab_bytes}; it must be a positive multiple of {PAGE_BYTES}")


class Slab(SlabHandle):
    """Memory of `size` bytes, zero at first, behind a file descriptor that children do not inherit.

    Its size is sealed: nobody who gets the descriptor can shrink it under another process that has it mapped."""

    def __init__(self, size: int) -> None:
        require_slab_bytes(size)
        self._descriptor = _Descriptor()
        super().__init__(self._descriptor.close)
        self._descriptor.number = os.memfd_create("forebay-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._descriptor.number, size)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self._descriptor.number, fcntl.F_ADD_SEALS, seals)
        self.size = size

    @classmethod
    def adopt(cls, descriptor: int) -> Self:
        """A slab from a descriptor that another process sent; owns it from now on, also when this raises. Whoever can
        still shrink the memory could end us with a signal: such a descriptor is refused."""
        slab = cls.__new__(cls)
        slab._descriptor = _Descriptor()
        SlabHandle.__init__(slab, slab._descriptor.close)
        slab._descriptor.number = descriptor
        os.set_inheritable(descriptor, False)
        slab.size = os.fstat(descriptor).st_size
        try:
            require_slab_bytes(slab.size)
            _require_sealed(descriptor)
        except DeviceError:
            slab.close()
            raise
        return slab

    def fileno(self) -> int:
        """The descriptor, to be passed over a Unix socket; it stays this slab's own."""
        self.require_open()
        return self._descriptor.number

    @property
    def resident(self) -> int:
        """Bytes that anybody has written to so far (the rest is not backed by memory yet)."""
        return os.fstat(self.fileno()).st_blocks * 512

    def zero(self) -> None:
        """Makes every byte zero, in all mappings, by giving the memory behind them back to the system."""
        self._allocate(_KEEP_SIZE_PUNCH_HOLE)

    def populate(self) -> None:
        """Takes all of the memory now. Raises DeviceError where the system has not enough; without this a process
        that touches memory which the system cannot find is killed."""
        left = available()
        if self.size > left:  # a container that goes beyond its bound is killed, and not refused
            raise DeviceError(
                f"cannot allocate {self.size} bytes: the machine, or the container, has {left} left; ask for less"
            )
        self._allocate(0)

    def _allocate(self, mode: int) -> None:
        if _libc.fallocate(self.fileno(), mode, 0, self.size):
            raise DeviceError(f"cannot allocate {self.size} bytes: {os.strerror(ctypes.get_errno())}")


def _require_sealed(descriptor: int) -> None:
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0  # not a memfd
    if not seals & fcntl.F_SEAL_SHRINK:
        raise DeviceError("this descriptor is no slab: its size is not sealed, so its owner could take memory away")


class _Descriptor:
    def __init__(self) -> None:
        self.number = -1

    def close(self) -> None:
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)


class _Reservation:
    """The addresses themselves; given back when the range is closed and the last view of them is gone."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._addresses = _Addresses(size)
        finalizer = weakref.finalize(self, self._addresses.release)
        # A process that ends gives its addresses back itself, and something may still look at them until then.
        finalizer.atexit = False
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        self.base = self._addresses.base = _map(None, size, _NO_ACCESS, flags, -1)


class _Addresses:
    def __init__(self, size: int) -> None:
        self.size = size
        self.base = 0

    def release(self) -> None:
        base, self.base = self.base, 0
        if base:
            _libc.munmap(base, self.size)


def _map(address: int | None, size: int, access: int, flags: int, descriptor: int) -> int:
    found: int = _libc.mmap(address, size, access, flags, descriptor, 0)
    if found == _FAILED:
        number = ctypes.get_errno()
        raise DeviceError(f"cannot map {size} bytes: {os.strerror(number)}")
    return found


class SlabRange(SlotRange[_Reservation]):
    """`slots` consecutive places for slabs of `slab_bytes` each, at addresses that never change.

    Touching a place without a slab kills the process (SIGSEGV); whoever hands out blocks knows which places have
    one."""

    def __init__(self, slab_bytes: int, slots: int) -> None:
        require_slab_bytes(slab_bytes)
        super().__init__(slab_bytes, slots)
        self._reservation = _Reservation(self.size)

    @property
    def base(self) -> int:
        """First address."""
        return self._live().base

    def map(self, slot: int, slab: MemorySlab) -> None:
        """Makes the slab's memory appear at `base + slot * slab_bytes`; the descriptor is not needed afterwards."""
        self._require_empty(slot)
        self._place(slot, slab)

    def replace(self, slot: int, slab: MemorySlab) -> None:
        """Puts this slab in the place of the one that the slot holds, with no moment without memory between them."""
        self._require_full(slot)
        self._place(slot, slab)

    def _place(self, slot: int, slab: MemorySlab) -> None:
        self._require_size(slab)
        access = mmap.PROT_READ | mmap.PROT_WRITE
        address = self._live().base + slot * self.slab_bytes
        _map(address, self.slab_bytes, access, mmap.MAP_SHARED | _FIXED, slab.fileno())
        self._mapped.add(slot)

    def unmap(self, slot: int) -> None:
        """Takes the slab out of the slot; the addresses stay reserved."""
        reservation = self._live()
        self._require_full(slot)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE | _FIXED
        _map(reservation.base + slot * self.slab_bytes, self.slab_bytes, _NO_ACCESS, flags, -1)
        self._mapped.remove(slot)

    def buffer(self) -> ctypes.Array[ctypes.c_char]:
        """The whole range as a writable buffer. It keeps the addresses alive, also beyond `close()`."""
        reservation = self._live()
        view = _View.of(reservation.size).from_address(reservation.base)
        view.reservation = reservation  # type: ignore[attr-defined]
        return view


class _View:
    """ctypes arrays with room for the reservation that they look at, one type for each size."""

    _types: dict[int, type[ctypes.Array[ctypes.c_char]]] = {}

    @classmethod
    def of(cls, size: int) -> type[ctypes.Array[ctypes.c_char]]:
        if size not in cls._types:
            cls._types[size] = type("RangeView", (ctypes.c_char * size,), {})
        return cls._types[size]

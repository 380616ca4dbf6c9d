"""The kernel that copies small pieces, between any two places that the GPU can address: its own memory, a neighbour's
over NVLink, pinned host memory."""

import contextlib
import ctypes
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.gpu.cuda_driver import INSTALL
from forebay.gpu.errors import DeviceError
from forebay.gpu.pieces import Pieces, cut

if TYPE_CHECKING:
    from forebay.gpu.cuda_memory import CudaBackend

CHUNK_BYTES = 64 << 10
"""The kernel gets pieces of at most this size, so that its warps end at about the same time."""

LAUNCH_PIECES = 1 << 16
"""Pieces of one launch; as much room for their descriptors is held twice, on the host and on the device: 6 MB."""

DESCRIPTOR_BYTES = 24


UNIT_BYTES = 4096
"""What a warp copies at once: 8 accesses of 16 bytes for each of its 32 threads, all loads before the first store, so
that a thread block keeps 128 KiB in flight. NVLink needs about 0.8 MB in flight for 390 GB/s at 2 us."""

THREADS = 1024
WARPS = THREADS // 32

NAME = "copy_units"

SOURCE = r"""
typedef unsigned long long u64;

__device__ __forceinline__ uint4 load(const uint4* at) { return __ldcs(at); }
__device__ __forceinline__ void store(uint4* at, uint4 value) { __stcs(at, value); }

// descriptors: count destinations, count sources, count sizes. Unit u is part u % units of piece u / units; a piece has
// at most `units` of UNIT bytes.
extern "C" __global__ void __launch_bounds__(1024, 1)
copy_units(const u64* __restrict__ descriptors, unsigned int count, unsigned int units)
{
    const unsigned int lane = threadIdx.x & 31;
    const u64 warps = (u64)gridDim.x * (blockDim.x >> 5);
    const u64 total = (u64)count * units;
    for (u64 unit = (u64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5); unit < total; unit += warps) {
        const u64 piece = unit / units;
        const u64 begin = (unit - piece * units) * UNIT;
        const u64 size = descriptors[2 * (u64)count + piece];
        if (begin >= size) continue;
        const u64 length = size - begin < UNIT ? size - begin : UNIT;
        char* to = (char*)descriptors[piece] + begin;
        const char* from = (const char*)descriptors[(u64)count + piece] + begin;
        if (((u64)to | (u64)from | length) & 15) {
            for (unsigned int i = lane; i < length; i += 32) to[i] = from[i];
            continue;
        }
        const unsigned int vectors = (unsigned int)(length >> 4);
        uint4 held[UNIT / 512];
        #pragma unroll
        for (int i = 0; i < UNIT / 512; i++)
            if (lane + 32 * i < vectors) held[i] = load((const uint4*)from + lane + 32 * i);
        #pragma unroll
        for (int i = 0; i < UNIT / 512; i++)
            if (lane + 32 * i < vectors) store((uint4*)to + lane + 32 * i, held[i]);
    }
}
""".replace("UNIT", str(UNIT_BYTES))


class CopyKernel:
    """The kernel, and room for the descriptors of two launches: one is filled while the other runs."""

    def __init__(self, backend: "CudaBackend", stream: Any) -> None:
        try:
            import cupy
        except ImportError as error:
            raise DeviceError(
                f"{backend.device} needs the package CuPy to copy ({error}); install it: {INSTALL}"
            ) from error
        self._context = context = backend.context
        self._stream = stream
        with cupy.cuda.Device(backend.device.index):
            self._compiled = cupy.RawKernel(SOURCE, NAME, options=("--std=c++17",))
            self._compiled.compile()
            # Launched by the driver's own call: CuPy's takes longer than the copies of a small list.
            self._function = int(self._compiled.kernel.ptr)
        self._values = (ctypes.c_uint64(), ctypes.c_uint32(), ctypes.c_uint32())
        self._arguments = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in self._values))
        room = LAUNCH_PIECES * DESCRIPTOR_BYTES
        with contextlib.ExitStack() as undo:
            self._staging = backend.pinned(2 * room)
            undo.callback(self._staging.close)
            self._staged = np.frombuffer(memoryview(self._staging.buffer()), np.uint64)
            with context.current() as driver:
                self._descriptors = int(context.call(driver.cuMemAlloc(2 * room)))
                undo.callback(self._free, "cuMemFree", self._descriptors)
                self._events = []
                for _ in range(2):
                    event = context.call(driver.cuEventCreate(int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)))
                    undo.callback(self._free, "cuEventDestroy", event)
                    self._events.append(event)
            self._undo = undo.pop_all()
        self._turns = itertools.cycle((0, 1))

    def _free(self, function: str, handle: Any) -> None:
        with self._context.current() as driver:
            getattr(driver, function)(handle)

    def copy(self, pieces: Pieces, blocks: int) -> None:
        """Launches on at most `blocks` thread blocks."""
        pieces = cut(pieces, CHUNK_BYTES)
        for begin in range(0, len(pieces), LAUNCH_PIECES):
            self._launch(pieces.part(slice(begin, begin + LAUNCH_PIECES)), blocks)

    def _launch(self, pieces: Pieces, blocks: int) -> None:
        call, driver = self._context.call, self._context.driver
        turn, count = next(self._turns), len(pieces)
        call(driver.cuEventSynchronize(self._events[turn]))
        place = turn * LAUNCH_PIECES * DESCRIPTOR_BYTES
        staged = self._staged[place // 8 :]
        for row, array in enumerate((pieces.destinations, pieces.sources, pieces.sizes)):
            staged[row * count : (row + 1) * count] = array
        target = self._descriptors + place
        call(driver.cuMemcpyHtoDAsync(target, self._staging.base + place, count * DESCRIPTOR_BYTES, self._stream))
        units = -(-int(pieces.sizes.max()) // UNIT_BYTES)
        grid = min(blocks, -(-count * units // WARPS))
        for holder, value in zip(self._values, (target, count, units), strict=True):
            holder.value = value
        arguments = ctypes.addressof(self._arguments)
        call(driver.cuLaunchKernel(self._function, grid, 1, 1, THREADS, 1, 1, 0, self._stream, arguments, 0))
        call(driver.cuEventRecord(self._events[turn], self._stream))

    def close(self) -> None:
        self._undo.close()

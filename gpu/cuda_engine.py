"""The copy engines of a cuda device, which copy without its SMs."""

import ctypes
from typing import Any

import numpy as np

from forebay.gpu.cuda_driver import CudaContext
from forebay.gpu.pieces import Pieces

FIRST_BATCH = 16
"""Pieces of the first batch for the engines; each further one has twice as many. A batch begins when all of it is
handed over, at 1 us a piece (measured): while one is copied the next one is."""


class CopyEngine:
    """Hands a whole list to the driver in one call, as arrays, where it has that call (CUDA 13)."""

    def __init__(self, context: CudaContext, stream: Any) -> None:
        self._context = context
        self._stream = stream
        driver = context.driver
        self._batch: Any = None
        status, address, found = driver.cuGetProcAddress(b"cuMemcpyBatchAsync", 13000, 0)
        if int(status) == 0 and int(found) == 0 and address:
            pointer, size = ctypes.c_void_p, ctypes.c_size_t
            kind = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer)
            self._batch = kind(int(address))
        self._attributes = [self._attribute(0), self._attribute(1)]

    def _attribute(self, flags: int) -> Any:
        driver = self._context.driver
        attributes = driver.CUmemcpyAttributes()
        attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        attributes.flags = flags  # 1: CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
        return attributes

    def copy(self, pieces: Pieces, beside_compute: bool) -> None:
        if self._batch is None or len(pieces) < 2:
            call, function = self._context.call, self._context.driver.cuMemcpyAsync
            for target, source, size in zip(
                pieces.destinations.tolist(), pieces.sources.tolist(), pieces.sizes.tolist(), strict=True
            ):
                call(function(target, source, size, self._stream))
            return
        begin, count = 0, FIRST_BATCH
        while begin < len(pieces):
            self._copy_batch(pieces.part(slice(begin, begin + count)), beside_compute)
            begin, count = begin + count, 2 * count

    def _copy_batch(self, pieces: Pieces, beside_compute: bool) -> None:
        arrays = [np.ascontiguousarray(array) for array in (pieces.destinations, pieces.sources, pieces.sizes)]
        first = np.zeros(1, np.uint64)
        attributes = self._attributes[beside_compute].getPtr()
        addresses = [array.ctypes.data for array in arrays]
        status = self._batch(*addresses, len(pieces), attributes, first.ctypes.data, 1, int(self._stream))
        self._context.call((self._context.driver.CUresult(status),))

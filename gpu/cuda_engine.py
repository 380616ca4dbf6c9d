"""The copy engines of a cuda device, which copy without its SMs."""

import contextlib
import ctypes
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from forebay.gpu.cuda_driver import CudaContext
from forebay.gpu.pieces import Pieces

FIRST_BATCH = 16
"""Pieces of the first batch for the engines; each further one has twice as many. A batch begins when all of it is
handed over, at 1 us a piece (measured): while one is copied the next one is."""


ENGINE_STREAMS = 1
"""Batches go to so many streams in turn, so that one could fill the moment between two pieces of another. Within an
H200, 1 to 4 take the same time (1.1 ms for 256 pieces of 2 MiB); not measured over NVLink yet."""

FORK_PIECES = 32
"""Fewer are not worth the further streams."""


class CopyEngine:
    """Hands a whole list to the driver in one call, as arrays, where it has that call (CUDA 13)."""

    def __init__(self, context: CudaContext, stream: Any, streams: int = ENGINE_STREAMS) -> None:
        self._context = context
        self._stream = stream
        self._batch: Any = None
        driver = context.driver
        status, address, found = driver.cuGetProcAddress(b"cuMemcpyBatchAsync", 13000, 0)
        if int(status) == 0 and int(found) == 0 and address:
            pointer, size = ctypes.c_void_p, ctypes.c_size_t
            kind = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer)
            self._batch = kind(int(address))
        self._attributes = [self._attribute(0), self._attribute(1)]
        with contextlib.ExitStack() as undo, context.current():
            flags = int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
            self._fork = self._made(undo, "cuEventDestroy", context.call(driver.cuEventCreate(flags)))
            self._more = [
                (
                    self._made(undo, "cuStreamDestroy", context.stream()),
                    self._made(undo, "cuEventDestroy", context.call(driver.cuEventCreate(flags))),
                )
                for _ in range(streams - 1)
            ]
            self._undo = undo.pop_all()

    def _made(self, undo: contextlib.ExitStack, destroy: str, handle: Any) -> Any:
        undo.callback(self._destroy, destroy, handle)
        return handle

    def _destroy(self, function: str, handle: Any) -> None:
        with self._context.current() as driver:
            getattr(driver, function)(handle)

    def close(self) -> None:
        """Once nothing is on its way any more."""
        self._undo.close()

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
        if len(pieces) < FORK_PIECES or not self._more:
            for batch in _batches(pieces):
                self._copy_batch(batch, beside_compute, self._stream)
            return
        call, driver = self._context.call, self._context.driver
        call(driver.cuEventRecord(self._fork, self._stream))
        streams = itertools.cycle([self._stream, *(stream for stream, _ in self._more)])
        waiting = {int(stream) for stream, _ in self._more}
        for batch, stream in zip(_batches(pieces), streams, strict=False):
            if int(stream) in waiting:  # for what came before on the copier's own stream
                waiting.remove(int(stream))
                call(driver.cuStreamWaitEvent(stream, self._fork, 0))
            self._copy_batch(batch, beside_compute, stream)
        for stream, event in self._more:
            call(driver.cuEventRecord(event, stream))
            call(driver.cuStreamWaitEvent(self._stream, event, 0))

    def _copy_batch(self, pieces: Pieces, beside_compute: bool, stream: Any) -> None:
        arrays = [np.ascontiguousarray(array) for array in (pieces.destinations, pieces.sources, pieces.sizes)]
        first = np.zeros(1, np.uint64)
        attributes = self._attributes[beside_compute].getPtr()
        addresses = [array.ctypes.data for array in arrays]
        status = self._batch(*addresses, len(pieces), attributes, first.ctypes.data, 1, int(stream))
        self._context.call((self._context.driver.CUresult(status),))


def _batches(pieces: Pieces) -> Iterator[Pieces]:
    begin, count = 0, FIRST_BATCH
    while begin < len(pieces):
        yield pieces.part(slice(begin, begin + count))
        begin, count = begin + count, 2 * count

"""What a step needs of the host, on its way to the device and back: written to pinned memory, copied in one piece.

The copy waits in the stream behind the steps ahead, so the pinned memory of a step must not be written again until it
is over: there are a few of each, used in turn.
"""

import ctypes
import mmap
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from forebay.gpu.errors import DeviceError

DEPTH = 3
"""Steps of a lane that may be on the device or waiting there: one more than the lane core launches ahead."""

_ALIGNMENT = 16


def pinned(size: int) -> torch.Tensor:
    """Memory of the host that the device copies from and to by itself: uint8 [size]. Raises DeviceError.

    Not torch's own: once that is dropped, it asks every stream that used it, and aborts the process where one of a
    green context has gone before."""
    runtime = torch.cuda.cudart()
    pages = mmap.mmap(-1, size)
    kind: type[ctypes.Array[ctypes.c_char]] = type("PinnedView", (ctypes.c_char * size,), {})
    view = kind.from_buffer(pages)
    address = ctypes.addressof(view)
    status = int(runtime.cudaHostRegister(address, size, 0))
    if status:
        raise DeviceError(
            f"the host cannot pin {size} bytes of memory (CUDA error {status}); free some, or ask for less"
        )
    # Called before `view` lets go of the pages.
    weakref.finalize(view, runtime.cudaHostUnregister, address).atexit = False
    return torch.frombuffer(view, dtype=torch.uint8)


@dataclass(frozen=True, eq=False)
class Staged:
    """An array of a step: `host` is written, `device` is what the kernels read."""

    host: NDArray[Any]
    device: torch.Tensor


class Staging:
    """`size` bytes of arrays of one step, and `plan_size` bytes for each of the attention's two plans."""

    def __init__(self, size: int, plan_size: int, device: torch.device) -> None:
        self.size = size
        self.plan_size = plan_size
        self._pinned = [pinned(size) for _ in range(DEPTH)]
        self._host = [memory.numpy() for memory in self._pinned]
        self._plans = [(pinned(plan_size), pinned(plan_size)) for _ in range(DEPTH)]
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._sent = [torch.cuda.Event(blocking=True) for _ in range(DEPTH)]
        self._turn = 0
        self._used = 0

    def begin(self) -> None:
        """The next step: waits until its pinned memory is free."""
        self._turn = (self._turn + 1) % DEPTH
        self._sent[self._turn].synchronize()
        self._used = 0

    def array(self, dtype: type[np.generic], *shape: int) -> Staged:
        """Room for one more array of this step, not cleared. The same calls give the same places in every step."""
        kind = np.dtype(dtype)
        count = int(np.prod(shape))
        first = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        self._used = first + count * kind.itemsize
        if self._used > self.size:
            raise ValueError(f"a step needs {self._used} bytes, more than the {self.size} that it is allowed")
        host = self._host[self._turn][first : self._used].view(kind).reshape(shape)
        return Staged(host, self._device[first : self._used].view(_TORCH[kind]).view(shape))

    @property
    def turn(self) -> int:
        """Which of DEPTH pieces of pinned memory the step has."""
        return self._turn

    def use(self, array: Staged, count: int) -> None:
        """This step's arrays are those of an earlier step of the same `turn`, up to the first `count` elements of
        `array`; nothing was asked for since `begin`."""
        first = int(array.host.ctypes.data) - int(self._host[self._turn].ctypes.data)
        self._used = first + count * array.host.itemsize

    def plan(self, number: int) -> torch.Tensor:
        """Pinned memory for plan 0 or 1 of this step."""
        return self._plans[self._turn][number]

    def send(self) -> None:
        """Copies all arrays in the current stream."""
        self._device[: self._used].copy_(self._pinned[self._turn][: self._used], non_blocking=True)

    def sent(self) -> None:
        """Everything that reads this step's pinned memory is in the current stream now."""
        self._sent[self._turn].record()


_TORCH = {
    np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64, np.dtype(np.uint8): torch.uint8,
}  # fmt: skip


class Results:
    """The way back: tokens int32 [n] and stop marks uint8 [n] of up to `rows` sequences in one copy."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._device = torch.zeros(5 * rows, dtype=torch.uint8, device=device)
        self._pinned = [pinned(5 * rows) for _ in range(DEPTH)]
        self._turn = 0

    def places(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the device leaves tokens and stop marks of `rows` sequences."""
        return self._device[: 4 * rows].view(torch.int32), self._device[4 * rows : 5 * rows]

    def fetch(self, rows: int) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
        """Starts the copy in the current stream; the arrays hold it once that is done, until DEPTH more are fetched."""
        self._turn = (self._turn + 1) % DEPTH
        place = self._pinned[self._turn][: 5 * rows]
        place.copy_(self._device[: 5 * rows], non_blocking=True)
        host = place.numpy()
        return host[: 4 * rows].view(np.uint32), host[4 * rows :]

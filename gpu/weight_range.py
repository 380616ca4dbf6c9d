"""One model's weights in addresses of their own, which they keep while their memory comes and goes.

Weights are only read, so a copy in the host's memory stays good: the first eviction makes it, later ones give the
memory up at once, and a restore copies it back under the same addresses. Tensors and CUDA graphs that know these
addresses are valid again then; meanwhile nothing may touch them. It runs on both kinds of device, but only CUDA's uses
it: on a CPU device the weights' file is in the host's memory anyhow.
"""

from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from math import prod

import torch

from forebay.gpu.backend import MemoryBackend, MemorySlab
from forebay.gpu.copies import Copier
from forebay.gpu.errors import DeviceError
from forebay.gpu.handles import Closes
from forebay.gpu.pieces import pieces
from forebay.gpu.weight_shelf import HostShelf, Shelf

ALIGNMENT = 256
"""Bytes; what CUDA's own allocator gives, and what kernels may count on."""


class SlabStock(Closes):
    """Device memory for weights that nobody uses at the moment: what one model gives up the next one takes. It is not
    zeroed, for all of it belongs to this process. One thread at a time."""

    def __init__(self, backend: MemoryBackend, slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self._backend = backend
        self._spare: list[MemorySlab] = []

    @property
    def spare_bytes(self) -> int:
        return len(self._spare) * self.slab_bytes

    def take(self) -> MemorySlab:
        """Raises DeviceError where the device has no memory left."""
        return self._spare.pop() if self._spare else self._backend.slab(self.slab_bytes)

    def give(self, slab: MemorySlab) -> None:
        self._spare.append(slab)

    def close(self) -> None:
        while self._spare:
            self._spare.pop().close()


class WeightRange(Closes):
    """Room for at most `size` bytes of weights; memory is taken slab by slab as tensors are allocated. One thread at a
    time, and not while a step that reads the weights is in flight. Raises DeviceError where there is no memory."""

    def __init__(self, backend: MemoryBackend, size: int, stock: SlabStock, shelf: Shelf, copier: Copier) -> None:
        if size < 1:
            raise DeviceError(f"a range for weights needs at least one byte, not {size}")
        self._stock = stock
        self._shelf = shelf
        self._copier = copier
        self._slabs: list[MemorySlab] = []
        self._used = 0
        self._resident = True
        self.slots = -(-size // stock.slab_bytes)
        self.size = self.slots * stock.slab_bytes
        with ExitStack() as undo:
            self._arena = undo.enter_context(backend.arena(stock.slab_bytes, self.slots))
            undo.callback(self._give_up)
            self._take_slab()
            # Made while there is memory: torch asks the driver about the first byte.
            self._bytes: torch.Tensor | None = self._whole(backend)
            self._undo = undo.pop_all()

    def _whole(self, backend: MemoryBackend) -> torch.Tensor:
        if backend.device.kind == "cpu":
            return torch.frombuffer(self._arena.buffer(), dtype=torch.uint8)
        return torch.as_tensor(self._arena.buffer(), device=f"cuda:{backend.device.index}")

    @property
    def base(self) -> int:
        """Address of the first byte, now and after every restore."""
        return self._arena.base

    @property
    def resident(self) -> bool:
        """Whether the weights are on the device."""
        return self._resident

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the range, on the device, behind those that were allocated before; its values are whatever is
        there. Raises DeviceError where the range is too small, or the device has no memory left."""
        if self._bytes is None or not self._resident or self._shelf.copy_of(self) is not None:
            raise DeviceError("these weights were away, or are closed: nothing can be allocated among them any more")
        begin = -(-self._used // ALIGNMENT) * ALIGNMENT
        end = begin + prod(shape) * dtype.itemsize
        if end > self.size:
            raise DeviceError(
                f"a range of {self.size} bytes for weights is too small for a tensor of shape {tuple(shape)} "
                f"({end - begin} bytes) behind the {self._used} that are used"
            )
        while len(self._slabs) * self._stock.slab_bytes < end:
            self._take_slab()
        self._used = end
        return self._bytes[begin:end].view(dtype).view(*shape)

    def evict(self) -> None:
        """Gives the memory up; returns when another may use it. Raises DeviceError, and keeps it, where the host has no
        memory for a copy."""
        if self._bytes is None or not self._resident:
            return
        if self._shelf.copy_of(self) is None:
            self._make_copy()
        self._shelf.hold(self)
        self._resident = False
        self._give_up()

    def _make_copy(self) -> None:
        copy = self._shelf.take(self, len(self._slabs))
        try:
            with copy.hold():
                self._wait([self._begin(slot, base, out=True) for slot, base in enumerate(copy.bases)])
        except BaseException:
            self._shelf.drop(self)
            raise

    def restore(self) -> None:
        """Takes memory and copies the weights back; returns when they are there. Raises DeviceError, and holds no
        memory of the device, where that does not succeed."""
        if self._resident:
            return
        copy = self._shelf.copy_of(self)
        if self._bytes is None or copy is None:
            raise DeviceError("these weights are closed, or no copy of them is left: load them again")
        copies: list[Future[None]] = []
        try:
            with copy.hold():
                try:
                    for slot, base in enumerate(copy.bases):
                        self._take_slab()  # mapping one takes about as long as copying one, and runs beside it
                        copies.append(self._begin(slot, base, out=False))
                finally:
                    wait(copies)
                self._wait(copies)
        except BaseException:
            self._give_up()
            raise
        self._resident = True
        self._shelf.loosen(self)

    def _begin(self, slot: int, host: int, *, out: bool) -> "Future[None]":
        device, size = self.base + slot * self._stock.slab_bytes, self._stock.slab_bytes
        target, source = (host, device) if out else (device, host)
        return self._copier.copy(pieces([target], [source], size), beside_compute=True)

    @staticmethod
    def _wait(copies: "list[Future[None]]") -> None:
        wait(copies)
        for copy in copies:
            copy.result()

    def _take_slab(self) -> None:
        slab = self._stock.take()
        try:
            self._arena.map(len(self._slabs), slab)
        except BaseException:
            self._stock.give(slab)
            raise
        self._slabs.append(slab)

    def _give_up(self) -> None:
        while self._slabs:
            slot = len(self._slabs) - 1
            self._arena.unmap(slot)
            self._stock.give(self._slabs.pop())

    @property
    def closed(self) -> bool:
        return self._bytes is None

    def close(self) -> None:
        """Gives everything back; nothing may touch its tensors any more. Closing twice is fine."""
        self._bytes = None
        self._shelf.drop(self)
        self._undo.close()


class WeightPlaces(Closes):
    """Where one device keeps the weights that come and go: its memory, and at most `host_bytes` of the host's (0: as
    many as they need). Another `shelf` may take the host's place before the first range is made; it is its owner's to
    close. Close all ranges first."""

    def __init__(self, backend: MemoryBackend, slab_bytes: int, host_bytes: int = 0) -> None:
        self._backend = backend
        with ExitStack() as undo:
            self.copier = undo.enter_context(backend.copier())
            self.stock = undo.enter_context(SlabStock(backend, slab_bytes))
            self.host = undo.enter_context(HostShelf(backend, slab_bytes, host_bytes))
            self._undo = undo.pop_all()
        self.shelf: Shelf = self.host

    def range(self, size: int) -> WeightRange:
        """Raises DeviceError."""
        return WeightRange(self._backend, size, self.stock, self.shelf, self.copier)

    def taken(self, size: int, tensors: int) -> int:
        """Memory that `size` bytes in so many tensors take here."""
        slab_bytes = self.stock.slab_bytes
        return -(-(size + ALIGNMENT * tensors) // slab_bytes) * slab_bytes

    def close(self) -> None:
        self._undo.close()

"""One range of device memory that all models of a device share for their KV blocks.

Which blocks a model may touch is decided elsewhere (forebay.sched); here a model only gets its way of looking at the
range. Block i of a model lies at `i * block_bytes` from the range's start, for every model's own block size, so blocks
of two models overlap in memory and the one who hands them out keeps them apart by bytes.
"""

from contextlib import ExitStack
from dataclasses import dataclass

import torch

from forebay.gpu.backend import MemoryBackend, MemorySlab
from forebay.gpu.device_name import DeviceName
from forebay.gpu.errors import DeviceError
from forebay.gpu.memfd_backend import MemfdBackend
from forebay.gpu.memory import Slab, require_slab_bytes
from forebay.transport.messages import BLOCK_TOKENS


@dataclass(frozen=True)
class KVShape:
    """What one model keeps for a token: keys and values of all layers."""

    layers: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    block_tokens: int = BLOCK_TOKENS

    @property
    def block(self) -> tuple[int, int, int, int, int]:
        """Shape of one block: layers, keys and values, tokens, KV heads, head size."""
        return (self.layers, 2, self.block_tokens, self.kv_heads, self.head_size)

    @property
    def block_bytes(self) -> int:
        elements = self.layers * 2 * self.block_tokens * self.kv_heads * self.head_size
        return elements * int(self.dtype.itemsize)


class KVPool:
    """`memory` bytes, rounded down to whole slabs, mapped in one range of a device's addresses. Closed by its owner,
    the device. Without a `backend` it is memory of the host.

    Slabs may be away (lent to others): nothing may read a view as a whole, only blocks that the core handed out."""

    def __init__(self, memory: int, slab_bytes: int, backend: MemoryBackend | None = None) -> None:
        require_slab_bytes(slab_bytes)
        slots = memory // slab_bytes
        if slots < 1:
            raise DeviceError(
                f"memory is {memory} bytes, less than one slab of {slab_bytes}; raise memory or lower slab_bytes"
            )
        self.slab_bytes = slab_bytes
        self.capacity = slots * slab_bytes
        backend = backend or MemfdBackend(DeviceName("cpu", 0))
        self._backend = backend
        self._slabs: list[MemorySlab] = []
        self._dropped: set[int] = set()
        with ExitStack() as undo:
            self._range = backend.arena(slab_bytes, slots)
            undo.callback(self._range.close)
            undo.callback(self._close_slabs)
            for slot in range(slots):
                slab = backend.slab(slab_bytes)
                self._slabs.append(slab)
                self._range.map(slot, slab)
            self._bytes: torch.Tensor | None = self._whole(backend.device)
            self._undo = undo.pop_all()

    def _whole(self, device: DeviceName) -> torch.Tensor:
        """All of the range, uint8[capacity]. Made while every slab is there: torch asks the driver about the first."""
        if device.kind == "cpu":
            return torch.frombuffer(self._range.buffer(), dtype=torch.uint8)
        return torch.as_tensor(self._range.buffer(), device=f"cuda:{device.index}")

    @property
    def base(self) -> int:
        """Address of the first byte; block i of a shape begins `i * block_bytes` behind it."""
        return self._range.base

    @property
    def resident(self) -> int:
        """Bytes of the pool that take memory: on `cpu:N` those that have been written so far."""
        there = (slab for place, slab in enumerate(self._slabs) if place not in self._dropped)
        return sum(slab.resident if isinstance(slab, Slab) else slab.size for slab in there)

    @property
    def slabs(self) -> tuple[MemorySlab, ...]:
        """The slabs in the order in which they lie in the range."""
        return tuple(self._slabs)

    def replace(self, place: int, slab: MemorySlab) -> None:
        """Puts another slab in the place of one that is nobody's any more, and closes that. Nothing may be touching its
        part of the range. Owns the new one from now on. Raises DeviceError for a slab of another size."""
        self._range.replace(place, slab)
        old, self._slabs[place] = self._slabs[place], slab
        old.close()

    def drop(self, place: int) -> None:
        """Gives the memory of a slab back to the device. Nothing may touch its part of the range from now on; one that
        is dropped already stays so."""
        if place not in self._dropped:
            self._range.unmap(place)
            self._slabs[place].close()
            self._dropped.add(place)

    def fill(self, place: int) -> None:
        """Gives a slab that was dropped memory again, zeros. Raises DeviceError, OSError where the device has none."""
        if place in self._dropped:
            with ExitStack() as undo:
                slab = self._backend.slab(self.slab_bytes)
                undo.callback(slab.close)
                self._range.map(place, slab)
                undo.pop_all()
            self._slabs[place] = slab
            self._dropped.remove(place)

    def blocks(self, shape: KVShape) -> int:
        """How many blocks of this shape the whole pool holds."""
        return self.capacity // shape.block_bytes

    def view(self, shape: KVShape) -> torch.Tensor:
        """The whole pool as blocks of one shape: [blocks, layers, 2, 16, kv_heads, head_size]."""
        blocks = self.blocks(shape)
        if blocks < 1:
            raise DeviceError(f"a block of {shape.block_bytes} bytes does not fit a pool of {self.capacity}")
        if self._bytes is None:
            raise DeviceError("this pool is closed")
        return self._bytes[: blocks * shape.block_bytes].view(shape.dtype).view(blocks, *shape.block)

    def close(self) -> None:
        """Gives all slabs back; their memory goes when the last view does. Closing twice is fine."""
        self._bytes = None
        self._undo.close()

    def _close_slabs(self) -> None:
        for slab in self._slabs:
            slab.close()
        self._slabs.clear()

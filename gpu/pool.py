"""One range of device memory that all models of a device share for their KV blocks.

Which blocks a model may touch is decided elsewhere (forebay.sched); here a model only gets its way of looking at the
range. Block i of a model lies at `i * block_bytes` from the range's start, for every model's own block size, so blocks
of two models overlap in memory and the one who hands them out keeps them apart by bytes.
"""

from contextlib import ExitStack
from dataclasses import dataclass

import torch

from forebay.gpu.errors import DeviceError
from forebay.gpu.memory import Slab, SlabRange, require_slab_bytes
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
    """`memory` bytes, rounded down to whole slabs, mapped in one range. Closed by its owner, the device."""

    def __init__(self, memory: int, slab_bytes: int) -> None:
        require_slab_bytes(slab_bytes)
        slots = memory // slab_bytes
        if slots < 1:
            raise DeviceError(
                f"memory is {memory} bytes, less than one slab of {slab_bytes}; raise memory or lower slab_bytes"
            )
        self.slab_bytes = slab_bytes
        self.capacity = slots * slab_bytes
        self._slabs: list[Slab] = []
        with ExitStack() as undo:
            self._range = SlabRange(slab_bytes, slots)
            undo.callback(self._range.close)
            undo.callback(self._close_slabs)
            for slot in range(slots):
                slab = Slab(slab_bytes)
                self._slabs.append(slab)
                self._range.map(slot, slab)
            self._undo = undo.pop_all()

    @property
    def base(self) -> int:
        """Address of the first byte; block i of a shape begins `i * block_bytes` behind it."""
        return self._range.base

    @property
    def resident(self) -> int:
        """Bytes of the pool that have been written so far."""
        return sum(slab.resident for slab in self._slabs)

    @property
    def slabs(self) -> tuple[Slab, ...]:
        """The slabs in the order in which they lie in the range."""
        return tuple(self._slabs)

    def replace(self, place: int, slab: Slab) -> None:
        """Puts another slab in the place of one that is nobody's any more, and closes that. Nothing may be touching its
        part of the range. Owns the new one from now on. Raises DeviceError for a slab of another size."""
        self._range.replace(place, slab)
        old, self._slabs[place] = self._slabs[place], slab
        old.close()

    def blocks(self, shape: KVShape) -> int:
        """How many blocks of this shape the whole pool holds."""
        return self.capacity // shape.block_bytes

    def view(self, shape: KVShape) -> torch.Tensor:
        """The whole pool as blocks of one shape: [blocks, layers, 2, 16, kv_heads, head_size]."""
        blocks = self.blocks(shape)
        if blocks < 1:
            raise DeviceError(f"a block of {shape.block_bytes} bytes does not fit a pool of {self.capacity}")
        elements = blocks * shape.block_bytes // shape.dtype.itemsize
        flat = torch.frombuffer(self._range.buffer(), dtype=shape.dtype, count=elements)
        return flat.view(blocks, *shape.block)

    def close(self) -> None:
        """Gives all slabs back; their memory goes when the last view does. Closing twice is fine."""
        self._undo.close()

    def _close_slabs(self) -> None:
        for slab in self._slabs:
            slab.close()
        self._slabs.clear()

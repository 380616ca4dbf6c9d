"""A model on a CUDA device: what all of its lanes use together."""

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

import torch

from forebay.gpu.cuda_attention import PagedAttention
from forebay.gpu.cuda_step import CudaStep
from forebay.gpu.errors import StepError
from forebay.gpu.sequences import Sequence


class Model(Protocol):
    """FastModel or TransformersModel."""

    @property
    def graphs(self) -> bool: ...

    def logits(self, tokens: torch.Tensor, step: CudaStep) -> torch.Tensor | None: ...


class LastTokens:
    """The token that each sequence drew last, on the device: `values` int32 [slots + 1], the last place nobody's. A
    sequence has a slot from its first draw until it is forgotten by everybody, steps in flight included."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.values = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self.nobody = slots
        self._free = deque(range(slots))

    def slot(self, sequence: Sequence) -> int:
        """Raises StepError if there are more sequences than slots."""
        if sequence.slot is None:
            sequence.slot = _Slot(self._free)
        assert isinstance(sequence.slot, _Slot)
        return sequence.slot.number


class _Slot:
    """Goes back when it is forgotten."""

    __slots__ = ("_free", "number")

    def __init__(self, free: deque[int]) -> None:
        self._free = free
        try:
            self.number = free.popleft()
        except IndexError:
            self.number = -1
            raise StepError("more sequences are open than a model on this device can have; close some") from None

    def __del__(self) -> None:
        if self.number >= 0:
            self._free.append(self.number)


@dataclass(frozen=True, eq=False)
class ModelOnDevice:
    """What the lanes of one model share. `layers` are the pool as its layers see it, each [blocks, 2, 16, kv_heads,
    head_size]; `processors` is how many SMs the device has."""

    name: str
    model: Model
    attention: PagedAttention
    layers: Items[torch.Tensor]
    last_tokens: LastTokens
    vocabulary: int
    end_of_sequence: frozenset[int]
    max_context: int
    max_sequences: int
    step_tokens: int
    processors: int

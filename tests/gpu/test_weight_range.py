"""Weights that come and go, bit for bit and at the same addresses, and what is kept of them in the host's memory."""

from collections.abc import Iterator

import pytest
import torch

from forebay.gpu.backend import MemoryBackend, memory_backend
from forebay.gpu.decoder import fast_shape
from forebay.gpu.decoder_weights import merged_weights
from forebay.gpu.errors import DeviceError
from forebay.gpu.weight_range import ALIGNMENT, SlabStock, WeightPlaces, WeightRange
from forebay.gpu.weight_shelf import HostShelf
from tests.gpu.test_decoder import MODELS, pool_for, reference, run, text_of
from tests.gpu.test_memory import descriptors, mappings

SLAB = 1 << 20


@pytest.fixture
def backend() -> Iterator[MemoryBackend]:
    with memory_backend("cpu:0") as backend:
        yield backend


@pytest.fixture
def place(backend: MemoryBackend) -> Iterator[WeightPlaces]:
    with WeightPlaces(backend, SLAB) as place:
        yield place


def filled(weights: WeightRange, seed: int) -> list[torch.Tensor]:
    """Tensors of several shapes and types, with random bytes."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for shape, dtype in (((300, 700), torch.bfloat16), ((5,), torch.float32), ((2, 3, 1001), torch.float16)):
        tensor = weights.allocate(shape, dtype)
        tensor.copy_(torch.randn(shape, generator=generator))
        tensors.append(tensor)
    return tensors


def test_tensors_are_aligned_and_apart_and_end_with_the_range(place: WeightPlaces) -> None:
    with place.range(SLAB + 1) as weights:
        assert weights.size == 2 * SLAB
        assert place.taken(SLAB, 3) == 2 * SLAB
        first, second, third = filled(weights, 1)
        for tensor in (first, second, third):
            assert tensor.data_ptr() % ALIGNMENT == 0
            assert weights.base <= tensor.data_ptr() < weights.base + weights.size
        assert first.data_ptr() + first.nbytes <= second.data_ptr()
        assert second.data_ptr() + second.nbytes <= third.data_ptr()
        with pytest.raises(DeviceError, match=r"too small for a tensor of shape \(1024, 1024\) \(2097152 bytes\)"):
            weights.allocate((1024, 1024), torch.float16)
        used = -(-(third.data_ptr() + third.nbytes - weights.base) // ALIGNMENT) * ALIGNMENT
        rest = weights.allocate((weights.size - used,), torch.uint8)
        assert rest.data_ptr() + rest.nbytes == weights.base + weights.size
        with pytest.raises(DeviceError, match="too small"):
            weights.allocate((1,), torch.uint8)


def test_weights_come_back_bit_for_bit_at_the_same_addresses(place: WeightPlaces) -> None:
    with place.range(5 * SLAB) as weights:
        tensors = filled(weights, 1)
        tensors.append(weights.allocate((2 * SLAB,), torch.uint8).random_())
        before = [(tensor.data_ptr(), tensor.clone()) for tensor in tensors]
        for _ in range(3):
            weights.evict()
            assert not weights.resident
            assert place.stock.spare_bytes == 3 * SLAB
            with place.range(3 * SLAB) as other:
                other.allocate((3 * SLAB,), torch.uint8).fill_(7)  # in the memory that was given up
                assert not place.stock.spare_bytes
            weights.restore()
            assert weights.resident
            for tensor, (address, value) in zip(tensors, before, strict=True):
                assert tensor.data_ptr() == address
                assert torch.equal(tensor, value)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_model_computes_the_same_after_its_weights_were_away_and_fits_into_what_was_announced(
    place: WeightPlaces, name: str
) -> None:
    model = reference(MODELS[name])
    shape = fast_shape(model.config)
    assert shape is not None
    parameters = list(model.parameters())
    rotary = 2 * 64 * shape.head_size * 4
    taken = place.taken(sum(parameter.nbytes for parameter in parameters) + rotary, len(parameters) + 2)
    text = text_of(40, 1)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([text])).logits[0]
    with place.range(taken) as weights:
        merged = merged_weights(model, shape, weights.allocate, 64)

        def logits() -> torch.Tensor:
            found = run(merged, pool_for(merged, 4), (text, 0, len(text), [3, 1, 0]), keep=None)
            assert found is not None
            return found

        before = logits()
        torch.testing.assert_close(before, expected, rtol=1e-4, atol=1e-4)
        weights.evict()
        with place.range(taken) as other:
            other.allocate((taken,), torch.uint8).fill_(255)
        weights.restore()
        assert torch.equal(logits(), before)


def test_moving_twice_is_moving_once(place: WeightPlaces) -> None:
    with place.range(SLAB) as weights:
        weights.restore()
        weights.evict()
        weights.evict()
        assert place.stock.spare_bytes == SLAB
        with pytest.raises(DeviceError, match="were away"):
            weights.allocate((1,), torch.uint8)
        weights.restore()
        assert place.stock.spare_bytes == 0


def test_a_copy_is_made_once(place: WeightPlaces) -> None:
    with place.range(2 * SLAB) as weights:
        weights.allocate((2 * SLAB,), torch.uint8)
        weights.evict()
        copy = place.shelf.copy_of(weights)
        weights.restore()
        weights.evict()
        assert copy is not None
        assert place.shelf.copy_of(weights).bases == copy.bases  # type: ignore[union-attr]
        assert place.host.bytes == 2 * SLAB
        weights.restore()
        with pytest.raises(DeviceError, match="were away"):
            weights.allocate((1,), torch.uint8)


def test_the_copy_of_weights_that_are_there_makes_room_for_that_of_others(
    backend: MemoryBackend, place: WeightPlaces
) -> None:
    place.shelf = shelf = HostShelf(backend, SLAB, limit=2 * SLAB)
    with place.range(2 * SLAB) as first, place.range(SLAB) as second, place.range(2 * SLAB) as third:
        one, two = filled(first, 1), filled(second, 2)
        one.append(first.allocate((SLAB,), torch.uint8).random_())
        third.allocate((2 * SLAB,), torch.uint8)
        values = [tensor.clone() for tensor in (*one, *two)]
        first.evict()
        with pytest.raises(DeviceError, match=f"1048576 bytes.*{2 * SLAB} bytes hold.*weights_host is {2 * SLAB}"):
            second.evict()
        assert second.resident
        first.restore()
        second.evict()
        assert place.shelf.copy_of(first) is None, "it may go: the weights are on the device"
        with pytest.raises(DeviceError, match="weights_host"):
            third.evict()
        assert place.shelf.copy_of(second) is not None, "the only one there is"
        second.restore()
        first.evict()
        first.restore()
        assert all(torch.equal(a, b) for a, b in zip((*one, *two), values, strict=True))
    shelf.close()


class FullDevice:
    """A device whose memory is used up from some moment on."""

    def __init__(self, backend: MemoryBackend) -> None:
        self.backend = backend
        self.left = 1 << 30

    def slab(self, size: int) -> object:
        if size > self.left:
            raise DeviceError("the device has no memory left")
        self.left -= size
        return self.backend.slab(size)

    def __getattr__(self, name: str) -> object:
        return getattr(self.backend, name)


def test_a_device_without_memory_changes_nothing(backend: MemoryBackend, place: WeightPlaces) -> None:
    device = FullDevice(backend)
    place.stock = SlabStock(device, SLAB)  # type: ignore[arg-type]
    with place.range(2 * SLAB) as weights:
        tensors = [*filled(weights, 1), weights.allocate((SLAB,), torch.uint8).random_()]
        values = [tensor.clone() for tensor in tensors]
        weights.evict()
        place.stock.close()
        device.left = SLAB
        with pytest.raises(DeviceError, match="no memory left"):
            weights.restore()
        assert not weights.resident
        assert place.stock.spare_bytes == SLAB
        with place.range(3 * SLAB) as other, pytest.raises(DeviceError, match="no memory left"):
            other.allocate((2 * SLAB,), torch.uint8)
        assert place.stock.spare_bytes == SLAB
        device.left = SLAB
        weights.restore()
        assert all(torch.equal(a, b) for a, b in zip(tensors, values, strict=True))
    place.stock.close()


def test_weights_that_were_closed_do_not_come_back(place: WeightPlaces) -> None:
    weights = place.range(SLAB)
    weights.evict()
    weights.close()
    weights.close()
    assert weights.closed
    assert place.shelf.copy_of(weights) is None
    with pytest.raises(DeviceError, match="load them again"):
        weights.restore()
    with pytest.raises(DeviceError, match="at least one byte"):
        place.range(0)


def test_nothing_is_left_behind(backend: MemoryBackend) -> None:
    before = descriptors(), mappings()
    with WeightPlaces(backend, SLAB) as place:
        for _ in range(3):
            with place.range(2 * SLAB) as weights:
                weights.allocate((2 * SLAB,), torch.uint8)
                weights.evict()
                weights.restore()
    del weights, place
    assert descriptors() == before[0]
    assert mappings() == before[1]

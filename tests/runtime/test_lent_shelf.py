"""Weights that are away in memory that others lend: bit for bit, whatever the lenders want back meanwhile."""

from collections.abc import Iterator

import pytest
import torch

from forebay.gpu.backend import memory_backend
from forebay.gpu.errors import DeviceError
from forebay.gpu.weight_range import WeightPlaces, WeightRange
from forebay.runtime.lent_shelf import LentShelf
from tests.runtime.lending_hub import until
from tests.runtime.lending_place import SLAB, Place, a_place, libraries_are_up


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    libraries_are_up()


@pytest.fixture
def place() -> Iterator[Place]:
    with a_place() as made:
        yield made


@pytest.fixture
def places() -> Iterator[WeightPlaces]:
    with memory_backend("cpu:0") as backend, WeightPlaces(backend, SLAB) as places:
        yield places


def filled(weights: WeightRange, slabs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights, and what they are to be."""
    tensor = weights.allocate((slabs * SLAB,), torch.uint8).random_()
    return tensor, tensor.clone()


def test_weights_go_to_a_neighbour_and_come_back(place: Place, places: WeightPlaces) -> None:
    lender = place.lender(slabs=3)
    shelf = LentShelf(place.borrower())
    places.shelf = shelf
    with places.range(3 * SLAB) as weights:
        tensor, expected = filled(weights, 3)
        for _ in range(2):
            weights.evict()
            assert shelf.where(weights) == "peer"
            with places.range(3 * SLAB) as other:
                filled(other, 3)
            weights.restore()
            assert torch.equal(tensor, expected)
        assert place.free(lender.name) == 0, "the copy is kept for the next time"
    assert shelf.where(weights) == "nowhere"
    place.until_free(lender, 3)
    assert places.host.bytes == 0
    shelf.close()


def test_a_lender_that_wants_its_memory_back_has_it_and_the_weights_are_right(
    place: Place, places: WeightPlaces
) -> None:
    lender = place.lender(slabs=2)
    shelf = LentShelf(place.borrower())
    places.shelf = shelf
    with places.range(2 * SLAB) as weights:
        tensor, expected = filled(weights, 2)
        weights.evict()
        lender.take_back(2 * SLAB, 5.0)
        until(lambda: shelf.where(weights), "host".__eq__)
        weights.restore()
        assert torch.equal(tensor, expected)
    shelf.close()


def test_without_room_copies_that_are_not_needed_go_first(place: Place, places: WeightPlaces) -> None:
    place.lender(slabs=2)
    shelf = LentShelf(place.borrower(host_bytes=0))
    places.shelf = shelf
    with places.range(2 * SLAB) as first, places.range(2 * SLAB) as second:
        (one, expected), _ = filled(first, 2), filled(second, 2)
        first.evict()
        with pytest.raises(DeviceError, match="no copy of 131072 bytes of weights can be made in lent memory: "):
            second.evict()
        assert second.resident
        first.restore()
        second.evict()
        assert shelf.copy_of(first) is None
        assert shelf.where(second) == "peer"
        assert torch.equal(one, expected)
    shelf.close()

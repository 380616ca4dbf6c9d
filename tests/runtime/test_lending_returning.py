"""What fell back to the host is lent memory again once there is some, never at the app's cost."""

from collections.abc import Iterator

import pytest

from forebay.runtime.client import Borrower, Lender
from forebay.runtime.lending_errors import LendingError
from tests.runtime.lending_hub import until
from tests.runtime.lending_place import SLAB, Place, a_place, filled, libraries_are_up


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    libraries_are_up()


@pytest.fixture
def place() -> Iterator[Place]:
    with a_place() as made:
        yield made


def lends(place: Place, gpu: int, slabs: int) -> Lender:
    """One more lender, whose slabs may be taken at once."""
    lender = place.lender(gpu)
    lender.offer(slabs * SLAB)
    return lender


@pytest.mark.parametrize("ready", [0, 64 * SLAB])
def test_what_fell_back_is_lent_again_when_there_is_something_to_lend(place: Place, ready: int) -> None:
    lender = place.lender(0, 10)
    borrower = place.borrower(return_s=0.02, ready_bytes=ready)
    with borrower.allocate(10 * SLAB) as loan:
        data, address = filled(loan), loan.address
        assert lender.take_back(10 * SLAB, 5.0).missing == 0
        assert loan.where == "host"
        lender.offer(4 * SLAB)
        until(lambda: loan.where, "mixed".__eq__)
        until(lambda: borrower.status().peer, (4 * SLAB).__eq__)
        assert loan.read(0, loan.bytes) == data
        other = lends(place, 1, 6)
        until(lambda: loan.where, "peer".__eq__)
        assert loan.read(0, loan.bytes) == data
        assert (loan.address, loan.reason) == (address, "")
        until(lambda: borrower.status().host, (0).__eq__)
        assert {piece.place for piece in loan.pieces()} == {lender.name, other.name}
        place.hub.until(lambda status: {lease.state for lease in status.leases} == {"active"})
    until(lambda: (place.free(lender.name), place.free(other.name)), (4, 6).__eq__)


def test_a_loan_that_began_on_the_host_is_lent_memory_later(place: Place) -> None:
    borrower = place.borrower(return_s=0.02)
    with borrower.allocate(2 * SLAB) as loan:
        data = filled(loan)
        assert loan.where == "host"
        lends(place, 0, 2)
        until(lambda: loan.where, "peer".__eq__)
        assert loan.read(0, loan.bytes) == data


def test_nothing_moves_while_the_app_is_at_it(place: Place) -> None:
    borrower = place.borrower(return_s=0.02)
    with borrower.allocate(2 * SLAB) as loan:
        with loan.hold():
            lender = lends(place, 0, 2)
            # It has asked, found its slots in use, and given back what it got.
            until(lambda: place.hub.status().counters, lambda counters: dict(counters)["grants"] >= 2)
            assert loan.where == "host"
        data = filled(loan)
        until(lambda: loan.where, "peer".__eq__)
        assert loan.read(0, loan.bytes) == data
        assert lender.take_back(2 * SLAB, 5.0).missing == 0
        assert loan.read(0, loan.bytes) == data


def test_whoever_does_not_want_that_stays_where_it_is(place: Place) -> None:
    borrower = place.borrower(return_s=None)
    with borrower.allocate(SLAB) as loan:
        assert loan.where == "host"
        place.lender(0, 1)
        with borrower.allocate(SLAB) as other:
            assert other.where == "peer"
        assert loan.where == "host"
    with pytest.raises(LendingError, match="return_s is 0"):
        Borrower(place.hub.endpoint, 1, slab_bytes=SLAB, return_s=0)

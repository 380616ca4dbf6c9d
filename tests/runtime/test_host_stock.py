"""Host memory is ready before lent memory is asked back, within its bounds, and comes back and goes like the rest."""

from collections.abc import Iterator

import pytest

from forebay.runtime import host_budget, host_stock
from forebay.runtime.borrower import BorrowerStatus
from forebay.runtime.client import Borrower
from forebay.runtime.host_budget import HostBudget
from tests.runtime.lending_hub import until
from tests.runtime.lending_place import SLAB, Place, a_place, filled, libraries_are_up

MANY = 64 * SLAB


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    libraries_are_up()


@pytest.fixture
def place() -> Iterator[Place]:
    with a_place() as made:
        yield made


def until_ready(borrower: Borrower, slabs: int) -> BorrowerStatus:
    found: BorrowerStatus = until(borrower.status, lambda status: status.ready == slabs * SLAB)
    return found


def test_what_is_lent_has_a_place_on_the_host_before_it_is_asked_back(place: Place) -> None:
    lender = place.lender(0, 4)
    borrower = place.borrower(ready_bytes=MANY)
    with borrower.allocate(4 * SLAB) as loan:
        data = filled(loan)
        assert until_ready(borrower, 4).host == 0
        made: list[int] = []
        borrower._memory.host_slab = lambda size, zero=True: made.append(size)  # type: ignore[assignment, method-assign, misc, return-value]
        assert lender.take_back(4 * SLAB, 5.0).missing == 0
        assert made == [], "all of it was ready"
        status = borrower.status()
        assert (loan.where, status.host, status.ready) == ("host", 4 * SLAB, 0)
        assert loan.read(0, loan.bytes) == data
    status = until_ready(borrower, 4)
    assert (status.host, status.peer) == (0, 0), "it is kept for the next one"


def test_what_nobody_needs_any_more_goes_after_a_while(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_stock, "LINGER_S", 0.05)
    place.lender(0, 3)
    borrower = place.borrower(ready_bytes=MANY)
    first = borrower.allocate(2 * SLAB)
    with borrower.allocate(SLAB) as second:
        assert second.where == "peer"
        until_ready(borrower, 3)
    until_ready(borrower, 2)
    first.release()
    until_ready(borrower, 0)


def test_what_is_kept_ready_has_bounds(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    lender = place.lender(0, 4)
    bounded = place.borrower(ready_bytes=2 * SLAB)
    poor = place.borrower(8, ready_bytes=MANY, host_bytes=SLAB)
    with bounded.allocate(2 * SLAB) as loan, poor.allocate(2 * SLAB) as other:
        until_ready(bounded, 2)
        until_ready(poor, 1)
        with bounded.allocate(SLAB) as third:  # nothing is left to lend: a ready one is used, and made again
            assert third.where == "host"
            assert until_ready(bounded, 2).host == SLAB
        data = filled(other)
        assert lender.take_back(SLAB, 5.0).missing == 0
        assert loan.where == "mixed" or other.where == "mixed"
        assert other.read(0, other.bytes) == data
    budget = HostBudget(None)
    monkeypatch.setattr(host_budget, "available", lambda: 2 * host_budget.RESERVE + 2 * SLAB)
    assert budget.set_aside(SLAB)
    assert not budget.set_aside(2 * SLAB), "as much is left for others"
    assert budget.take(2 * SLAB), "who has a use for it may have it"


def test_on_the_cpu_nothing_is_kept_unless_it_is_asked_for(place: Place) -> None:
    lender = place.lender(0, 2)
    borrower = place.borrower()
    with borrower.allocate(2 * SLAB) as loan:
        data = filled(loan)
        assert lender.take_back(2 * SLAB, 5.0).missing == 0
        assert loan.read(0, loan.bytes) == data
        assert borrower.status().ready == 0
    assert borrower.status().ready == 0


def test_memory_that_was_used_before_is_zero_for_a_new_loan(place: Place) -> None:
    lender = place.lender(0, 1)
    borrower = place.borrower(ready_bytes=MANY)
    with borrower.allocate(SLAB) as loan:
        filled(loan)
        until_ready(borrower, 1)
        assert lender.take_back(SLAB, 5.0).missing == 0
    until_ready(borrower, 1)
    with borrower.allocate(SLAB) as loan:
        assert loan.where == "host"
        assert loan.read(0, SLAB) == bytes(SLAB)


def test_memory_that_cannot_be_made_ready_is_made_when_it_is_needed(place: Place) -> None:
    lender = place.lender(0, 2)
    borrower = place.borrower(ready_bytes=MANY)
    prepare = borrower._memory.prepare
    failed: list[object] = []

    def fail(slab: object) -> None:
        failed.append(slab)
        raise OSError("planted")

    borrower._memory.prepare = fail  # type: ignore[assignment, method-assign]
    with borrower.allocate(2 * SLAB) as loan:
        data = filled(loan)
        until(lambda: len(failed), (2).__eq__)
        until_ready(borrower, 0)
        assert lender.take_back(2 * SLAB, 5.0).missing == 0
        assert (loan.where, borrower.status().host) == ("host", 2 * SLAB)
        assert loan.read(0, loan.bytes) == data
        borrower._memory.prepare = prepare  # type: ignore[method-assign]

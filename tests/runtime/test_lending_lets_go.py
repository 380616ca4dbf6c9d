"""A borrower lets go of every lease, whatever happens between its grant and its end."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from forebay.gpu.errors import DeviceError
from forebay.gpu.memory import SlabRange
from forebay.runtime import leasing
from forebay.runtime.client import Borrower, Lender, Loan, Revocation
from forebay.runtime.loan_slots import LoanSlots
from forebay.sched.lending_events import FromPartyLink, Wish
from forebay.transport.messages import Borrow, RevokeLease
from tests.runtime.lending_hub import until
from tests.runtime.lending_place import SLAB, Place, a_place, filled, libraries_are_up


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    libraries_are_up()


@pytest.fixture
def place() -> Iterator[Place]:
    with a_place() as made:
        yield made


class Gate:
    """Holds every handover from now on, until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()
        fetch = leasing.fetch

        async def held(*given: Any) -> dict[int, int]:
            self.reached.set()
            while not self._opened.is_set():  # noqa: ASYNC110 (another thread opens it)
                await asyncio.sleep(0.002)
            return await fetch(*given)

        patch.setattr(leasing, "fetch", held)

    def wait(self) -> None:
        assert self.reached.wait(10)

    def open(self) -> None:
        self._opened.set()


@contextmanager
def beside(function: Callable[[], object]) -> Iterator[None]:
    """Runs it in a thread that ends with the block."""
    thread = threading.Thread(target=function)
    thread.start()
    yield
    thread.join(20)
    assert not thread.is_alive()


def assert_let_go(place: Place, borrower: Borrower, *lenders: tuple[Lender, int]) -> None:
    """Borrower and ledger agree that nothing is lent, and the lenders have their slabs again."""
    until(lambda: borrower.status().leases, ().__eq__)
    place.hub.until(lambda status: not status.leases)
    for lender, slabs in lenders:
        place.until_free(lender, slabs)
    assert (borrower.status().loans, borrower.status().host) == (0, 0)


@pytest.mark.parametrize("slabs", [1, 3])
def test_a_loan_that_ends_while_it_is_moved_lets_go_of_where_it_was_to_go(
    place: Place, monkeypatch: pytest.MonkeyPatch, slabs: int
) -> None:
    first = place.lender(0, slabs)
    borrower = place.borrower(handover_s=10.0)
    loan = borrower.allocate(slabs * SLAB)
    second = place.lender(1, slabs)
    gate = Gate(monkeypatch)
    with beside(lambda: first.take_back(slabs * SLAB, 20.0)):
        gate.wait()
        with beside(loan.release):
            until(loan.keeper.ended, bool)
            gate.open()
    assert_let_go(place, borrower, (second, slabs))


def test_a_loan_that_ends_while_it_comes_back_from_the_host_does_so_too(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    borrower = place.borrower(return_s=0.02, handover_s=10.0)
    loan = borrower.allocate(2 * SLAB)
    gate = Gate(monkeypatch)
    lender = place.lender(0, 2)
    gate.wait()
    loan.release()
    gate.open()
    assert_let_go(place, borrower, (lender, 2))


def test_a_release_that_nobody_waits_for_any_more_is_carried_out(place: Place) -> None:
    lender = place.lender(0, 2)
    borrower = place.borrower()
    loan = borrower.allocate(2 * SLAB)

    async def give_up() -> None:
        async with asyncio.timeout(0.05):
            await loan.release_async()

    with loan._slots.using([0]):  # as a long read would
        with pytest.raises(TimeoutError):
            asyncio.run(give_up())
    loan.release()
    assert_let_go(place, borrower, (lender, 2))


def test_an_app_may_release_a_loan_when_it_is_asked_back(place: Place) -> None:
    lender = place.lender(0, 2)

    def release(revocation: Revocation) -> bool:
        revocation.loan.release()
        return True

    borrower = place.borrower(on_revoke=release)
    borrower.allocate(2 * SLAB)
    taken = lender.take_back(SLAB, 5.0)
    assert (taken.bytes, taken.missing) == (SLAB, 0)
    assert_let_go(place, borrower, (lender, 1))


def test_what_is_said_of_a_lease_right_after_its_grant_is_heard(place: Place) -> None:
    lender = place.lender(0, 1)
    borrower = place.borrower()
    loans: list[Loan] = []
    hub = place.hub
    hub.deaf = True

    def grant_and_ask_back() -> None:
        """In one frame."""
        hub.deaf = False
        (borrow,) = [(peer, message) for peer, message in hub._missed if isinstance(message, Borrow)]
        hub.decide(FromPartyLink(*borrow))
        (number,) = hub.core.book.ledger.leases
        hub.decide(Wish("test", RevokeLease(0, number, "", 5.0)))

    with beside(lambda: loans.append(borrower.allocate(SLAB))):
        hub.until_heard(Borrow)
        hub.call(grant_and_ask_back)
    (loan,) = loans
    data = filled(loan)
    until(lambda: loan.where, "host".__eq__)
    assert loan.read(0, SLAB) == data
    loan.release()
    assert_let_go(place, borrower, (lender, 1))


def test_a_lease_keeps_its_own_memory_when_its_number_is_granted_anew(place: Place) -> None:
    """As by a ledger that was lost."""
    lender = place.lender(0, 1)
    borrower = place.borrower()
    old = borrower.allocate(SLAB)
    place.hub.until(lambda status: status.leases and status.leases[0].state == "active")
    with old.hold():
        place.hub.call(lambda: place.hub.lose(borrower.name))
        until(lambda: [lease.state for lease in borrower.status().leases], ["over"].__eq__)
        place.hub.core.book.ledger.next_lease = 1
        place.until_free(lender, 1)  # with memory that was made anew
        until(lambda: borrower.status().state, "attached".__eq__)
        new = borrower.allocate(SLAB)
        assert new.where == "peer"
        assert [(lease.lease, lease.state) for lease in borrower.status().leases] == [(1, "over"), (1, "active")]
    until(lambda: old.where, "host".__eq__)
    place.start_again()
    until(lambda: borrower.status().state, "attached".__eq__)
    place.hub.until(lambda status: [lease.state for lease in status.leases] == ["active"])
    assert new.where == "peer"
    old.release(), new.release()
    assert_let_go(place, borrower, (lender, 1))


def test_whoever_is_interrupted_gets_nothing_and_keeps_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(BaseException):
        pass

    def interrupt(*given: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        lender = place.lender(0, 2)
        borrower = place.borrower(handover_s=10.0)
        gate = Gate(monkeypatch)
        main = threading.get_ident()

        def send() -> None:
            gate.wait()
            signal.pthread_kill(main, signal.SIGUSR1)

        with beside(send), pytest.raises(Interrupted):
            borrower.allocate(2 * SLAB)
        gate.open()
        assert_let_go(place, borrower, (lender, 2))
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_move_that_fails_for_no_reason_that_is_known_leaves_no_lease(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = place.lender(0, 2)
    borrower = place.borrower()
    loan = borrower.allocate(2 * SLAB)
    data = filled(loan)
    second = place.lender(1, 2)

    def fail(*given: object) -> bool:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(LoanSlots, "move", fail)
        assert first.take_back(SLAB, 0.5).missing == SLAB
        until(lambda: caplog.text, lambda text: "planted" in text)
        place.until_free(second, 2)
    assert loan.read(0, loan.bytes) == data
    loan.release()
    assert_let_go(place, borrower, (first, 1), (second, 2))


def test_what_cannot_be_unmapped_stays_the_loans_and_the_rest_goes_back(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    lender = place.lender(0, 3)
    borrower = place.borrower()
    loan = borrower.allocate(3 * SLAB)
    unmap = SlabRange.unmap

    def fail(arena: SlabRange, slot: int) -> None:
        if slot == 1:
            raise DeviceError("planted")
        unmap(arena, slot)

    with monkeypatch.context() as patch:
        patch.setattr(SlabRange, "unmap", fail)
        with pytest.raises(DeviceError, match="planted"):
            loan.release()
        place.until_free(lender, 2)
        assert borrower.status().peer == SLAB
    loan.release()
    assert_let_go(place, borrower, (lender, 3))

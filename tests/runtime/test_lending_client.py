"""Lenders and borrowers at a hub with the real core: what an app sees of them, from threads and from asyncio."""

import asyncio
import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from forebay.gpu.errors import DeviceError
from forebay.gpu.memfd_backend import MemfdBackend
from forebay.gpu.memory import Slab, SlabRange
from forebay.runtime import takeback
from forebay.runtime.client import Borrower, Closed, Lender, LendingError, Loan, Reclaimed, Revocation
from forebay.transport.messages import Borrow, LendingStatus, TakeBack
from tests.runtime.lending_hub import LendingHub, until
from tests.runtime.lending_place import SLAB, Place, a_place, filled, libraries_are_up


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    libraries_are_up()


@pytest.fixture
def place() -> Iterator[Place]:
    with a_place() as made:
        yield made


def one_lease(status: LendingStatus) -> bool:
    return len(status.leases) == 1


# Allocating ----------------------------------------------------------------------------------------------------------


def test_an_app_writes_and_reads_a_neighbours_memory_and_gives_it_back(place: Place) -> None:
    lender = place.lender(slabs=4)
    borrower = place.borrower()
    with borrower.allocate(3 * SLAB + 1) as loan:
        assert (loan.bytes, loan.where) == (3 * SLAB + 1, "peer")
        assert {piece.place for piece in loan.pieces()} == {lender.name}
        assert loan.read(0, loan.bytes) == bytes(loan.bytes)
        data = filled(loan)
        assert loan.read(SLAB - 5, 10) == data[SLAB - 5 : SLAB + 5]
        loan.write(2 * SLAB - 3, memoryview(b"across")[:])
        assert loan.read(2 * SLAB - 4, 8) == data[2 * SLAB - 4 : 2 * SLAB - 3] + b"across" + data[2 * SLAB + 3 :][:1]
        assert bytes(loan.buffer()[:4]) == data[:4]
        place.hub.until(lambda status: status.leases[0].state == "active")
        assert lender.status().lent == 4 * SLAB
        assert borrower.status().peer == 4 * SLAB
        for offset, size in ((-1, 1), (0, loan.bytes + 1), (loan.bytes, 1), (0, -1)):
            with pytest.raises(ValueError, match="not within the loan"):
                loan.read(offset, size)
    with pytest.raises((Closed, ValueError)):
        loan.read(0, 1)
    loan.release()
    place.hub.until(lambda status: not status.leases)
    place.until_free(lender, 4)
    assert borrower.status().peer == 0
    with borrower.allocate(SLAB) as again:
        assert again.read(0, SLAB) == bytes(SLAB), "zeroed before it was offered again"


def test_a_loan_may_come_from_several_lenders_and_from_the_host(place: Place) -> None:
    place.lender(0, 2), place.lender(1, 1)
    borrower = place.borrower()
    with borrower.allocate(5 * SLAB) as loan:
        assert (loan.bytes, loan.where) == (5 * SLAB, "mixed")
        assert "bytes are missing" in loan.reason
        assert len({piece.place for piece in loan.pieces()}) == 3
        data = filled(loan)
        assert loan.read(0, loan.bytes) == data
        assert borrower.status().host == 2 * SLAB
    assert borrower.status().host == 0


def test_without_the_host_a_loan_is_as_large_as_what_is_lent(place: Place) -> None:
    place.lender(0, 2)
    borrower = place.borrower()
    with borrower.allocate(5 * SLAB, host=False) as loan, borrower.allocate(SLAB, host=False) as nothing:
        assert (loan.bytes, loan.where) == (2 * SLAB, "peer")
        assert (nothing.bytes, nothing.where) == (0, "nowhere")
        with pytest.raises(Closed, match="nothing could be had"):
            nothing.buffer()


def test_the_hosts_memory_has_its_bound(place: Place) -> None:
    borrower = place.borrower(host_bytes=2 * SLAB)
    with borrower.allocate(3 * SLAB) as loan:
        assert (loan.bytes, loan.where) == (2 * SLAB, "host")
        assert "the host has no memory left" in loan.reason
        with borrower.allocate(SLAB) as nothing:
            assert nothing.bytes == 0
    with borrower.allocate(SLAB) as again:
        assert again.where == "host"


def test_from_asyncio_nothing_blocks_the_apps_loop(place: Place) -> None:
    async def app() -> None:
        lender = Lender(place.hub.endpoint, 0, slab_bytes=SLAB, folder=place.folder)
        borrower = Borrower(place.hub.endpoint, 1, slab_bytes=SLAB)
        assert all(await asyncio.gather(lender.ready_async(), borrower.ready_async()))
        assert await lender.offer_async(SLAB) + await lender.grow_async(SLAB) == 2 * SLAB
        loan = await borrower.allocate_async(2 * SLAB)
        assert loan.where == "peer"
        data = filled(loan)
        taken = await lender.take_back_async(2 * SLAB, 5.0)
        assert (taken.bytes, taken.missing, taken.holders) == (2 * SLAB, 0, ())
        assert loan.where == "host"
        assert loan.read(0, loan.bytes) == data
        await loan.release_async()
        assert (await borrower.status_async()).loans == 0
        assert (await lender.status_async()).free == 0
        await asyncio.gather(lender.close_async(), borrower.close_async())

    asyncio.run(app())


def test_nothing_is_lost_where_a_wait_is_given_up(place: Place) -> None:
    came: list[Reclaimed] = []
    lender = place.lender(0, 3, on_yielded=came.append)
    borrower = place.borrower()
    with borrower.allocate(2 * SLAB) as loan:
        with loan.hold():

            async def give_up() -> None:
                async with asyncio.timeout(0.3):
                    await lender.take_back_async(3 * SLAB, 60.0)

            with pytest.raises(TimeoutError):
                asyncio.run(give_up())
            assert until(lambda: sum(each.bytes for each in came), (SLAB).__eq__)
        until(lambda: sum(each.bytes for each in came), (3 * SLAB).__eq__)
    lender.offer(4 * SLAB)
    place.until_free(lender, 4)

    async def allocate_and_give_up(turns: int) -> None:
        allocating = asyncio.create_task(borrower.allocate_async(2 * SLAB))
        for _ in range(turns):
            await asyncio.sleep(0)
        allocating.cancel()
        (loan,) = await asyncio.gather(allocating, return_exceptions=True)
        if isinstance(loan, Loan):  # it was faster
            await loan.release_async()

    for turns in (1, 2, 5, 20, 50, 200, 500, 1000, 2000):
        asyncio.run(allocate_and_give_up(turns))
        place.until_free(lender, 4)
    assert borrower.status().loans == 0


def test_only_slabs_of_its_own_size_are_lent_to_a_borrower(place: Place) -> None:
    larger = place.lender(0, slab_bytes=2 * SLAB)
    larger.offer(8 * SLAB)
    place.until_free(larger, 4)
    borrower = place.borrower()
    with borrower.allocate(SLAB) as loan:
        assert loan.where == "host"
        assert f"in slabs of {SLAB} bytes (there are slabs of {2 * SLAB})" in loan.reason
    fitting = place.lender(1, 1)
    with borrower.allocate(SLAB) as loan:
        assert {piece.place for piece in loan.pieces()} == {fitting.name}
    assert borrower.status().complaints == 0


def test_no_torch_is_needed() -> None:
    code = "import sys, forebay.runtime.client; sys.exit(bool({'torch', 'numpy', 'yaml'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=50, check=False).returncode == 0


# Giving back ---------------------------------------------------------------------------------------------------------


def test_what_is_asked_back_moves_under_the_same_addresses_to_another_lender_first(place: Place) -> None:
    first = place.lender(0, 4)
    borrower = place.borrower()
    with borrower.allocate(4 * SLAB) as loan:
        data, address = filled(loan), loan.address
        view = loan.buffer()
        place.lender(1, 1)
        taken = first.take_back(4 * SLAB, 5.0)
        assert (taken.bytes, taken.missing) == (4 * SLAB, 0)
        assert loan.address == address
        assert bytes(view) == data
        assert loan.read(0, loan.bytes) == data
        assert loan.where == "mixed"
        assert borrower.status().peer == SLAB
        assert borrower.status().host == 3 * SLAB
        del view
    place.hub.until(lambda status: not status.leases)


def test_a_slow_app_keeps_its_memory_until_it_no_longer_holds_it_and_whoever_waits_is_told_who(place: Place) -> None:
    came: list[Reclaimed] = []
    lender = place.lender(0, 2, on_yielded=came.append)
    borrower = place.borrower()
    with borrower.allocate(2 * SLAB) as loan:
        data = filled(loan)
        place.hub.until(lambda status: status.leases[0].state == "active")
        with loan.hold():
            taken = lender.take_back(2 * SLAB, 0.3)
            assert (taken.bytes, taken.missing, taken.holders) == (0, 2 * SLAB, (borrower.name,))
            assert place.hub.status().leases[0].state == "overdue"
            loan.write(0, b"held")
        until(lambda: sum(each.bytes for each in came), (2 * SLAB).__eq__)
        assert loan.read(0, loan.bytes) == b"held" + data[4:]
        assert loan.where == "host"


def test_writers_never_lose_a_byte_to_a_move(place: Place) -> None:
    """Threads write through the loan while its slabs wander; each checks its own stretch all the time."""
    lenders = [place.lender(gpu, 2) for gpu in range(3)]
    borrower = place.borrower()
    stop = threading.Event()
    problems: list[str] = []

    def write(loan: Loan, first: int) -> None:
        last = bytes(8)
        count = 0
        while not stop.is_set():
            if loan.read(first, 8) != last:
                problems.append(f"{first}: {last!r} was lost")
                return
            count += 1
            last = count.to_bytes(8, "little")
            loan.write(first, last)

    with borrower.allocate(2 * SLAB) as loan:
        threads = [threading.Thread(target=write, args=(loan, first)) for first in (0, SLAB - 4, SLAB + 64)]
        for thread in threads:
            thread.start()
        for _ in range(5):
            for lender in lenders:
                taken = lender.take_back(2 * SLAB, 10.0)
                assert taken.missing == 0
                lender.offer(2 * SLAB)
        stop.set()
        for thread in threads:
            thread.join()
    assert not problems


def test_an_app_may_move_its_memory_itself(place: Place) -> None:
    lender = place.lender(0, 3)
    saved: dict[int, bytes] = {}
    asked: list[Revocation] = []

    def save(revocation: Revocation) -> bool:
        asked.append(revocation)
        for offset, size in revocation.ranges:
            saved[offset] = revocation.loan.read(offset, size)
        return True

    borrower = place.borrower(on_revoke=save)
    with borrower.allocate(3 * SLAB) as loan:
        data = filled(loan)
        assert lender.take_back(2 * SLAB, 5.0).missing == 0
        (revocation,) = asked
        assert 0 < revocation.deadline_s <= 5.0
        assert {offset: data[offset : offset + SLAB] for offset in saved} == saved
        assert len(saved) == 2
        for offset in saved:
            with pytest.raises(Closed, match="were given back"):
                loan.read(offset, 1)
        (left,) = {0, SLAB, 2 * SLAB} - saved.keys()
        assert loan.read(left, SLAB) == data[left : left + SLAB]
        borrower.on_revoke(None)
        assert lender.take_back(SLAB, 5.0).missing == 0
        assert loan.read(left, SLAB) == data[left : left + SLAB]


def test_a_callback_that_raises_or_does_nothing_leaves_the_move_to_the_library(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(revocation: Revocation) -> bool:
        raise RuntimeError("planted")

    lender = place.lender(0, 2)
    borrower = place.borrower(on_revoke=fail)
    with borrower.allocate(2 * SLAB) as loan:
        data = filled(loan)
        assert lender.take_back(SLAB, 5.0).missing == 0
        assert "planted" in caplog.text
        borrower.on_revoke(lambda revocation: None)
        assert lender.take_back(SLAB, 5.0).missing == 0
        assert loan.read(0, loan.bytes) == data


def test_where_neither_a_lender_nor_the_host_has_room_the_move_waits_for_some(place: Place) -> None:
    lender = place.lender(0, 2)
    borrower = place.borrower(host_bytes=SLAB)
    with borrower.allocate(2 * SLAB) as loan:
        data = filled(loan)
        taken = lender.take_back(2 * SLAB, 0.3)
        assert (taken.bytes, taken.missing, taken.holders) == (SLAB, SLAB, (borrower.name,))
        assert "the host has none left" in loan.reason
        borrower._budget.limit = 2 * SLAB
        until(lambda: lender.status().lent, (0).__eq__)
        assert loan.read(0, loan.bytes) == data


def test_an_operator_takes_memory_back_and_the_lender_hears_of_it(place: Place) -> None:
    said: list[tuple[Any, ...]] = []
    lender = place.lender(
        0,
        2,
        on_lent=lambda *given: said.append(("lent", *given[1:])),
        on_returned=lambda *given: said.append(("returned", *given[1:])),
        on_yielded=lambda reclaimed: said.append(("yielded", reclaimed.bytes)),
    )
    borrower = place.borrower()
    with borrower.allocate(SLAB) as loan:
        data = filled(loan)
        number = place.hub.until(one_lease).leases[0].id
        place.hub.revoke(number)
        until(lambda: loan.where, "host".__eq__)  # not to the same lender again
        until(lambda: list(said), lambda found: ("returned", borrower.name, SLAB) in found)
        place.hub.reclaim(0, 2 * SLAB)
        until(lambda: sum(size for kind, *_, size in said if kind == "yielded"), (2 * SLAB).__eq__)
        assert loan.read(0, SLAB) == data
        assert said[0] == ("lent", borrower.name, SLAB)
    assert lender.status().free + lender.status().lent == 0


def test_slabs_of_a_pool_are_lent_zeroed_and_come_back_to_it(place: Place) -> None:
    with SlabRange(SLAB, 3) as pool:
        slabs = [Slab(SLAB) for _ in range(3)]
        for slot, slab in enumerate(slabs):
            pool.map(slot, slab)
        view = pool.buffer()
        view[: 3 * SLAB] = b"k" * 3 * SLAB
        lender = place.lender()
        lender.offer_slabs(slabs[:2])
        place.until_free(lender, 2)
        assert view[: 3 * SLAB] == bytes(2 * SLAB) + b"k" * SLAB
        borrower = place.borrower()
        with borrower.allocate(2 * SLAB) as loan:
            assert loan.where == "peer"
            data = filled(loan)
            assert sorted((view[:SLAB], view[SLAB : 2 * SLAB])) == sorted((data[:SLAB], data[SLAB:]))
            taken = lender.take_back(2 * SLAB, 5.0)
            assert (set(taken.slabs), taken.kept) == (set(slabs[:2]), ())
            assert all(not slab.closed for slab in slabs)
        with pytest.raises(LendingError, match="cannot be lent here"), Slab(2 * SLAB) as large:
            lender.offer_slabs([large])
        del view
        for slab in slabs:
            slab.close()


def test_a_slab_that_a_lost_borrower_may_still_map_is_made_anew(place: Place) -> None:
    replaced: list[tuple[Any, Any]] = []
    old = Slab(SLAB)
    lender = place.lender(on_replaced=lambda before, after: replaced.append((before, after)))
    lender.offer_slabs([old])
    place.until_free(lender, 1)
    borrower = place.borrower()
    with borrower.allocate(SLAB) as loan:
        data = filled(loan)
        place.hub.until(lambda status: status.leases and status.leases[0].state == "active")
        place.hub.call(lambda: place.hub.lose(borrower.name))
        (before, after) = until(lambda: list(replaced), len)[0]
        assert before is old
        until(lambda: old.closed, bool)
        assert loan.read(0, SLAB) == data, "its own memory by now"
        until(lambda: loan.where, "host".__eq__)
        assert loan.read(0, SLAB) == data
        place.until_free(lender, 1)
        with borrower.allocate(SLAB) as other:
            assert other.where == "peer"
            assert other.read(0, SLAB) == bytes(SLAB)
            assert loan.read(0, SLAB) == data
        (fresh,) = lender.take_back(SLAB, 5.0).slabs
        assert fresh is after
        fresh.close()


def test_a_slab_for_which_there_is_no_other_goes_back_to_whoever_gave_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    yielded: list[Reclaimed] = []
    slab = Slab(SLAB)
    lender = place.lender(on_yielded=yielded.append)
    lender.offer_slabs([slab])
    place.until_free(lender, 1)
    borrower = place.borrower()
    with borrower.allocate(SLAB) as loan:
        filled(loan)
        place.hub.until(lambda status: status.leases and status.leases[0].state == "active")

        def lacking(*_: object) -> None:
            raise DeviceError("out of memory")

        monkeypatch.setattr(MemfdBackend, "slab", lacking)
        place.hub.call(lambda: place.hub.lose(borrower.name))
        (reclaimed,) = until(lambda: list(yielded), len)
        assert reclaimed == Reclaimed(SLAB, (), (slab,), 0, ())
        assert not slab.closed
    slab.close()


def test_a_buffer_in_use_keeps_a_loan_and_closing_leaves_zeros(place: Place) -> None:
    place.lender(0, 1)
    borrower = place.borrower()
    loan = borrower.allocate(SLAB)
    loan.write(0, b"data")
    view = loan.buffer()
    part = view[:4]
    del view
    with pytest.raises(LendingError, match="in use; drop it"):
        loan.release()
    assert loan.read(0, 4) == b"data"
    borrower.close()
    assert bytes(part) == bytes(4)
    del part
    place.hub.until(lambda status: not status.leases)


def test_a_program_may_map_bare_slabs_into_an_arena_of_its_own(place: Place) -> None:
    lender = place.lender(0, 3)
    borrower = place.borrower()
    asked: list[tuple[frozenset[int], float]] = []
    (lease,), reason = borrower.obtain(
        2 * SLAB, lambda lease, numbers, deadline_s, why: asked.append((numbers, deadline_s))
    )
    assert reason == ""
    assert place.hub.status().leases[0].state == "granted"
    with SlabRange(SLAB, 2) as arena:
        numbers = sorted(lease.slabs)
        for slot, number in enumerate(numbers):
            slab = lease.slabs[number]
            assert slab is not None
            arena.map(slot, slab)
            slab.close()
            lease.slabs[number] = None
        borrower.mapped(lease)
        place.hub.until(lambda status: status.leases[0].state == "active")
        taken = lender.take_back(2 * SLAB, 0.2)  # one of them was free
        ((slabs, deadline_s),) = asked
        assert len(slabs) == 1
        assert 0 <= deadline_s <= 0.2
        assert (taken.bytes, taken.missing, taken.holders) == (SLAB, SLAB, (borrower.name,))
        arena.unmap(numbers.index(min(slabs)))
        borrower.let_go(lease, slabs)
        until(lambda: lender.status().lent, SLAB.__eq__)
    borrower.let_go(lease, numbers)
    borrower.let_go(lease, numbers)
    place.until_free(lender, 1)
    assert borrower.status().leases == ()


def test_whoever_holds_a_loan_cannot_wait_for_itself(place: Place) -> None:
    lender = place.lender(0, 1)
    borrower = place.borrower()
    loan = borrower.allocate(SLAB)
    with loan.hold():
        with pytest.raises(LendingError, match="within `hold` would wait for itself"):
            loan.release()
        releasing = threading.Thread(target=loan.release)
        releasing.start()
        loan.write(0, b"still there")
        assert loan.read(0, 11) == b"still there"
    releasing.join(10)
    place.until_free(lender, 1)
    with borrower.allocate(SLAB).hold():
        borrower.close()
    place.until_free(lender, 1)


# The scheduler is away -----------------------------------------------------------------------------------------------


def test_without_a_scheduler_there_is_the_hosts_memory_and_it_says_so_once(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = f"ipc://{place.folder}/nobody"
    with Borrower(endpoint, 1, slab_bytes=SLAB, grant_s=0.1) as borrower:
        assert not borrower.ready(0.05)
        loans = [borrower.allocate(SLAB) for _ in range(3)]
        for loan in loans:
            assert loan.where == "host"
            data = filled(loan)
            assert loan.read(0, SLAB) == data
        assert borrower.status().state == "away"
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    assert "no scheduler at" in caplog.text


def test_a_scheduler_that_hangs_is_waited_for_once_and_a_late_grant_is_given_back(place: Place) -> None:
    lender = place.lender(0, 2)
    borrower = place.borrower(grant_s=0.2)
    place.hub.deaf = True
    with borrower.allocate(SLAB) as loan, borrower.allocate(SLAB) as other:
        assert (loan.where, other.where) == ("host", "host")
        assert borrower.status().state == "away"
        asked = [message for _, message in place.hub.received if isinstance(message, Borrow)]
        assert len(asked) == 1
        place.hub.listen_again()
        until(lambda: borrower.status().state, "attached".__eq__)
        place.until_free(lender, 2)
        with borrower.allocate(SLAB) as third:
            assert third.where == "peer"


@pytest.mark.parametrize("forgetful", [False, True])
def test_a_scheduler_that_comes_back_learns_who_holds_what(place: Place, forgetful: bool) -> None:
    lender = place.lender(0, 3)
    borrower = place.borrower()
    with borrower.allocate(2 * SLAB) as loan:
        data = filled(loan)
        place.start_again(forgetful=forgetful)
        place.hub.until(lambda status: status.leases and status.leases[0].state == "active")
        place.until_free(lender, 1)
        assert loan.where == "peer"
        with borrower.allocate(SLAB) as other:
            assert other.where == "peer"
            assert loan.read(0, loan.bytes) == data
        taken = lender.take_back(3 * SLAB, 5.0)
        assert (taken.bytes, taken.missing) == (3 * SLAB, 0)
        assert loan.read(0, loan.bytes) == data


def test_a_reclaim_goes_on_at_the_scheduler_that_came_back(place: Place) -> None:
    lender = place.lender(0, 2)
    borrower = place.borrower()
    with borrower.allocate(2 * SLAB) as loan:
        data = filled(loan)
        place.hub.until(lambda status: status.leases[0].state == "active")
        taken: list[Reclaimed] = []
        with loan.hold():
            taking = threading.Thread(target=lambda: taken.append(lender.take_back(2 * SLAB, 20.0)))
            taking.start()
            place.hub.until(lambda status: status.leases[0].state == "revoking")
            place.start_again()
            place.hub.until_heard(TakeBack)
        taking.join(20)
        assert [(each.bytes, each.missing) for each in taken] == [(2 * SLAB, 0)]
        assert loan.read(0, loan.bytes) == data
        assert loan.where == "host"


def test_while_the_scheduler_is_away_a_lender_takes_back_what_nobody_has(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeback, "ANSWER_S", 0.3)
    monkeypatch.setattr(takeback, "GRACE_S", 0.1)
    lender = place.lender(0, 3)
    borrower = place.borrower()
    with borrower.allocate(SLAB) as loan:
        data = filled(loan)
        place.hub.until(lambda status: status.leases[0].state == "active")

        def absent() -> None:
            taken = lender.take_back(3 * SLAB, 0.2)
            assert (taken.bytes, taken.missing, taken.holders) == (2 * SLAB, SLAB, (borrower.name,))

        place.start_again(absent=absent)
        place.hub.until(lambda status: status.leases and status.leases[0].state == "active")
        assert loan.read(0, loan.bytes) == data
        place.until_free(lender, 0)
        assert lender.take_back(SLAB, 5.0).missing == 0
        assert loan.read(0, loan.bytes) == data


def test_a_wrong_credential_is_refused_and_the_app_goes_on_without(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    with LendingHub(tenants={"0" * 64: "somebody"}) as strict:
        with Borrower(strict.endpoint, 1, slab_bytes=SLAB, credential="wrong") as borrower:
            assert not borrower.ready(5)
            assert borrower.status().state == "refused"
            with borrower.allocate(SLAB) as loan:
                assert loan.where == "host"
    assert "the scheduler refused this process" in caplog.text


def test_what_is_closed_says_so(place: Place) -> None:
    lender, borrower = place.lender(), place.borrower()
    for party in (lender, borrower):
        party.close()
        party.close()
    with pytest.raises(Closed, match="is closed; make a new one"):
        lender.offer(SLAB)
    with pytest.raises(Closed, match="is closed; make a new one"):
        borrower.allocate(SLAB)


def test_closing_within_a_loop_leaves_nothing_behind(place: Place) -> None:
    """A warning would be an error here."""

    async def run() -> None:
        lender, borrower = place.lender(0, 1), place.borrower()
        borrower.allocate(SLAB)
        borrower.close()
        lender.close()
        gc.collect()

    asyncio.run(run())

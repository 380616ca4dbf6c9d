"""The ledger's bookkeeping: moves of slabs and leases, and that `check` notices what would lose memory."""

from collections.abc import Callable
from random import Random

import pytest

from forebay.sched.ledger import Lease, Ledger
from forebay.sched.mapping import Mapping
from forebay.sched.reclaims import choose
from forebay.sched.states import IllegalTransition

SLAB = 4096


def lease(number: int, slabs: list[int], lender: str = "lender", borrower: str = "borrower") -> Lease:
    return Lease(number, 1, "t", lender, 0, "", borrower, 1, "", SLAB, "/l", dict.fromkeys(slabs))


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger()
    stock = ledger.open_stock("lender", 0, SLAB)
    for slab in range(6):
        stock.add(slab)
    ledger.grant(lease(1, [0, 1, 2]))
    ledger.check()
    return ledger


def test_what_is_granted_is_lent_and_what_is_given_back_is_returned_until_it_is_offered_again(ledger: Ledger) -> None:
    stock, mine = ledger.stocks["lender"], ledger.leases[1]
    assert (list(stock.free), stock.lent, stock.offered) == ([3, 4, 5], {0: 1, 1: 1, 2: 1}, 6)
    ledger.take_out(mine, [1], "return")
    assert (list(stock.returned), mine.state, stock.offered) == ([1], "granted", 6)
    stock.move(1, "offer")
    assert list(stock.free) == [3, 4, 5, 1]
    ledger.take_out(mine, [0, 2], "take")
    ledger.check()
    assert (mine.state, ledger.leases, stock.offered) == ("over", {}, 4)
    assert ledger.lent_by("lender") == ledger.borrowed_by("borrower") == []


def test_a_revocation_is_settled_once_what_was_asked_for_has_come(ledger: Ledger) -> None:
    mine = ledger.leases[1]
    mine.asked = {0: 5.0, 1: 3.0}
    mine.move("revoke")
    ledger.check()
    assert mine.deadline == 3.0
    ledger.take_out(mine, [1], "return")
    assert (mine.state, mine.deadline) == ("revoking", 5.0)
    mine.move("expire")
    ledger.take_out(mine, [0], "return")
    assert (mine.state, mine.deadline, list(mine.slabs)) == ("active", None, [2])
    ledger.check()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda ledger: ledger.stocks["lender"].add(3), "slab 3 of lender is free already"),
        (lambda ledger: ledger.stocks["lender"].add(0, 9), "slab 0 of lender is lent already"),
        (lambda ledger: ledger.stocks["lender"].move(0, "offer"), "slab 0 of lender is lent: 'offer'"),
        (lambda ledger: ledger.grant(lease(2, [0])), "slab 0 of lender is lent: 'lend'"),
        (lambda ledger: ledger.stocks["lender"].move(77, "take"), "slab 77 of lender is gone"),
    ],
)
def test_what_cannot_happen_raises_and_changes_nothing(
    ledger: Ledger, wrong: Callable[[Ledger], None], words: str
) -> None:
    with pytest.raises(IllegalTransition, match=words):
        wrong(ledger)
    ledger.check()
    assert list(ledger.leases) == [1]


@pytest.mark.parametrize(
    "harm",
    [
        lambda ledger: ledger.stocks["lender"].free.pop(3),
        lambda ledger: ledger.stocks["lender"].free.setdefault(0),
        lambda ledger: ledger.stocks["lender"].lent.update({4: 1}),
        lambda ledger: ledger.stocks["lender"].lent.update({0: 7}),
        lambda ledger: ledger.leases[1].slabs.clear(),
        lambda ledger: ledger.leases[1].slabs.pop(2),
        lambda ledger: ledger.leases[1].asked.update({1: 2.0}),
        lambda ledger: ledger.leases.pop(1),
    ],
)
def test_check_notices_what_would_lose_memory(ledger: Ledger, harm: Callable[[Ledger], object]) -> None:
    harm(ledger)
    with pytest.raises((AssertionError, KeyError)):
        ledger.check()


def test_a_lease_is_what_its_record_says() -> None:
    mine = lease(3, [4, 5])
    mine.asked = {4: 2.5}
    mine.move("revoke")
    assert Lease.of(mine.record) == mine


def test_a_consumer_with_a_mapping_uses_its_producers_only() -> None:
    mapping = Mapping()
    assert mapping.allows(0, 2)
    assert not mapping.allows(2, 2)
    mapping.add(0, 2)
    mapping.add(1, 2)
    mapping.add(0, 3)
    assert [mapping.allows(gpu, 2) for gpu in range(5)] == [True, True, False, False, False]
    assert mapping.allows(5, 4)
    assert mapping.pairs == ((0, 2), (1, 2), (0, 3))
    mapping.remove(0, 2)
    assert mapping.producers(2) == (1,)
    mapping.remove(1, 2)
    assert mapping.allows(4, 2), "without a mapping it is unrestricted again"
    with pytest.raises(KeyError):
        mapping.remove(1, 2)
    with pytest.raises(ValueError, match="already"):
        mapping.add(0, 3)
    with pytest.raises(ValueError, match="its own producer"):
        mapping.add(1, 1)


@pytest.mark.parametrize(
    ("available", "need", "chosen"),
    [
        ({1: 5, 2: 3, 3: 9}, 3, [(2, 3)]),
        ({1: 5, 2: 3, 3: 9}, 4, [(1, 4)]),
        ({1: 5, 2: 3, 3: 9}, 12, [(3, 9), (2, 3)]),
        ({1: 5, 2: 5}, 5, [(1, 5)]),
        ({1: 2}, 9, [(1, 2)]),
        ({}, 1, []),
        ({1: 4}, 0, []),
    ],
)
def test_the_fewest_leases_that_cover_the_need(
    available: dict[int, int], need: int, chosen: list[tuple[int, int]]
) -> None:
    assert choose(available, need) == chosen


def test_no_smaller_number_of_leases_would_do() -> None:
    random = Random(5)
    for _ in range(300):
        available = {number: random.randrange(1, 20) for number in range(random.randrange(1, 9))}
        need = random.randrange(1, sum(available.values()) + 1)
        chosen = choose(available, need)
        assert sum(count for _, count in chosen) == need
        assert sum(sorted(available.values(), reverse=True)[: len(chosen) - 1]) < need

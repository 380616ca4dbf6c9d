"""The lending core when somebody dies, in every state of a lease: lender, borrower, the scheduler, its ledger."""

import msgspec
import pytest

from forebay.sched.lending_events import FromPartyLink, LendingTick
from forebay.transport.messages import (
    PROTOCOL_VERSION,
    Attach,
    Detach,
    Granted,
    Holding,
    LeaseOver,
    Offer,
    Release,
    Returned,
    Revoke,
    RevokeLease,
)
from tests.sched.lending_world import HOST, SLAB, Party, World, answered, lend, status

TTL = 10.0


@pytest.fixture
def world() -> World:
    return World(0)


STATES = ("granted", "active", "revoking", "overdue", "stranded")


def bring(world: World, state: str) -> tuple[Party, Party]:
    """A lender with four slabs, all lent in one lease that is in that state."""
    lender, borrower = world.party(0, 4, "lender"), world.party(1, 0, "borrower")
    world.react()
    borrower.borrow(4)
    world.deliver()
    if state != "granted":
        world.react()
    if state in ("revoking", "overdue"):
        lender.take_back(4, 5.0 if state == "revoking" else 0.0)
        world.deliver()
        world.handle(LendingTick())
    if state == "stranded":
        world.kill(lender, noticed=True)
        world.deliver()
    assert [lease.state for lease in status(world).leases] == [state]
    return lender, borrower


@pytest.mark.parametrize("how", ["killed", "silent", "detached", "restarted without it"])
@pytest.mark.parametrize("state", STATES)
def test_the_borrower_goes(world: World, state: str, how: str) -> None:
    lender, borrower = bring(world, state)
    match how:
        case "killed":
            world.kill(borrower, noticed=True)
        case "silent":
            borrower.paused = True
            world.pass_time(TTL + 2)
        case "detached":
            world.send(borrower, Detach("done"))
            borrower.alive = False
        case _:
            world.kill(borrower, noticed=False)
            world.restart()
            world.pass_time(TTL + 2)
    world.deliver()
    assert status(world).leases == ()
    if lender.alive:
        assert lender.slabs == 4, "the memory of the dead returns"
        anew = {slab for slab in lender.own | lender.free | lender.zeroing if slab >= 4}
        # What was unmapped by word of its borrower is zeroed; else it is made anew.
        assert len(anew) == (0 if how == "detached" else 4)


@pytest.mark.parametrize("how", ["killed", "silent", "detached", "restarted without it"])
@pytest.mark.parametrize("state", [state for state in STATES if state != "stranded"])
def test_the_lender_goes(world: World, state: str, how: str) -> None:
    lender, borrower = bring(world, state)
    match how:
        case "killed":
            world.kill(lender, noticed=True)
        case "silent":
            lender.paused = True
            world.pass_time(TTL + 2)
        case "detached":
            world.send(lender, Detach("done"))
            lender.alive = False
        case _:
            world.kill(lender, noticed=False)
            world.restart()
            world.pass_time(TTL + 2)
    world.deliver()
    (lease,) = status(world).leases
    assert lease.state == "stranded"
    assert borrower.to_release == {(lease.id, lease.epoch): {0, 1, 2, 3}}, "it is told to move what it has there"
    world.react()
    world.react()
    assert status(world).leases == ()
    if how == "silent":
        lender.paused = False
        world.pass_time(1.0)
        world.react()
        assert lender.slabs == 4
        world.check_agreement()


@pytest.mark.parametrize("state", STATES)
def test_the_scheduler_is_killed_and_both_parties_come_back(world: World, state: str) -> None:
    lender, _ = bring(world, state)
    world.restart()
    for _ in range(4):  # nobody has come back yet
        world.handle(LendingTick())
        world.now += 2.0
    assert [lease.state for lease in status(world).leases] == [state]
    world.pass_time(1.0)
    (lease,) = status(world).leases
    # What the borrower tells that it holds, it maps, or is about to.
    assert lease.state == ("active" if state == "granted" else state)
    assert lease.epoch == 1
    if lender.alive:
        lender.take_back(4, 5.0)
    else:
        world.pass_time(1.0)
    world.react()
    world.react()
    assert status(world).leases == ()
    if lender.alive:
        assert lender.own == {0, 1, 2, 3}


@pytest.mark.parametrize("state", ["granted", "active"])
def test_the_ledger_is_lost_and_both_parties_say_the_same(world: World, state: str) -> None:
    lender, borrower = bring(world, state)
    world.restart(lose_ledger=True)
    world.pass_time(1.0)
    assert [lease.state for lease in status(world).leases] == ["active"]
    assert dict(status(world).counters)["adopted"] == 1
    world.check_agreement()
    third = world.party(2)
    world.react()
    lender.offer(())
    third.borrow(1)
    world.react()
    assert third.granted[0].grants == ()
    assert lender.slabs == 4
    assert list(borrower.held) == [(1, 1)]


def test_a_claim_that_the_lender_does_not_share_is_over(world: World) -> None:
    lender, borrower = bring(world, "active")
    (held,) = borrower.held.values()
    held.grant = msgspec.structs.replace(held.grant, token="forged")
    borrower.attach()
    world.deliver()
    assert borrower.held == {}
    assert status(world).leases == ()
    assert lender.slabs == 4


def test_a_borrower_that_claims_slabs_beyond_its_lease_loses_it(world: World) -> None:
    lender, borrower = lend(world, 4, 2)
    (held,) = borrower.held.values()
    held.slabs.add(3)
    world.mapped["lender", 3] = {"borrower"}
    borrower.attach()
    world.deliver()
    assert borrower.held == {}
    assert status(world).leases == ()
    assert lender.free == {2, 3}
    assert len(lender.own) == 2, "what it may still map is made anew"


def test_no_new_lease_takes_the_number_of_one_that_may_be_adopted(world: World) -> None:
    lender, borrower = lend(world, 4, 2)
    borrower.paused = True
    world.restart(lose_ledger=True)
    other = world.party(2)
    world.pass_time(1.0)
    other.borrow(1)
    world.react()
    assert [lease.id for lease in status(world).leases] == [2]
    borrower.paused = False
    world.pass_time(1.0)
    world.react()
    assert {lease.id for lease in status(world).leases} == {1, 2}
    assert lender.slabs == 4
    world.check_agreement()


@pytest.mark.parametrize("order", [("lender", "borrower"), ("borrower", "lender")])
@pytest.mark.parametrize("lie", ["none", "slabs", "epoch", "token", "peer", "offered too"])
def test_claims_are_adopted_only_if_both_say_the_same(world: World, lie: str, order: tuple[str, str]) -> None:
    lent = Holding(9, 5, (0, 1), SLAB, "borrower", "/lender", "t")
    borrowed = Holding(9, 5, (1,), SLAB, "lender", "/lender", "t")
    match lie:
        case "slabs":
            borrowed = msgspec.structs.replace(borrowed, slabs=(1, 2))
        case "epoch":
            borrowed = msgspec.structs.replace(borrowed, epoch=4)
        case "token":
            borrowed = msgspec.structs.replace(borrowed, token="x")
        case "peer":
            borrowed = msgspec.structs.replace(borrowed, peer="somebody")
    common = (100, 0, HOST, "")
    stories = {
        "lender": Attach(PROTOCOL_VERSION, 1, "lender", 0, *common, "/lender", SLAB, (3,), (lent,), ()),
        "borrower": Attach(PROTOCOL_VERSION, 1, "borrower", 1, *common, "", 0, (), (), (borrowed,)),
    }
    heard = {}
    for name in order:
        world.parties[name] = Party(world, name, 0)
        world.handle(FromPartyLink(name, stories[name]))
        if lie == "offered too" and name == "lender":
            world.handle(FromPartyLink(name, Offer((1,))))
        heard[name] = world.parties[name].down
    adopted = lie == "none" or (lie == "offered too" and order[0] == "borrower")
    assert [(lease.id, lease.bytes) for lease in status(world).leases] == ([(9, SLAB)] if adopted else [])
    for _ in range(5):
        world.now += TTL / 5
        world.handle(LendingTick())
    if adopted:
        assert list(heard["lender"])[1:] == [Returned(9, 5, (0,), False)], "the other one comes back"
    else:
        assert list(heard["lender"])[1:] == [Returned(9, 5, (0, 1), False)]
        assert [type(message) for message in heard["borrower"]][1:] == [LeaseOver]


def test_a_lender_that_takes_lent_memory_for_free_is_told_to_make_it_anew(world: World) -> None:
    lender, borrower = bring(world, "active")
    lender.free |= {0, 1, 2, 3}
    lender.lent.clear()
    lender.attach()
    world.deliver()
    assert borrower.held == {}, "its lease is over"
    assert not lender.free
    assert lender.own == {4, 5, 6, 7}


def test_after_a_restart_only_what_both_hold_goes_on(world: World) -> None:
    """What a borrower let go of while there was no scheduler comes back."""
    lender, borrower = bring(world, "active")
    (key,) = borrower.held
    borrower.release(key, {0, 1})
    borrower.up.clear()
    world.restart()
    world.pass_time(1.0)
    (lease,) = status(world).leases
    assert lease.bytes == 2 * SLAB
    assert lender.slabs == 4
    world.react()
    world.check_agreement()


def test_the_schedulers_own_absence_is_not_held_against_anybody(world: World) -> None:
    lender, borrower = bring(world, "revoking")
    world.now += 300.0
    world.handle(LendingTick())
    (lease,) = status(world).leases
    assert (lease.state, lease.deadline_s) == ("revoking", 5.0)
    assert list(world.core.book.parties) == ["lender", "borrower"]
    world.pass_time(6.0)
    assert status(world).leases[0].state == "overdue"
    assert lender.reclaims[1] is not None
    assert borrower.held


def test_a_link_that_speaks_for_another_party_ends_the_former(world: World) -> None:
    bring(world, "active")
    other = Attach(PROTOCOL_VERSION, 2, "another", 1, 100, 0, HOST, "", "", 0, (), (), ())
    world.handle(FromPartyLink("borrower", other))
    assert status(world).leases == ()


def test_a_process_may_come_back_over_another_link_and_the_old_one_is_a_strangers(world: World) -> None:
    _, borrower = bring(world, "active")
    (held,) = borrower.held.values()
    again = world.parties["second link"] = Party(world, "borrower", 1)
    whole = Attach(PROTOCOL_VERSION, 2, "borrower", 1, 100, 0, HOST, "", "", 0, (), (), (held.holding,))
    world.handle(FromPartyLink("second link", whole))
    assert len(status(world).leases) == 1
    assert not world.core.knows("borrower")
    world.handle(FromPartyLink("borrower", Release(1, 1, (0,))))
    assert status(world).leases[0].bytes == 4 * SLAB
    assert len(again.down) == 1


def test_messages_tell_of_deadlines_and_reasons(world: World) -> None:
    lender, borrower = bring(world, "active")
    seen: list[object] = []
    answered(world, RevokeLease(1, 1, "", 4.0))
    seen += borrower.down
    assert seen == [Revoke(1, 1, (0, 1, 2, 3), 4.0, "an operator asks it back")]
    borrower.down.clear()
    lender.free.clear()
    lender.lent.clear()
    lender.attach()
    world.handle(FromPartyLink("lender", lender.up.popleft()))
    assert list(borrower.down) == [LeaseOver(1, 1, "its lender lender knows nothing of it")]
    assert not any(isinstance(message, Returned | Granted) for message in lender.down)

"""The lending core: who gets whose memory, how it comes back, and what becomes of it when somebody dies."""

from hashlib import sha256

import msgspec
import pytest

from forebay.sched.lending_events import FromPartyLink, LendingSettings, LendingTick, PartyGone
from forebay.transport.messages import (
    PROTOCOL_VERSION,
    Answered,
    Attach,
    Borrow,
    Complain,
    Detach,
    Heartbeat,
    Holding,
    Map,
    Mapped,
    Offer,
    ReclaimGpu,
    Refused,
    Rejoin,
    Release,
    RevokeLease,
    Unmap,
    Yielded,
)
from tests.sched.lending_world import HOST, SLAB, Party, World, answered, lend, status

TTL = 10.0


@pytest.fixture
def world() -> World:
    return World(0)


def test_parties_hear_that_the_scheduler_is_there(world: World) -> None:
    lend(world)
    world.beats.clear()
    begin = world.now
    for _ in range(40):
        world.now += 0.25
        for party in world.parties.values():
            party.say(Heartbeat())
        world.deliver()
        world.handle(LendingTick())
    assert [peer for _, peer in world.beats] == ["lender", "borrower"] * 10
    assert [at - begin for at, _ in world.beats[::2]] == [1.0 * count for count in range(1, 11)]


# Borrowing --------------------------------------------------------------------------------------------------------


def test_a_loan_from_grant_to_return(world: World) -> None:
    lender, borrower = lend(world)
    (held,) = borrower.held.values()
    assert (held.grant.lender, held.grant.gpu, held.grant.endpoint) == ("lender", 0, "/lender.sock")
    assert len(held.grant.token) == 64
    (lease,) = status(world).leases
    assert (lease.state, lease.bytes, lease.lender_gpu, lease.borrower_gpu) == ("active", 3 * SLAB, 0, 1)
    gpus = {gpu.index: gpu for gpu in status(world).gpus}
    assert (gpus[0].free, gpus[0].lent, gpus[1].borrowed) == (SLAB, 3 * SLAB, 3 * SLAB)
    borrower.release((lease.id, lease.epoch), {0, 1})
    world.deliver()
    assert lender.zeroing == {0, 1}
    assert list(world.core.book.ledger.stocks["lender"].returned) == [0, 1]
    borrower.release((lease.id, lease.epoch), {2})
    world.react()
    assert status(world).leases == ()
    assert lender.free == {0, 1, 2, 3}
    world.check_agreement()


def test_few_lenders_the_largest_first_and_less_than_asked_for_with_a_reason(world: World) -> None:
    for gpu, slabs in enumerate((2, 5, 3)):
        world.party(gpu, slabs, f"lender-{gpu}")
    borrower = world.party(3)
    world.react()
    borrower.borrow(6)
    world.react()
    (granted,) = borrower.granted
    assert [(grant.lender, len(grant.slabs)) for grant in granted.grants] == [("lender-1", 5), ("lender-2", 1)]
    assert granted.reason == ""
    borrower.borrow(10)
    world.react()
    assert [(grant.lender, len(grant.slabs)) for grant in borrower.granted[-1].grants] == [
        ("lender-0", 2),
        ("lender-2", 2),
    ]
    assert "6291456 bytes are missing: the other GPUs of this host have nothing more" in borrower.granted[-1].reason


def test_a_lender_is_avoided_if_the_borrower_wants_it(world: World) -> None:
    world.party(0, 9, "avoided")
    world.party(2, 2, "other")
    borrower = world.party(1)
    world.react()
    borrower.requests += 1
    borrower.say(Borrow(borrower.requests, 5 * SLAB, "avoided"))
    world.react()
    assert [(grant.lender, len(grant.slabs)) for grant in borrower.granted[0].grants] == [("other", 2)]


def test_two_borrowers_race_for_the_last_slab(world: World) -> None:
    world.party(0, 1)
    first, second = world.party(1), world.party(2)
    world.react()
    first.borrow(1)
    second.borrow(1)
    world.react()
    assert [len(party.granted[0].grants) for party in (first, second)] == [1, 0]
    assert second.granted[0].reason


def test_nobody_borrows_from_itself_from_its_own_gpu_or_from_another_host(world: World) -> None:
    alone = world.party(0, 3, "alone")
    same = world.party(0, 0, "same GPU")
    world.react()
    elsewhere = Attach(PROTOCOL_VERSION, 1, "far", 1, 1, 0, "elsewhere", "", "", 0, (), (), ())
    far = world.parties["far"] = Party(world, "far", 1)
    world.send(far, elsewhere)
    far.welcomed = True
    for party in (alone, same, far):
        party.borrow(1)
        world.deliver()
        assert party.granted[-1].grants == (), party.name


def test_a_mapping_restricts_its_consumer_only_and_what_is_leased_outlives_it(world: World) -> None:
    world.party(0, 2, "mapped")
    world.party(2, 9, "larger")
    consumer, other = world.party(1), world.party(3)
    world.react()
    assert answered(world, Map(1, 0, 1)).outcome == "done"
    consumer.borrow(3)
    other.borrow(1)
    world.react()
    assert [(grant.lender, len(grant.slabs)) for grant in consumer.granted[0].grants] == [("mapped", 2)]
    assert "its producers only (GPU 0)" in consumer.granted[0].reason
    assert [grant.lender for grant in other.granted[0].grants] == ["larger"]
    gone = answered(world, Unmap(2, 0, 1))
    assert (gone.outcome, gone.reason) == ("done", "nothing new is lent; what is lent goes on: lease 1")
    answered(world, Map(3, 3, 1))
    consumer.borrow(1)
    world.react()
    assert consumer.granted[-1].grants == (), "its producer lends nothing"
    assert len(consumer.held) == 1


def test_requests_count_once_and_a_wrong_party_an_old_epoch_or_a_strange_slab_changes_nothing(world: World) -> None:
    lender, borrower = lend(world)
    (key,) = borrower.held
    ignored = world.core.book.counters["ignored_messages"]
    for party, message in (
        (borrower, Release(key[0], key[1] - 1, (0,))),
        (borrower, Release(key[0], key[1], (0, 3))),
        (borrower, Release(key[0], key[1], (0, 0))),
        (borrower, Release(key[0], key[1], ())),
        (borrower, Release(77, key[1], (0,))),
        (lender, Release(key[0], key[1], (0,))),
        (lender, Mapped(*key)),
        (lender, Complain(*key, "mine")),
        (lender, Offer((0,))),
        (borrower, Offer((9,))),
    ):
        world.send(party, message)
    assert world.core.book.counters["ignored_messages"] - ignored == 9, "a borrower may offer, too"
    (lease,) = status(world).leases
    assert (lease.state, lease.bytes) == ("active", 3 * SLAB)


def test_a_lender_that_a_borrower_complains_of_gets_no_leases_until_it_attaches_anew(world: World) -> None:
    lender, borrower = lend(world, 4, 1)
    borrower.borrow(1)
    world.deliver()
    (key,) = [key for key, held in borrower.held.items() if not held.mapped]
    del borrower.held[key]
    borrower.say(Complain(*key, "descriptor 1 has 0 bytes"))
    world.deliver()
    assert len(lender.own) == 1, "the borrower may have got it after all: it is made anew"
    assert [lease.id for lease in status(world).leases] == [1], "the other lease goes on"
    borrower.borrow(1)
    world.react()
    assert borrower.granted[-1].grants == ()
    notes = [gpu.note for gpu in status(world).gpus if gpu.note]
    assert notes == ["nothing more is borrowed from lender: borrower could not get lease 2: descriptor 1 has 0 bytes"]
    assert any("nothing more is borrowed from lender until it attaches anew" in text for text in world.remarks)
    lender.attach()
    borrower.borrow(1)
    world.react()
    assert len(borrower.granted[-1].grants) == 1


def test_a_lender_that_was_only_slow_is_asked_to_attach_anew_each_time_after_longer(world: World) -> None:
    lender, borrower = lend(world, 4, 0)
    for patience in (TTL, 2 * TTL):
        borrower.borrow(1)
        world.deliver()
        (key,) = [key for key, held in borrower.held.items() if not held.mapped]
        del borrower.held[key]
        borrower.say(Complain(*key, "it did not answer"))
        world.pass_time(patience - 1)
        assert world.core.book.parties["lender"].doubt
        world.pass_time(3)
        assert not world.core.book.parties["lender"].doubt
        world.react()
        lender.offer(tuple(sorted(lender.own)))
        world.react()
    world.check_agreement()


def test_a_deadline_is_a_number_that_can_be(world: World) -> None:
    lender, _ = lend(world, 2, 2)
    for deadline_s in (float("inf"), float("nan"), -5.0):
        lender.take_back(1, deadline_s)
    world.deliver()
    deadline = status(world).leases[0].deadline_s
    assert deadline is not None
    assert deadline in (0.0, 86400.0)


# Who may ----------------------------------------------------------------------------------------------------------


def attach(world: World, **changes: object) -> object:
    """What a party hears that attaches so."""
    whole = Attach(PROTOCOL_VERSION, 1, "new", 3, 7, 0, HOST, "", "/n", SLAB, (0, 1), (), ())
    party = world.parties.setdefault("new", Party(world, "new", 3))
    world.handle(FromPartyLink("new", msgspec.structs.replace(whole, **changes)))
    return party.down[-1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 99}, "you speak protocol 99"),
        ({"party": ""}, "a party has a name"),
        ({"gpu": -1}, "from 0 on"),
        ({"slab_bytes": 0}, "slabs of some size"),
        ({"endpoint": ""}, "an endpoint"),
        ({"free": (1, 1)}, "named twice"),
        ({"lent": (Holding(1, 1, (5,), SLAB // 2, "x", "/n", "t"),)}, "slabs of another size"),
        ({"lent": (Holding(0, 1, (5,), SLAB, "x", "/n", "t"),)}, "a lease's number"),
        ({"lent": (Holding(1, 1, (), SLAB, "x", "/n", "t"),)}, "one slab or more"),
        ({"borrowed": (Holding(1, 1, (5,), 1, "x", "/n", "t"),) * 2}, "a lease is named twice"),
        ({"party": "lender"}, "taken by process 100"),
    ],
)
def test_a_story_that_cannot_be_is_refused(world: World, changes: dict[str, object], words: str) -> None:
    lend(world)
    refusal = attach(world, **changes)
    assert isinstance(refusal, Refused)
    assert words in refusal.reason
    assert len(world.core.book.parties) == 2


def digest(token: str) -> str:
    return sha256(token.encode()).hexdigest()


def test_tenants_are_told_apart_by_their_credentials() -> None:
    world = World(0, LendingSettings(secret="s", tenants={"red": digest("r"), "blue": digest("b")}))
    assert isinstance(attach(world), Refused)
    assert isinstance(attach(world, credential=digest("wrong")), Refused)
    world.handle(FromPartyLink("new", Heartbeat()))
    assert isinstance(world.parties["new"].down[-1], Rejoin), "it is a stranger still"
    attach(world, credential=digest("r"))
    world.parties["new"].free = {0, 1}
    blue = world.parties["blue"] = Party(world, "blue", 1)
    world.send(blue, Attach(PROTOCOL_VERSION, 1, "blue", 1, 8, 0, HOST, digest("b"), "", 0, (), (), ()))
    blue.welcomed = True
    blue.borrow(1)
    world.deliver()
    assert [len(status(world, tenant).leases) for tenant in ("red", "blue", "")] == [0, 1, 1]
    assert answered(world, RevokeLease(1, 1, "red", 1.0)).outcome == "forbidden"
    assert answered(world, ReclaimGpu(1, 3, "blue", SLAB, 1.0)).outcome == "forbidden"
    assert answered(world, RevokeLease(1, 1, "blue", 1.0)).outcome == "done"
    # A name belongs to its tenant for as long as it is in the ledger.
    world.handle(PartyGone("new", "its process ended"))
    refusal = attach(world, credential=digest("b"))
    assert isinstance(refusal, Refused)
    assert "belongs to another tenant" in refusal.reason


def test_strangers_are_asked_once_a_tick_to_attach(world: World) -> None:
    stranger = world.parties["x"] = Party(world, "x", 0)
    for _ in range(3):
        world.send(stranger, Heartbeat())
    world.send(stranger, Detach("bye"))
    assert len(stranger.down) == 1
    world.handle(LendingTick())
    world.send(stranger, Heartbeat())
    assert [type(message) for message in stranger.down] == [Rejoin, Rejoin]


# Taking back ------------------------------------------------------------------------------------------------------


def test_what_is_free_comes_at_once_and_the_rest_as_its_borrower_lets_go(world: World) -> None:
    lender, borrower = lend(world, 5, 3)
    request = lender.take_back(4, 30.0)
    world.deliver()
    assert lender.own == {3, 4}
    assert lender.reclaims == {request: None}
    (key,) = borrower.held
    assert borrower.to_release == {key: {1, 2}}, "no more than is needed"
    assert status(world).leases[0].state == "revoking"
    borrower.release(key, {1})
    world.deliver()
    assert lender.own == {1, 3, 4}
    assert lender.reclaims == {request: None}
    borrower.release(key, {2})
    world.deliver()
    last = lender.reclaims[request]
    assert last is not None
    assert (last.slabs, last.missing, last.holders) == ((2,), 0, ())
    assert lender.zeroing == set(), "nobody is told twice that a slab came back"
    assert status(world).leases[0].state == "active"
    world.check_agreement()


def test_at_the_deadline_it_is_said_who_holds_the_rest_and_that_comes_later(world: World) -> None:
    lender, _ = lend(world, 3, 3)
    request = lender.take_back(3, 2.0)
    world.pass_time(1.0)
    assert lender.reclaims[request] is None
    world.pass_time(3.0)
    last = lender.reclaims[request]
    assert last is not None
    assert (last.missing, last.holders, last.complete) == (3 * SLAB, ("borrower",), True)
    (lease,) = status(world).leases
    assert lease.state == "overdue"
    assert lease.deadline_s is not None
    assert lease.deadline_s < 0
    world.react()
    last = lender.reclaims[request]
    assert last is not None
    assert (last.missing, last.holders) == (0, ())
    assert lender.own == {0, 1, 2}
    assert status(world).leases == ()


def test_two_reclaims_at_once_do_not_count_the_same_slab_twice(world: World) -> None:
    lender, borrower = lend(world, 4, 4)
    first, second = lender.take_back(2, 9.0), lender.take_back(3, 9.0)
    world.deliver()
    (key,) = borrower.held
    assert borrower.to_release[key] == {0, 1, 2, 3}
    borrower.release(key, {2, 3})
    world.deliver()
    done = lender.reclaims[first]
    assert done is not None
    assert done.slabs == (2, 3)
    assert lender.reclaims[second] is None, "two are all that was left for it"
    borrower.release(key, {0, 1})
    world.deliver()
    assert lender.reclaims[second] is not None
    assert lender.own == {0, 1, 2, 3}


def test_slabs_that_are_being_zeroed_are_taken_back_when_they_are_offered_again(world: World) -> None:
    lender, borrower = lend(world, 2, 2)
    (key,) = borrower.held
    borrower.release(key, {0, 1})
    world.deliver()
    request = lender.take_back(2, 1.0)
    world.deliver()
    assert lender.reclaims[request] is None
    world.pass_time(2.0)
    last = lender.reclaims[request]
    assert last is not None
    assert last.holders == ("lender",)
    world.react()
    assert lender.own == {0, 1}
    assert lender.free == set()


def test_a_reclaim_of_nothing_or_of_more_than_is_offered_completes(world: World) -> None:
    lender, _ = lend(world, 2, 0)
    nothing, much = lender.take_back(0, 1.0), lender.take_back(99, 1.0)
    world.deliver()
    assert lender.own == {0, 1}
    assert all(isinstance(lender.reclaims[request], Yielded) for request in (nothing, much))


def test_a_borrower_that_dies_in_a_reclaim_leaves_slabs_that_are_to_be_destroyed(world: World) -> None:
    lender, borrower = lend(world, 3, 3)
    request = lender.take_back(2, 30.0)
    world.deliver()
    world.kill(borrower, noticed=True)
    world.deliver()
    last = lender.reclaims[request]
    assert last is not None
    assert (last.slabs, last.kept) == ((), (1, 2))
    assert len(lender.own) == 3, "the third was not asked for, and is made anew, too"
    assert lender.slabs == 3


def test_an_operator_takes_back_from_all_lenders_of_a_gpu(world: World) -> None:
    first, second = world.party(0, 2, "first"), world.party(0, 2, "second")
    borrower = world.party(1, 0, "borrower")
    world.react()
    borrower.borrow(3)
    world.react()
    assert world.wish(ReclaimGpu(7, 0, "", 3 * SLAB, 5.0)) == []
    world.react()
    assert world.answers[-1] == Answered(7, "done", "", 3 * SLAB, 0, ())
    assert len(first.own) + len(second.own) == 3
    world.wish(ReclaimGpu(8, 0, "", 9 * SLAB, 0.0))
    done = world.answers[-1]
    assert isinstance(done, Answered)
    assert (done.yielded, done.missing, done.holders) == (0, SLAB, ("borrower",))
    assert "which is all that can be taken back" in done.reason
    assert answered(world, ReclaimGpu(9, 1, "", SLAB, 1.0)).outcome == "done"


def test_an_operator_asks_one_lease_back(world: World) -> None:
    _, borrower = lend(world)
    assert answered(world, RevokeLease(1, 1, "", 5.0)).outcome == "done"
    assert "was revoking already" in answered(world, RevokeLease(2, 1, "", 2.0)).reason
    world.deliver()
    assert status(world).leases[0].deadline_s == 2.0
    world.react()
    assert borrower.held == {}
    assert answered(world, RevokeLease(3, 1, "", 5.0)).outcome == "unknown"


@pytest.mark.parametrize(
    ("wish", "outcome", "words"),
    [
        (Map(1, 0, 77), "unknown", "no GPU 77"),
        (Map(1, 0, 0), "refused", "its own producer"),
        (Unmap(1, 0, 1), "absent", "nothing to delete"),
        (Unmap(1, 50, 51), "unknown", "no GPU 50 and no GPU 51"),
        (ReclaimGpu(1, 9, "", 1, 1.0), "unknown", "no GPU 9"),
    ],
)
def test_a_wish_that_cannot_be_says_why(world: World, wish: Map | Unmap | ReclaimGpu, outcome: str, words: str) -> None:
    lend(world)
    answer = answered(world, wish)
    assert answer.outcome == outcome
    assert words in answer.reason


def test_a_pair_is_mapped_once(world: World) -> None:
    lend(world)
    answered(world, Map(1, 0, 1))
    assert answered(world, Map(2, 0, 1)).outcome == "duplicate"
    world.restart()
    assert status(world).mapping == ((0, 1),)

"""The lending core under any order of events: parties that lend, borrow, pause and die, messages that come late, twice
or from the past, and schedulers that are killed. The world asserts conservation at every event, and that no two
borrowers ever map the same memory.
"""

from random import Random

import pytest

from forebay.sched.lending import LendingCore
from forebay.sched.lending_events import FromPartyLink, LendingSettings, LendingTick
from forebay.transport.messages import (
    AskLending,
    Complain,
    Heartbeat,
    Map,
    Mapped,
    Offer,
    ReclaimGpu,
    Release,
    RevokeLease,
    Unmap,
)
from tests.effort import effort
from tests.sched.lending_world import SLAB, Party, World

SEEDS = range(effort(25, 60))
STEPS = 150


def act(world: World, random: Random, loses_ledger: bool) -> None:
    """One thing happens, somewhere."""
    parties = [party for party in world.parties.values() if party.alive]
    running = [party for party in parties if not party.paused]
    party = random.choice(parties)
    what = random.random()
    if what < 0.5:  # one message arrives, in one direction
        speaking = [party for party in running if party.up]
        hearing = [party for party in running if party.down]
        if speaking and (not hearing or random.random() < 0.5):
            chosen = random.choice(speaking)
            message = chosen.up.popleft()
            if random.random() < 0.03 and isinstance(message, Release | Mapped | Complain | Heartbeat):
                world.handle(FromPartyLink(chosen.name, message))
            world.handle(FromPartyLink(chosen.name, message))
        elif hearing:
            chosen = random.choice(hearing)
            chosen.hear(chosen.down.popleft())
    elif what < 0.6:
        if not party.paused and party.welcomed:
            party.borrow(random.randrange(1, 6))
    elif what < 0.72:
        borrowers = [party for party in running if party.held and party.welcomed]
        if borrowers:
            use(random.choice(borrowers), random)
    elif what < 0.78:
        if not party.paused and party.zeroing:
            party.offer(tuple(sorted(party.zeroing)))
        elif not party.paused and party.own:
            party.offer((random.choice(sorted(party.own)),))
    elif what < 0.82:
        if not party.paused and party.welcomed:
            party.take_back(random.randrange(1, 8), random.choice([0.0, 2.0, 30.0]))
    elif what < 0.9:
        world.now += random.choice([0.1, 1.0, 3.0])
        for other in running:
            other.say(Heartbeat())
        world.handle(LendingTick())
    elif what < 0.94:
        wish(world, random)
    elif what < 0.96:
        party.paused = not party.paused
    elif what < 0.97:
        if len(parties) > 2:
            world.kill(party, noticed=random.random() < 0.5)
        world.party(random.randrange(4), random.randrange(6))
    elif what < 0.98:
        if not party.paused:
            party.attach()
    elif what < 0.99:
        stale(world, party, random)
    elif random.random() < 0.5:
        if random.random() < 0.5:
            for other in parties:
                other.down.clear()
        world.restart(loses_ledger and random.random() < 0.5)


def use(party: Party, random: Random) -> None:
    lease = random.choice(sorted(party.held))
    held = party.held[lease]
    if not held.mapped:
        lender = party.world.parties[held.grant.lender]
        if lender.alive and lease not in lender.lent and random.random() < 0.7:
            return  # its `Lend` may still come
        party.map(lease)
    elif lease in party.to_release and random.random() < 0.8:
        party.release(lease, party.to_release.pop(lease))
    else:
        party.release(lease, {slab for slab in held.slabs if random.random() < 0.5})


def wish(world: World, random: Random) -> None:
    gpus = random.randrange(4), random.randrange(4)
    leases = sorted(world.core.book.ledger.leases) or [1]
    world.wish(
        random.choice(
            [
                Map(1, *gpus),
                Unmap(2, *gpus),
                RevokeLease(3, random.choice(leases), "", random.choice([0.0, 5.0])),
                ReclaimGpu(4, gpus[0], "", random.randrange(1, 8) * SLAB, 3.0),
                AskLending(5, ""),
            ]
        )
    )


def stale(world: World, party: Party, random: Random) -> None:
    """Somebody speaks of leases and slabs that are not its own, or of an epoch that is over."""
    leases = [lease for lease in world.core.book.ledger.leases.values() if lease.borrower != party.name]
    if leases:
        lease = random.choice(leases)
        world.send(party, Release(lease.number, lease.epoch, tuple(lease.slabs)))
        world.send(party, Mapped(lease.number, lease.epoch))
        world.send(party, Complain(lease.number, lease.epoch, "none of my business"))
    mine = sorted(party.held)
    if mine:
        held = party.held[mine[0]]
        world.send(party, Release(mine[0][0], held.grant.epoch + 7, tuple(held.slabs)))
        world.send(party, Release(*mine[0], (10**6,)))
    stock = world.core.book.ledger.stocks.get(party.name)
    if stock is not None:
        world.send(party, Offer((*stock.free, *stock.lent)))


@pytest.mark.parametrize("loses_ledger", [False, True], ids=["kept", "lost"])
def test_memory_is_conserved_in_any_order_of_events_and_ledger_and_parties_agree_in_the_end(loses_ledger: bool) -> None:
    for seed in SEEDS:
        random = Random(seed)
        world = World(seed, LendingSettings(ttl_s=10.0, secret="abcd", heartbeat_s=1.0))
        for gpu in range(4):
            world.party(gpu, random.randrange(8))
        try:
            for _ in range(STEPS):
                act(world, random, loses_ledger)
            settle(world)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def settle(world: World) -> None:
    """Everybody runs again and does what is asked; then nothing may be in disagreement, or wait for anything."""
    for party in world.parties.values():
        party.paused = False
    for _ in range(4):
        world.pass_time(world.settings.ttl_s)
        world.react()
    world.pass_time(40.0)
    for _ in range(4):
        world.react()
    world.check_agreement()
    for party in world.parties.values():
        if party.alive:
            assert not party.refused
            assert all(party.reclaims.values()), f"{party.name} waits for {party.reclaims}"
            assert all(last and (last.holders or not last.missing) for last in party.reclaims.values())
    for lease in world.core.book.ledger.leases.values():
        assert lease.state in ("active", "granted"), lease


def test_the_same_journal_leads_to_the_same_commands() -> None:
    for seed in range(effort(10, 20)):
        random = Random(seed)
        world = World(seed)
        for gpu in range(4):
            world.party(gpu, 5)
        for _ in range(STEPS):
            act(world, random, False)
        again = LendingCore(world.settings)
        for (now, event), commands in zip(world.journal, world.commands, strict=True):
            assert again.handle(now, event) == commands

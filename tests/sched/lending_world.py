"""Lenders and borrowers that keep the protocol, around a lending core: links with messages on their way, deaths,
pauses, and restarts of the scheduler. Memory is mirrored: two borrowers that map one slab at once fail the test at that
moment.
"""

from collections import deque
from dataclasses import dataclass, field
from random import Random

import msgspec

from forebay.sched.lending import LendingCore
from forebay.sched.lending_events import (
    CountRecord,
    Forget,
    FromPartyLink,
    Keep,
    LendingCommand,
    LendingEvent,
    LendingSettings,
    LendingTick,
    PartyGone,
    Record,
    Remark,
    Restored,
    Tell,
    Wish,
)
from forebay.transport.messages import (
    PROTOCOL_VERSION,
    Answered,
    AskLending,
    Attach,
    Attached,
    Borrow,
    Complain,
    FromParty,
    Grant,
    Granted,
    Heartbeat,
    Holding,
    LeaseOver,
    Lend,
    LendingStatus,
    LendingWish,
    Map,
    Mapped,
    Message,
    Offer,
    ReclaimGpu,
    Refused,
    Rejoin,
    Release,
    Returned,
    Revoke,
    RevokeLease,
    TakeBack,
    ToPartyLink,
    Unmap,
    Yielded,
)

SLAB = 1 << 20
HOST = "here"

Key = tuple[int, int]
"""A lease's number and epoch: a scheduler that lost its ledger counts from the beginning, under a new epoch."""


@dataclass
class Held:
    """A lease as a borrower has it; `mapped` once it has all its memory."""

    grant: Grant
    slabs: set[int]
    mapped: bool = False

    @property
    def holding(self) -> Holding:
        grant = self.grant
        slabs = tuple(sorted(self.slabs))
        return Holding(grant.lease, grant.epoch, slabs, SLAB, grant.lender, grant.endpoint, grant.token)


@dataclass
class Party:
    """Lends `offered` slabs and borrows from others. `world` carries its messages."""

    world: "World"
    name: str
    gpu: int
    alive: bool = True
    paused: bool = False
    session: int = 0
    welcomed: bool = False
    up: deque[FromParty | Heartbeat] = field(default_factory=deque)
    down: deque[ToPartyLink] = field(default_factory=deque)
    next_slab: int = 0
    own: set[int] = field(default_factory=set)
    free: set[int] = field(default_factory=set)
    zeroing: set[int] = field(default_factory=set)
    lent: dict[Key, tuple[Lend, set[int]]] = field(default_factory=dict)
    held: dict[Key, Held] = field(default_factory=dict)
    to_release: dict[Key, set[int]] = field(default_factory=dict)
    requests: int = 0
    reclaims: dict[int, Yielded | None] = field(default_factory=dict)
    granted: list[Granted] = field(default_factory=list)
    refused: str = ""

    def say(self, message: FromParty | Heartbeat) -> None:
        self.up.append(message)

    def attach(self) -> None:
        self.session += 1
        self.welcomed = False
        # What was zeroed meanwhile is offered along.
        self.free |= self.zeroing
        self.zeroing.clear()
        self.reclaims = {request: last for request, last in self.reclaims.items() if last is not None}
        lent = tuple(
            Holding(lend.lease, lend.epoch, tuple(sorted(slabs)), SLAB, lend.borrower, self.endpoint, lend.token)
            for lend, slabs in self.lent.values()
        )
        borrowed = tuple(held.holding for held in self.held.values())
        self.say(
            Attach(
                PROTOCOL_VERSION, self.session, self.name, self.gpu, 100, 0, HOST, "", self.endpoint, SLAB,
                tuple(sorted(self.free)), lent, borrowed,
            )
        )  # fmt: skip

    @property
    def endpoint(self) -> str:
        return f"/{self.name}.sock"

    @property
    def slabs(self) -> int:
        """All that it has, whoever uses it."""
        return len(self.own) + len(self.free) + len(self.zeroing) + sum(len(slabs) for _, slabs in self.lent.values())

    # What it wants -------------------------------------------------------------------------------------------------

    def make(self, count: int) -> tuple[int, ...]:
        made = tuple(range(self.next_slab, self.next_slab + count))
        self.next_slab += count
        return made

    def offer(self, slabs: tuple[int, ...]) -> None:
        if self.welcomed:  # else the core may have taken its story already
            self.own.difference_update(slabs)
            self.zeroing.difference_update(slabs)
            self.free.update(slabs)
            self.say(Offer(slabs))

    def borrow(self, slabs: int) -> None:
        self.requests += 1
        self.say(Borrow(self.requests, slabs * SLAB))

    def take_back(self, slabs: int, deadline_s: float) -> int:
        self.requests += 1
        self.reclaims[self.requests] = None
        self.say(TakeBack(self.requests, slabs * SLAB, deadline_s))
        return self.requests

    def map(self, lease: Key) -> None:
        """Fetches a lease's memory from its lender, as it is at this moment."""
        held = self.held[lease]
        lender = self.world.parties.get(held.grant.lender)
        lent = lender.lent.get(lease) if lender is not None and lender.alive and not lender.paused else None
        if lent is None or lent[0].token != held.grant.token or not held.slabs <= lent[1]:
            del self.held[lease]
            self.say(Complain(*lease, "its lender does not answer"))
            return
        for slab in held.slabs:
            others = self.world.mapped.setdefault((held.grant.lender, slab), set())
            assert not others, f"slab {slab} of {held.grant.lender}: {self.name} maps it beside {others}"
            others.add(self.name)
        held.mapped = True
        self.say(Mapped(*lease))

    def release(self, lease: Key, slabs: set[int]) -> None:
        held = self.held[lease]
        slabs = slabs & held.slabs
        if not slabs:
            return
        self.unmap(held, slabs)
        self.say(Release(*lease, tuple(sorted(slabs))))
        if not held.slabs:
            del self.held[lease]
            self.to_release.pop(lease, None)

    def unmap(self, held: Held, slabs: set[int]) -> None:
        held.slabs -= slabs
        if held.mapped:
            for slab in slabs:
                self.world.mapped[held.grant.lender, slab].discard(self.name)

    # What it hears -------------------------------------------------------------------------------------------------

    def hear(self, message: ToPartyLink) -> None:
        if isinstance(message, Attached):
            self.welcomed = self.welcomed or message.session == self.session
        if not self.welcomed and not isinstance(message, Rejoin | Refused):
            return
        match message:
            case Rejoin():
                self.attach()
            case Refused(reason):
                self.refused = reason
            case Lend(lease, epoch, slabs):
                assert self.free >= set(slabs), f"{self.name} is to lend {slabs}, which it does not offer"
                self.free.difference_update(slabs)
                self.lent[lease, epoch] = message, set(slabs)
            case Granted(_, grants):
                self.granted.append(message)
                for grant in grants:
                    self.held[grant.lease, grant.epoch] = Held(grant, set(grant.slabs))
            case Revoke(lease, epoch, slabs):
                if (lease, epoch) in self.held:
                    self.to_release.setdefault((lease, epoch), set()).update(slabs)
            case LeaseOver(lease, epoch):
                if (held := self.held.pop((lease, epoch), None)) is not None:
                    self.unmap(held, set(held.slabs))
                    self.to_release.pop((lease, epoch), None)
            case Returned(_, _, slabs, released):
                self.take_out(set(slabs))
                if released:
                    self.zeroing.update(slabs)
                else:
                    self.own.update(self.make(len(slabs)))
            case Yielded(request, slabs, kept, complete, _, _):
                self.take_out({*slabs, *kept})
                self.own.update(slabs)
                self.own.update(self.make(len(kept)))
                if complete and request:
                    self.reclaims[request] = message
            case _:
                pass

    def take_out(self, slabs: set[int]) -> None:
        """Of what it offers or has lent."""
        known = self.free | set().union(*(mine for _, mine in self.lent.values()))
        assert slabs <= known, f"{self.name} gets back {slabs - known}, which it neither offers nor has lent"
        self.free -= slabs
        for lease, (_, mine) in list(self.lent.items()):
            mine -= slabs
            if not mine:
                del self.lent[lease]


class World:
    def __init__(self, seed: int, settings: LendingSettings | None = None) -> None:
        self.random = Random(seed)
        self.settings = settings or LendingSettings(ttl_s=10.0, secret="abcd")
        self.core = LendingCore(self.settings)
        self.now = 100.0
        self.parties: dict[str, Party] = {}
        self.mapped: dict[tuple[str, int], set[str]] = {}
        self.kept: dict[str, Record] = {}
        self.answers: list[Message] = []
        self.remarks: list[str] = []
        self.beats: list[tuple[float, str]] = []
        self.journal: list[tuple[float, LendingEvent]] = []
        self.commands: list[list[LendingCommand]] = []
        self.handle(LendingTick())

    def party(self, gpu: int, slabs: int = 0, name: str = "") -> Party:
        name = name or f"party-{len(self.parties)}"
        party = self.parties[name] = Party(self, name, gpu)
        party.free.update(party.make(slabs))
        party.attach()
        return party

    def handle(self, event: LendingEvent) -> list[LendingCommand]:
        # By way of its bytes, as in a journal.
        event = msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=LendingEvent)
        self.journal.append((self.now, event))
        commands = self.core.handle(self.now, event)
        self.commands.append(commands)
        self.core.check()
        for command in commands:
            match command:
                case Keep(record):
                    self.kept[record.id] = record
                case Forget(identity):
                    self.kept.pop(identity, None)
                case Tell(peer, Heartbeat()):
                    self.beats.append((self.now, peer))  # they change nothing
                case Tell(peer, message):
                    if (party := self.parties.get(peer)) is not None:
                        party.down.append(message)  # type: ignore[arg-type]
                    else:
                        self.answers.append(message)
                case Remark(text):
                    self.remarks.append(text)
        assert {record.id: record for record in self.core.records} == {"count": CountRecord(1), **self.kept}
        return commands

    def wish(self, wish: LendingWish) -> list[Message]:
        """What the front door hears at once."""
        before = len(self.answers)
        self.handle(Wish("door", wish))
        return self.answers[before:]

    def send(self, party: Party, message: FromParty | Heartbeat) -> None:
        """One message to the core at once."""
        self.handle(FromPartyLink(party.name, message))

    def restart(self, lose_ledger: bool = False) -> None:
        """The scheduler is killed, and started again."""
        records = () if lose_ledger else tuple(self.kept.values())
        if lose_ledger:
            self.kept.clear()
        self.settings = msgspec.structs.replace(self.settings, epoch=self.settings.epoch + 1)
        self.core = LendingCore(self.settings)
        self.journal, self.commands = [], []
        self.handle(Restored(records))

    def kill(self, party: Party, noticed: bool) -> None:
        party.alive = False
        for borrowers in self.mapped.values():
            borrowers.discard(party.name)
        if noticed:
            self.handle(PartyGone(party.name, "its process was ended by SIGKILL"))

    def pass_time(self, seconds: float, step: float = 1.0) -> None:
        """Everybody who can says that it lives."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + step)
            for party in self.parties.values():
                if party.alive and not party.paused:
                    party.say(Heartbeat())
            self.deliver()
            self.handle(LendingTick())
            self.deliver()

    def deliver(self) -> None:
        """All that is on its way, until nobody has anything to say."""
        busy = True
        while busy:
            busy = False
            for party in self.parties.values():
                while party.up and party.alive and not party.paused:
                    busy = True
                    self.handle(FromPartyLink(party.name, party.up.popleft()))
                while party.down and party.alive and not party.paused:
                    busy = True
                    party.hear(party.down.popleft())

    def react(self) -> None:
        """Everybody does what it was asked, at once."""
        self.deliver()
        for party in self.parties.values():
            if party.alive and not party.paused and party.welcomed:
                for lease in list(party.held):
                    if not party.held[lease].mapped:
                        party.map(lease)
                for lease in list(party.to_release):
                    if lease in party.held:
                        party.release(lease, party.to_release[lease])
                    party.to_release.pop(lease, None)
                if party.zeroing:
                    party.offer(tuple(sorted(party.zeroing)))
        self.deliver()

    def check_agreement(self) -> None:
        """Once nothing is on its way: ledger and parties tell the same story."""
        ledger = self.core.book.ledger
        for party in self.parties.values():
            if not party.alive or party.paused:
                continue
            stock = ledger.stocks[party.name]
            lent = {lease: slabs for lease, (_, slabs) in party.lent.items()}
            assert set(stock.free) == party.free, party.name
            assert set(stock.returned) == party.zeroing, party.name
            assert {
                (lease.number, lease.epoch): set(lease.slabs)
                for lease in ledger.lent_by(party.name)
                if lease.state != "stranded"
            } == lent, party.name
            assert {(lease.number, lease.epoch): set(lease.slabs) for lease in ledger.borrowed_by(party.name)} == {
                lease: held.slabs for lease, held in party.held.items()
            }, party.name


def lend(world: World, slabs: int = 4, borrowed: int = 3) -> tuple[Party, Party]:
    """A lender of `slabs` on GPU 0 and a borrower on GPU 1 that has mapped `borrowed` of them."""
    lender, borrower = world.party(0, slabs, "lender"), world.party(1, 0, "borrower")
    world.react()
    borrower.borrow(borrowed)
    world.react()
    return lender, borrower


def status(world: World, tenant: str = "") -> LendingStatus:
    (answer,) = world.wish(AskLending(1, tenant))
    assert isinstance(answer, LendingStatus)
    return answer


def answered(world: World, wish: Map | Unmap | RevokeLease | ReclaimGpu) -> Answered:
    (answer,) = world.wish(wish)
    assert isinstance(answer, Answered)
    return answer

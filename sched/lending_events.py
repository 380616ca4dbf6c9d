"""What enters the lending core, what it answers, and what must outlive its process. The core is in lending.py.

No secret is in here but the leases' own: a party's credential comes as its SHA-256 (hexadecimal), and so are tenants'.
"""

from collections.abc import Mapping

import msgspec

from forebay.transport.messages import (
    FromParty,
    Heartbeat,
    LendingAnswer,
    LendingWish,
    Message,
    ToPartyLink,
)


class Gpu(msgspec.Struct, frozen=True):
    """A device of this host, by its physical number. `total` in bytes, 0 if unknown."""

    index: int
    name: str = ""
    total: int = 0


class LendingSettings(msgspec.Struct, frozen=True):
    """`gpus`: the known ones. A party silent for `ttl_s` is lost; that is also how long leases wait for their parties
    after a restart of the scheduler. `tenants`: names by the SHA-256 of their bearer tokens; without any, everybody is
    the same tenant, named "". `secret`: hexadecimal, of this process alone; leases' tokens are made of it. `epoch`: of
    all leases granted by this process, higher than that of any earlier one."""

    gpus: tuple[Gpu, ...] = ()
    ttl_s: float = 10.0
    heartbeat_s: float = 1.0
    tenants: Mapping[str, str] = msgspec.field(default_factory=dict)
    secret: str = ""
    epoch: int = 1


# What is kept --------------------------------------------------------------------------------------------------------


class LeaseRecord(Message, frozen=True):
    """`asked`: slabs that were asked back, each with its deadline on the core's clock."""

    lease: int
    epoch: int
    token: str
    lender: str
    lender_gpu: int
    lender_tenant: str
    borrower: str
    borrower_gpu: int
    tenant: str
    slabs: tuple[int, ...]
    slab_bytes: int
    endpoint: str
    state: str
    asked: tuple[tuple[int, float], ...] = ()

    @property
    def id(self) -> str:
        return f"lease/{self.lease}"


class PairRecord(Message, frozen=True):
    """One pair of the mapping."""

    producer: int
    consumer: int

    @property
    def id(self) -> str:
        return f"pair/{self.producer}/{self.consumer}"


class CountRecord(Message, frozen=True):
    """`next_lease`: no lease of that number or a higher one was ever granted."""

    next_lease: int

    @property
    def id(self) -> str:
        return "count"


Record = LeaseRecord | PairRecord | CountRecord


# Events --------------------------------------------------------------------------------------------------------------


class Restored(Message, frozen=True):
    """The first event of a core that has a past: what its predecessor kept."""

    records: tuple[Record, ...]


class FromPartyLink(Message, frozen=True):
    peer: str
    message: FromParty | Heartbeat


class Wish(Message, frozen=True):
    """Of a front door."""

    peer: str
    message: LendingWish


class PartyGone(Message, frozen=True):
    """The process behind a peer has ended."""

    peer: str
    reason: str


class LendingTick(Message, frozen=True):
    """Time has passed."""


LendingEvent = Restored | FromPartyLink | Wish | PartyGone | LendingTick


# Commands ------------------------------------------------------------------------------------------------------------


class Keep(Message, frozen=True):
    """To be on disk before any later command is carried out, in place of what was kept under its id."""

    record: Record


class Forget(Message, frozen=True):
    id: str


class Tell(Message, frozen=True):
    peer: str
    message: ToPartyLink | LendingAnswer


class Remark(Message, frozen=True):
    """For the log."""

    text: str


LendingCommand = Keep | Forget | Tell | Remark

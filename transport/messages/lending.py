"""What the scheduler and the parties to a loan say to each other. A party is any process that lends or borrows memory,
a worker's client library as much as an app's; it has a control link of its own.

Memory is lent in whole slabs. A lender numbers its slabs; a number means the same memory for as long as the lender
lives and is never used again. Every slab that a lender has offered is *free*, *lent* (it belongs to one lease) or
*returned* (nobody's until its lender has zeroed it, or made it anew, and offers it again).
"""

from typing import Literal

from forebay.transport.messages.base import Message, Part

LeaseState = Literal["granted", "active", "revoking", "overdue", "stranded", "over"]
"""granted: the borrower has not mapped it yet; active: it has; revoking: asked back, within the deadline; overdue: past
it; stranded: its lender is gone, the memory lives for as long as the borrower maps it; over: nobody's any more."""


class Holding(Part, frozen=True):
    """One lease as a party knows it, told at every `Attach`: by the borrower what it maps, by the lender what it has
    handed out. `peer` is the other party's name, `endpoint` the lender's Unix socket, `token` the lease's secret."""

    lease: int
    epoch: int
    slabs: tuple[int, ...]
    slab_bytes: int
    peer: str
    endpoint: str
    token: str


class Grant(Part, frozen=True):
    """Slabs of one lender, for a borrower that fetches their descriptors at `endpoint` with `token`."""

    lease: int
    epoch: int
    lender: str
    gpu: int
    slabs: tuple[int, ...]
    slab_bytes: int
    endpoint: str
    token: str


# From a party --------------------------------------------------------------------------------------------------------


class Attach(Message, frozen=True):
    """A party's first message, again after every `Rejoin`, with all that it holds. `party` is its name, unique and the
    same for as long as its process lives; `gpu` the physical number of its device; `credential` its tenant's bearer
    token ("" where the server has none). `endpoint`: Unix socket at which descriptors are fetched ("": never lends).
    `slab_bytes`: size of the slabs that it lends or, of a borrower, takes (0: any).
    `free`: slabs that it offers now and nobody has. `pids`: the namespace that `pid` is a number of ("": unknown)."""

    version: int
    session: int
    party: str
    gpu: int
    pid: int
    uid: int
    host: str
    credential: str
    endpoint: str
    slab_bytes: int
    free: tuple[int, ...]
    lent: tuple[Holding, ...]
    borrowed: tuple[Holding, ...]
    pids: str = ""


class Offer(Message, frozen=True):
    """These slabs are zeroed and may be lent: new ones, or ones that came back."""

    slabs: tuple[int, ...]


class TakeBack(Message, frozen=True):
    """The lender wants `bytes` of what it offers for itself (rounded up to slabs), answered by one or more `Yielded`.
    Requests are numbered upwards from 1. The next `Attach` forgets them: ask for what is still missing then anew."""

    request: int
    bytes: int
    deadline_s: float


class Borrow(Message, frozen=True):
    """Asks for `bytes` (rounded up to slabs), answered by `Granted` with as much as there is. Requests are numbered
    upwards; one that does not come after the last is ignored. `avoid`: a lender of which it wants nothing, for example
    because it moves what that one asked back."""

    request: int
    bytes: int
    avoid: str = ""


class Mapped(Message, frozen=True):
    """The borrower has mapped the whole lease."""

    lease: int
    epoch: int


class Release(Message, frozen=True):
    """The borrower has let go of these slabs of the lease (all of them: the lease is over)."""

    lease: int
    epoch: int
    slabs: tuple[int, ...]


class Complain(Message, frozen=True):
    """The borrower could not get what it was granted (lender silent, descriptor missing or of another size); it maps
    nothing of the lease."""

    lease: int
    epoch: int
    reason: str


class Detach(Message, frozen=True):
    """The party goes. What it lent is stranded; what it borrowed it has unmapped."""

    reason: str


# To a party ----------------------------------------------------------------------------------------------------------


class Attached(Message, frozen=True):
    """Answers `Attach`; all that follows belongs to that `session`. A party silent for `ttl_s` loses its leases."""

    version: int
    session: int
    heartbeat_s: float
    ttl_s: float


class Granted(Message, frozen=True):
    """Answers `Borrow`: grants over one or several lenders, perhaps less than asked for (`reason` says why)."""

    request: int
    grants: tuple[Grant, ...]
    reason: str = ""


class Lend(Message, frozen=True):
    """To the lender: whoever shows `token` may have the descriptors of these slabs. Sent before the borrower's
    `Granted`; they travel on different links and may arrive in either order."""

    lease: int
    epoch: int
    slabs: tuple[int, ...]
    borrower: str
    token: str


class Revoke(Message, frozen=True):
    """To the borrower: let go of these slabs within `deadline_s`; move what is in them elsewhere first."""

    lease: int
    epoch: int
    slabs: tuple[int, ...]
    deadline_s: float
    reason: str


class LeaseOver(Message, frozen=True):
    """To the borrower: the ledger no longer knows this lease (its time to live ran out, or it is of an older epoch).
    What it still maps is its own copy by now; it moves it and unmaps."""

    lease: int
    epoch: int
    reason: str


class Returned(Message, frozen=True):
    """To the lender: these slabs came back (each is told of once: so, or as `Yielded`). `released`: the borrower says
    that it unmapped them, and they are to be zeroed before they are offered again; otherwise it may still map them, and
    they are to be destroyed and made anew (under new numbers), also where the lender took them for free."""

    lease: int
    epoch: int
    slabs: tuple[int, ...]
    released: bool


class Yielded(Message, frozen=True):
    """To the lender: these slabs are its own again, offered no longer. `request` 0: asked for by an operator. `kept`:
    further ones that a borrower may still map (destroy them). After the last one, and from the deadline on, `complete`
    is true; `missing` bytes are then still out, held by `holders`, and are told of as they come."""

    request: int
    slabs: tuple[int, ...]
    kept: tuple[int, ...]
    complete: bool
    missing: int = 0
    holders: tuple[str, ...] = ()


# From and to a front door --------------------------------------------------------------------------------------------

Outcome = Literal["done", "unknown", "duplicate", "absent", "forbidden", "refused"]


class Map(Message, frozen=True):
    """From now on `producer` lends to `consumer`, and `consumer` borrows from its mapped producers only. The numbers
    are the GPUs' physical ones."""

    query: int
    producer: int
    consumer: int


class Unmap(Message, frozen=True):
    query: int
    producer: int
    consumer: int


class RevokeLease(Message, frozen=True):
    """An operator asks one lease back, on behalf of `tenant`."""

    query: int
    lease: int
    tenant: str
    deadline_s: float


class ReclaimGpu(Message, frozen=True):
    """An operator takes `bytes` of what GPU `gpu` lends back for it."""

    query: int
    gpu: int
    tenant: str
    bytes: int
    deadline_s: float


class AskLending(Message, frozen=True):
    query: int
    tenant: str


class Answered(Message, frozen=True):
    """How a front door's wish ended. `yielded` and `missing` in bytes (of a reclaim); `deadline_s` is in force (of a
    revocation)."""

    query: int
    outcome: Outcome
    reason: str = ""
    yielded: int = 0
    missing: int = 0
    holders: tuple[str, ...] = ()
    deadline_s: float | None = None


class GpuStatus(Part, frozen=True):
    """In bytes: `total` is the device's memory (0 where nobody has told), `free` what is offered and nobody has. `note`
    says why something is not lent at the moment."""

    index: int
    name: str
    total: int
    free: int
    lent: int
    borrowed: int
    note: str = ""


class LeaseStatus(Part, frozen=True):
    """`deadline_s`: seconds until the deadline of a revocation (negative: overdue), None without one. `lender` and
    `borrower` are parties, `lender_gpu` and `borrower_gpu` their devices' numbers."""

    id: int
    epoch: int
    lender: str
    lender_gpu: int
    borrower: str
    borrower_gpu: int
    bytes: int
    state: LeaseState
    deadline_s: float | None


class LendingStatus(Message, frozen=True):
    """Answers `AskLending`. `mapping`: pairs of producer and consumer. `leases`: only those of the tenant ("": all).
    `counters`: what happened since the scheduler started, by name."""

    query: int
    mapping: tuple[tuple[int, int], ...]
    gpus: tuple[GpuStatus, ...]
    leases: tuple[LeaseStatus, ...]
    counters: tuple[tuple[str, int], ...] = ()


FromParty = Attach | Offer | TakeBack | Borrow | Mapped | Release | Complain | Detach
"""And `Heartbeat`."""

ToParty = Attached | Granted | Lend | Revoke | LeaseOver | Returned | Yielded
"""And `Refused`, `Rejoin`, `Stop`, `Heartbeat`."""

LendingWish = Map | Unmap | RevokeLease | ReclaimGpu | AskLending
LendingAnswer = Answered | LendingStatus

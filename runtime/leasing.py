"""Gets leases for a borrower, and keeps them: asks the scheduler, fetches descriptors from lenders, tells what became
of them. Lives in the borrower's event loop. It never raises because somebody is away; it gets less, and says why.

A lease is held from the moment in which its grant is read, so that nothing said of it later is lost, until its last
slab is let go of. Whose business that is:

| it is | lets go of it |
|---|---|
| granted, and nobody waits any more (too late, given up, closed) | `on_message`, `_ask` |
| on its way here: its descriptors are fetched | `_fetch` where that fails, `obtain` where it is given up |
| obtained | who obtained it: `LoanMemory.arriving` for loans; an app that asked itself |
| in slots | `LoanMemory.left` as the slot is emptied; the app |
| any of these when the borrower closes | `close` |

It changes hands once the next one has taken over; what that did not take stays with the one before.
"""

import asyncio
import fcntl
from collections.abc import Collection
from dataclasses import dataclass

from forebay.gpu.backend import MemoryBackend, MemorySlab
from forebay.gpu.errors import DeviceError
from forebay.runtime.background import log
from forebay.runtime.fetching import fetch
from forebay.runtime.leases import HeldLease, OnRevoke
from forebay.runtime.lending_errors import HandoverFailed
from forebay.runtime.party import Holdings, Party
from forebay.transport.messages import (
    Borrow,
    Complain,
    Grant,
    Granted,
    LeaseOver,
    Mapped,
    Release,
    Revoke,
    ToParty,
)
from forebay.transport.messages.handover import Ask

F_SEAL_FUTURE_WRITE = 0x10
"""Of linux/fcntl.h; the fcntl module has it from Python 3.13 on."""


Obtained = tuple[list[HeldLease], str]
"""Leases, and why they are fewer than asked for ("": they are not)."""


@dataclass(eq=False)
class _Wish:
    """What the scheduler was asked for."""

    size: int
    avoid: str
    on_revoke: OnRevoke
    answer: "asyncio.Future[Obtained]"


class Leasing:
    """`grant_s` bounds the wait for the scheduler, `handover_s` that for a lender. `slab_bytes`: what this borrower's
    arenas can take; others are returned."""

    def __init__(
        self, memory: MemoryBackend, slab_bytes: int, uids: Collection[int], grant_s: float, handover_s: float
    ) -> None:
        self.complaints = 0
        self.party: Party  # made after this, of which it describes the holdings
        self._memory = memory
        self._slab_bytes = slab_bytes
        self._uids = frozenset(uids)
        self._grant_s = grant_s
        self._handover_s = handover_s
        # Not by number: a ledger that was lost grants the numbers of leases that are still being moved.
        self._leases: dict[HeldLease, None] = {}
        self._asked: dict[int, _Wish] = {}
        self._last = 0
        self._closed = False

    @property
    def leases(self) -> tuple[HeldLease, ...]:
        """All that hold something, also those that are over."""
        return tuple(self._leases)

    def holdings(self) -> Holdings:
        return (), (), tuple(lease.holding for lease in self._leases if not lease.over)

    async def obtain(self, size: int, on_revoke: OnRevoke, avoid: str = "") -> Obtained:
        """Leases of as many whole slabs, up to `size` bytes, as there are to be had now, with their slabs open; and why
        they are fewer, if they are. Say `mapped(lease)` once it is, or release it. `avoid`: a lender's name."""
        # A scheduler that may just be starting is waited for once; one that is away is not.
        if self.party.state == "connecting" and not await self.party.wait_attached(self._grant_s):
            self.party.unanswered("a wish to attach")
        if not self.party.attached:
            return [], self.party.reason
        granted = await self._ask(size, avoid, on_revoke)
        if granted is None:
            return [], self.party.reason
        leases, reason = granted
        try:
            problems = await asyncio.gather(*(self._fetch(lease) for lease in leases))
        except BaseException:
            self.unwanted(granted)
            raise
        fetched = [lease for lease, problem in zip(leases, problems, strict=True) if not problem]
        return fetched, "; ".join(text for text in (*problems, reason) if text)

    def unwanted(self, obtained: Obtained) -> None:
        """Whoever asked for them is gone."""
        for lease in obtained[0]:
            lease.release(tuple(lease.slabs))

    def mapped(self, lease: HeldLease) -> None:
        """The lease's slabs are where they belong. Saying so twice is fine."""
        if lease.mapped:
            return
        if not lease.over and lease.slabs:
            self.party.send(Mapped(lease.number, lease.epoch))
        lease.is_mapped()

    # The scheduler ---------------------------------------------------------------------------------------------------

    async def _ask(self, size: int, avoid: str, on_revoke: OnRevoke) -> Obtained | None:
        """Leases whose slabs are still to be fetched."""
        answer: asyncio.Future[Obtained] = asyncio.get_running_loop().create_future()
        wish = _Wish(size, avoid, on_revoke, answer)
        self._send_borrow(wish)
        try:
            async with asyncio.timeout(self._grant_s):
                return await answer
        except TimeoutError:
            if _came(answer):  # in the moment in which it was given up
                return answer.result()
            self.party.unanswered(f"a wish to borrow {size} bytes, for {self._grant_s:g} s")
            return None
        except asyncio.CancelledError:
            if _came(answer):
                self.unwanted(answer.result())
            raise
        finally:
            self._asked = {key: other for key, other in self._asked.items() if other is not wish}

    def _send_borrow(self, wish: _Wish) -> None:
        self._last += 1
        self._asked[self._last] = wish
        self.party.send(Borrow(self._last, wish.size, wish.avoid))

    def on_attached(self) -> None:
        """What was asked before the latest `Attach` may be unknown to the scheduler."""
        asked, self._asked = self._asked, {}
        for wish in asked.values():
            self._send_borrow(wish)

    def on_message(self, message: ToParty) -> None:
        match message:
            case Granted(request=request, grants=grants, reason=reason):
                wish = self._asked.pop(request, None)
                if wish is not None and not wish.answer.done() and not self._closed:
                    wish.answer.set_result(([self._hold(grant, wish.on_revoke) for grant in grants], reason))
                else:
                    for grant in grants:
                        self.party.send(Release(grant.lease, grant.epoch, grant.slabs))
            case Revoke(lease=number, epoch=epoch, slabs=slabs, deadline_s=deadline_s, reason=reason):
                for lease in self._known(number):
                    if lease.epoch == epoch:
                        lease.revoke(slabs, deadline_s, reason)
            case LeaseOver(lease=number, epoch=epoch, reason=reason):
                for lease in self._known(number):
                    if lease.epoch <= epoch:
                        self._end(lease, reason)
            case _:
                log.warning("%s: not for a borrower: %s", self.party.identity.party, type(message).__name__)

    def _known(self, number: int) -> list[HeldLease]:
        """The lease that the ledger means by a number, if it is held."""
        return [lease for lease in self._leases if lease.number == number and not lease.over]

    def _hold(self, grant: Grant, on_revoke: OnRevoke) -> HeldLease:
        for lease in self._known(grant.lease):
            self._end(lease, "the ledger was lost, and has granted its number anew")
        lease = HeldLease(grant, on_revoke, self._let_go)
        self._leases[lease] = None
        return lease

    def _end(self, lease: HeldLease, reason: str) -> None:
        log.warning("%s: lease %d is over: %s", self.party.identity.party, lease.number, reason)
        lease.end(reason)

    # The lenders -----------------------------------------------------------------------------------------------------

    async def _fetch(self, lease: HeldLease) -> str:
        """Opens its slabs. Says why they cannot be had, and then they are let go of; else nothing."""
        if lease.slab_bytes != self._slab_bytes:
            lease.release(tuple(lease.slabs))
            return f"{lease.lender} lends slabs of {lease.slab_bytes} bytes, this borrower takes {self._slab_bytes}"
        try:
            await self._open(lease)
        except BaseException as error:
            if isinstance(error, HandoverFailed | DeviceError | OSError):
                fault = not isinstance(error, HandoverFailed) or error.lender_fault
                self._give_up(lease, str(error), fault)
                return str(error)
            self._give_up(lease, "nobody waits for it any more", False)
            raise
        return ""

    async def _open(self, lease: HeldLease) -> None:
        """Raises HandoverFailed, DeviceError, OSError; then what was opened is still in the lease."""
        ask = Ask(lease.number, lease.epoch, lease.token)
        descriptors = await fetch(lease.endpoint, ask, self._uids, self._handover_s)
        problem: Exception | None = None
        for number, descriptor in descriptors.items():
            try:
                slab = self._memory.adopt(descriptor, lease.slab_bytes)
                if number in lease.slabs:
                    lease.slabs[number] = slab
                else:
                    slab.close()
                _require_writable(slab)
            except (DeviceError, OSError) as error:
                problem = HandoverFailed(f"slab {number} of {lease.lender}: {error}")
        if problem is not None:
            raise problem
        missing = [number for number, slab in lease.slabs.items() if slab is None]
        if missing:
            raise HandoverFailed(f"{lease.lender} did not hand over slabs {missing}")

    def _give_up(self, lease: HeldLease, reason: str, lender_fault: bool) -> None:
        """Nothing of the lease is mapped, and nothing will be."""
        if not lender_fault or lease.over or lease.revoking:  # a lease that was asked back may be gone at its lender
            lease.release(lease.slabs.keys())
            return
        self.complaints += 1
        log.warning("%s: complains about %s: %s", self.party.identity.party, lease.lender, reason)
        lease.over = True
        self.party.send(Complain(lease.number, lease.epoch, reason))
        lease.release(lease.slabs.keys())

    def _let_go(self, lease: HeldLease, numbers: frozenset[int]) -> None:
        if not lease.over:
            self.party.send(Release(lease.number, lease.epoch, tuple(sorted(numbers))))
        if not lease.slabs:
            self._leases.pop(lease, None)

    def close(self) -> None:
        """What is still held is let go of; its users have unmapped it."""
        self._closed = True
        for lease in self.leases:
            lease.release(lease.slabs.keys())


def _came(answer: "asyncio.Future[Obtained]") -> bool:
    return answer.done() and not answer.cancelled()


def _require_writable(slab: MemorySlab) -> None:
    """Raises DeviceError for a memfd that nobody can map for writing any more."""
    if slab.closed:
        return
    try:
        seals = fcntl.fcntl(slab.fileno(), fcntl.F_GET_SEALS)
    except OSError:
        return  # CUDA's memory is no memfd
    if seals & (fcntl.F_SEAL_WRITE | F_SEAL_FUTURE_WRITE):
        raise DeviceError("it is sealed against writing")

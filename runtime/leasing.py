"""Gets leases for a borrower, and keeps them: asks the scheduler, fetches descriptors from lenders, tells what became
of them. Lives in the borrower's event loop. It never raises because somebody is away; it gets less, and says why."""

import asyncio
import fcntl
from collections.abc import Collection

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


class Leasing:
    """`grant_s` bounds the wait for the scheduler, `handover_s` that for a lender. `slab_bytes`: what this borrower's
    arenas can take; others are returned."""

    def __init__(
        self, memory: MemoryBackend, slab_bytes: int, uids: Collection[int], grant_s: float, handover_s: float
    ) -> None:
        self.leases: dict[int, HeldLease] = {}
        self.complaints = 0
        self.party: Party  # made after this, of which it describes the holdings
        self._memory = memory
        self._slab_bytes = slab_bytes
        self._uids = frozenset(uids)
        self._grant_s = grant_s
        self._handover_s = handover_s
        self._asked: dict[int, tuple[int, str, asyncio.Future[Granted]]] = {}
        self._last = 0
        self._closed = False

    def holdings(self) -> Holdings:
        return (), (), tuple(lease.holding for lease in self.leases.values() if not lease.over)

    async def obtain(self, size: int, on_revoke: OnRevoke, avoid: str = "") -> tuple[list[HeldLease], str]:
        """Leases of as many whole slabs, up to `size` bytes, as there are to be had now, with their slabs open; and why
        they are fewer, if they are. Say `mapped(lease)` once it is, or release it. `avoid`: a lender's name."""
        # A scheduler that may just be starting is waited for once; one that is away is not.
        if self.party.state == "connecting" and not await self.party.wait_attached(self._grant_s):
            self.party.unanswered("a wish to attach")
        if not self.party.attached:
            return [], self.party.reason
        granted = await self._ask(size, avoid)
        if granted is None:
            return [], self.party.reason
        try:
            fetched = await asyncio.gather(*(self._fetch(grant, on_revoke) for grant in granted.grants))
        except BaseException:
            for grant in granted.grants:
                if (lease := self.leases.get(grant.lease)) is not None:
                    self.give_up(lease, "nobody waits for it any more", False)
            raise
        leases = [lease for lease in fetched if isinstance(lease, HeldLease)]
        reasons = [lease for lease in fetched if isinstance(lease, str)]
        return leases, "; ".join([*reasons, granted.reason] if granted.reason else reasons)

    def unwanted(self, obtained: tuple[list[HeldLease], str]) -> None:
        """Whoever asked for them is gone."""
        for lease in obtained[0]:
            lease.release(tuple(lease.slabs))

    def mapped(self, lease: HeldLease) -> None:
        """The lease's slabs are where they belong."""
        if not lease.over and lease.slabs:
            self.party.send(Mapped(lease.number, lease.epoch))
        lease.is_mapped()

    # The scheduler ---------------------------------------------------------------------------------------------------

    async def _ask(self, size: int, avoid: str) -> Granted | None:
        answer: asyncio.Future[Granted] = asyncio.get_running_loop().create_future()
        self._send_borrow(size, avoid, answer)
        try:
            async with asyncio.timeout(self._grant_s):
                return await answer
        except TimeoutError:
            self._decline(answer)
            self.party.unanswered(f"a wish to borrow {size} bytes, for {self._grant_s:g} s")
            return None
        except asyncio.CancelledError:
            self._decline(answer)
            raise
        finally:
            self._asked = {key: value for key, value in self._asked.items() if value[-1] is not answer}

    def _decline(self, answer: "asyncio.Future[Granted]") -> None:
        """The answer may have come in the moment in which it was given up."""
        if answer.done() and not answer.cancelled():
            self._give_back(answer.result().grants)

    def _give_back(self, grants: tuple[Grant, ...]) -> None:
        """Nobody waits for them any more."""
        for grant in grants:
            self.party.send(Release(grant.lease, grant.epoch, grant.slabs))

    def _send_borrow(self, size: int, avoid: str, answer: "asyncio.Future[Granted]") -> None:
        self._last += 1
        self._asked[self._last] = (size, avoid, answer)
        self.party.send(Borrow(self._last, size, avoid))

    def on_attached(self) -> None:
        """What was asked before the latest `Attach` may be unknown to the scheduler."""
        asked, self._asked = self._asked, {}
        for size, avoid, answer in asked.values():
            self._send_borrow(size, avoid, answer)

    def on_message(self, message: ToParty) -> None:
        match message:
            case Granted(request=request, grants=grants):
                *_, answer = self._asked.get(request, (0, "", None))
                if answer is not None and not answer.done() and not self._closed:
                    answer.set_result(message)
                else:
                    self._give_back(grants)
            case Revoke(lease=number, epoch=epoch, slabs=slabs, deadline_s=deadline_s, reason=reason):
                if (lease := self.leases.get(number)) is not None and lease.epoch == epoch:
                    lease.revoke(slabs, deadline_s, reason)
            case LeaseOver(lease=number, epoch=epoch, reason=reason):
                if (lease := self.leases.get(number)) is not None and lease.epoch <= epoch and not lease.over:
                    log.warning("%s: lease %d is over: %s", self.party.identity.party, number, reason)
                    lease.end(reason)
            case _:
                log.warning("%s: not for a borrower: %s", self.party.identity.party, type(message).__name__)

    # The lenders -----------------------------------------------------------------------------------------------------

    async def _fetch(self, grant: Grant, on_revoke: OnRevoke) -> HeldLease | str:
        """The lease with its slabs open, or why there is none."""
        lease = self.leases[grant.lease] = HeldLease(grant, on_revoke, self._let_go)
        if grant.slab_bytes != self._slab_bytes:
            lease.release(grant.slabs)
            return f"{grant.lender} lends slabs of {grant.slab_bytes} bytes, this borrower takes {self._slab_bytes}"
        try:
            await self._open(grant, lease)
        except BaseException as error:
            if isinstance(error, HandoverFailed | DeviceError | OSError):
                fault = not isinstance(error, HandoverFailed) or error.lender_fault
                self.give_up(lease, str(error), fault)
                return str(error)
            self.give_up(lease, "the borrower closes", False)
            raise
        return lease

    async def _open(self, grant: Grant, lease: HeldLease) -> None:
        """Raises HandoverFailed, DeviceError, OSError; then what was opened is still in the lease."""
        ask = Ask(grant.lease, grant.epoch, grant.token)
        descriptors = await fetch(grant.endpoint, ask, self._uids, self._handover_s)
        problem: Exception | None = None
        for number, descriptor in descriptors.items():
            try:
                slab = self._memory.adopt(descriptor, grant.slab_bytes)
                if number in lease.slabs:
                    lease.slabs[number] = slab
                else:
                    slab.close()
                _require_writable(slab)
            except (DeviceError, OSError) as error:
                problem = HandoverFailed(f"slab {number} of {grant.lender}: {error}")
        if problem is not None:
            raise problem
        missing = [number for number, slab in lease.slabs.items() if slab is None]
        if missing:
            raise HandoverFailed(f"{grant.lender} did not hand over slabs {missing}")

    def give_up(self, lease: HeldLease, reason: str, lender_fault: bool) -> None:
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
            self.leases.pop(lease.number, None)

    def close(self) -> None:
        """What is still held is let go of; its users have unmapped it."""
        self._closed = True
        for lease in list(self.leases.values()):
            lease.release(lease.slabs.keys())


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

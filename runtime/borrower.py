"""Borrows memory of other processes' devices: `Borrower`, for asyncio and for plain threads alike.

Nothing here raises into an app's step because a scheduler or a lender is away: there is less lent memory then, and the
host's in its place.
"""

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass

from forebay.gpu.errors import DeviceError
from forebay.runtime.background import log
from forebay.runtime.facade import DEFAULT_SLAB_BYTES, Facade, default_scheduler
from forebay.runtime.host_budget import HostBudget
from forebay.runtime.host_stock import HostStock
from forebay.runtime.leases import HeldLease, OnRevoke
from forebay.runtime.leasing import Leasing
from forebay.runtime.lending_errors import LendingError
from forebay.runtime.loan import Loan
from forebay.runtime.loan_parts import Revocation, Tools
from forebay.runtime.party import Identity, Party, PartyState
from forebay.runtime.returning import Returning

RETURN_S = 30.0
"""Pause between two looks whether what lies on the host could be lent memory again."""

NO_BOUND = 1 << 62


@dataclass(frozen=True)
class LeaseView:
    """One lease as its borrower sees it. `state`: active, revoking (asked back, being moved) or over (forgotten by the
    ledger, being moved)."""

    lease: int
    epoch: int
    lender: str
    bytes: int
    state: str


@dataclass(frozen=True)
class BorrowerStatus:
    """`peer` and `host`: bytes in use of lenders, and of the host in their place. `ready`: bytes of the host that are
    kept for what may be asked back. `complaints`: how often a lender did not hand over what it had lent."""

    party: str
    state: PartyState
    reason: str
    peer: int
    host: int
    ready: int
    loans: int
    complaints: int
    leases: tuple[LeaseView, ...]


class Borrower(Facade[BorrowerStatus]):
    """`gpu` is the physical number of the device that is short of memory, `device` the kind of memory that is borrowed
    (`cpu:N`). `slab_bytes` must be that of the lenders.

    `scheduler` is its control endpoint ("": where a scheduler of this user listens unless told otherwise); it need not
    be there yet. `credential` is the tenant's bearer token. Only lenders that run as one of `uids` (own user) are
    trusted. `host_bytes` bounds the host memory used in place of lent memory (None: what the machine has). Of it,
    `ready_bytes` are kept ready at most, for what is lent and may be asked back (None: as much as is lent on `cuda:N`,
    where new memory of the host takes twelve times as long as the copy into it; nothing on `cpu:N`). `grant_s` bounds
    the wait for the scheduler, `handover_s` that for a lender.

    What lies on the host moves to lent memory again when there is some: every `return_s` seconds it asks (None: never),
    less often while lenders want it back soon.

    `on_revoke(Revocation)` is called, in a thread of its own, when memory is asked back: return True once what is of
    value has been copied elsewhere, and the slabs are let go of; otherwise, and without a callback, the library moves
    the bytes to another lender or to the host, under the same addresses.

    Methods block; `allocate_async` and so on are the same for asyncio. Raises RefusedAddress, OSError, DeviceError."""

    def __init__(
        self,
        scheduler: str,
        gpu: int,
        device: str = "cpu:0",
        *,
        slab_bytes: int = DEFAULT_SLAB_BYTES,
        credential: str = "",
        uids: Collection[int] | None = None,
        host_bytes: int | None = None,
        ready_bytes: int | None = None,
        return_s: float | None = RETURN_S,
        grant_s: float = 1.0,
        handover_s: float = 2.0,
        on_revoke: Callable[[Revocation], object] | None = None,
    ) -> None:
        if return_s is not None and return_s <= 0:
            raise LendingError(f"return_s is {return_s}; it must be more than 0, or None for never")
        super().__init__("borrower", gpu, device, slab_bytes)
        self._budget = HostBudget(host_bytes)
        self._callback = on_revoke
        self._loans: set[Loan] = set()
        self._said = False
        self._returning: Returning | None = None
        allowed = frozenset({os.getuid()} if uids is None else uids)
        self._leasing = leasing = Leasing(self._memory, slab_bytes, allowed, grant_s, handover_s)
        if ready_bytes is None:
            ready_bytes = NO_BOUND if self._memory.device.kind == "cuda" else 0

        async def open_all() -> None:
            self._stock = HostStock(self._background, self._memory, slab_bytes, self._budget, ready_bytes)
            self._tools = Tools(
                self._background,
                self._memory,
                leasing,
                self._stock,
                slab_bytes,
                lambda: self._callback,
                self._loans.discard,
                self._fell_back,
            )
            identity = Identity(self._name, gpu, credential, "", slab_bytes)
            leasing.party = self._party = Party(
                scheduler or default_scheduler(), identity, leasing.holdings, leasing.on_message, leasing.on_attached
            )
            if return_s is not None:
                self._returning = Returning(self._name, return_s, lambda: tuple(self._loans))
                self._background.spawn(self._returning.run())

        self._open(open_all())

    # For whoever borrows ---------------------------------------------------------------------------------------------

    def on_revoke(self, callback: Callable[[Revocation], object] | None) -> None:
        """Registers the callback for all loans (see the class), in place of an earlier one."""
        self._callback = callback

    def allocate(self, size: int, *, host: bool = True) -> Loan:
        """Memory of `size` bytes: lent as far as there is any, and for the rest the host's, unless `host` is False.
        Takes at most `grant_s` + `handover_s`. Look at the loan's `bytes` and `where`."""
        return self._background.run(self._allocate(size, host), self._unwanted)

    async def allocate_async(self, size: int, *, host: bool = True) -> Loan:
        return await self._background.wait(self._allocate(size, host), self._unwanted)

    def obtain(self, size: int, on_revoke: OnRevoke) -> tuple[list[HeldLease], str]:
        """For an app with an arena of its own: leases with their slabs open, and why they are fewer than asked for. Map
        the slabs, then say `mapped`, or `let_go`. `on_revoke` is called in the library's event loop."""
        return self._background.run(self._leasing.obtain(self._whole(size), on_revoke), self._leasing.unwanted)

    async def obtain_async(self, size: int, on_revoke: OnRevoke) -> tuple[list[HeldLease], str]:
        return await self._background.wait(self._leasing.obtain(self._whole(size), on_revoke), self._leasing.unwanted)

    def mapped(self, lease: HeldLease) -> None:
        """All slabs of a lease from `obtain` are mapped; returns at once. The handles may be closed (put None in the
        lease's `slabs`) before."""
        self._background.post(self._leasing.mapped, lease)

    def let_go(self, lease: HeldLease, numbers: Collection[int]) -> None:
        """These slabs of a lease from `obtain` are unmapped; returns at once."""
        self._background.post(lease.release, tuple(numbers))

    def close(self) -> None:
        """Gives back everything. Buffers of loans that are still in use see zeros from then on."""
        super().close()

    # In the loop -----------------------------------------------------------------------------------------------------

    def _whole(self, size: int) -> int:
        if size < 1:
            raise LendingError(f"{size} bytes cannot be borrowed; ask for at least one")
        return -(-size // self._slab_bytes) * self._slab_bytes

    async def _allocate(self, size: int, host: bool) -> Loan:
        loan = Loan(self._tools, size)
        leases, reason = await self._leasing.obtain(self._whole(size), loan.keeper.revoked)
        self._loans.add(loan)
        try:
            await loan.keeper.fill(leases, reason, host)
        except BaseException:
            self._unwanted(loan)
            raise
        if not loan.bytes:
            self._loans.discard(loan)
        short = loan.where != "peer" or loan.bytes < size
        if short and not self._said:
            log.warning("%s: %d bytes are not lent memory (%s): %s", self._name, size, loan.where, loan.reason)
        self._said = short
        return loan

    def _unwanted(self, loan: Loan) -> None:
        """Whoever asked for it is gone."""
        if not self._background.closed:
            self._background.spawn(loan.keeper.close())

    async def _status(self) -> BorrowerStatus:
        views = tuple(
            LeaseView(
                lease.number,
                lease.epoch,
                lease.lender,
                len(lease.slabs) * lease.slab_bytes,
                "over" if lease.over else "revoking" if lease.revoking else "active",
            )
            for lease in self._leasing.leases
        )
        return BorrowerStatus(
            self._name,
            self._party.state,
            self._party.reason,
            sum(view.bytes for view in views),
            self._budget.used,
            self._stock.ready,
            len(self._loans),
            self._leasing.complaints,
            views,
        )

    async def _close(self) -> None:
        failed = False
        for loan in list(self._loans):
            try:
                await loan.keeper.close()
            except (DeviceError, OSError) as error:
                failed = True
                log.error("%s: a loan's memory stays mapped until this process ends: %s", self._name, error)
        if not failed:
            self._leasing.close()
        await self._stock.close()
        # Who leaves without a word is taken for one that may still map what it had: its lenders make that anew.
        self._party.close("the borrower closes", says_so=not failed)

    def _fell_back(self) -> None:
        if self._returning is not None:
            self._returning.fell_back()

"""Leases that a borrower holds, below any arena: slabs by number, asked back one day, let go of by their user."""

import math
from collections.abc import Callable, Collection
from contextlib import ExitStack

from forebay.gpu.backend import MemorySlab
from forebay.runtime.background import log
from forebay.transport.messages import Grant, Holding

OnRevoke = Callable[["HeldLease", frozenset[int], float, str], None]
"""(lease, slabs, deadline in seconds, reason), in the library's event loop: must not block. Move what is in the slabs,
unmap them, then `release` them. A deadline of `math.inf`: the ledger has forgotten the lease; the memory is this
process's own by now, and stays it until it is released."""

Let = Callable[["HeldLease", frozenset[int]], None]


class HeldLease:
    """Slabs of one lender. `slabs` holds those that have not been let go of, each None once its user has mapped it and
    closed the handle. `over`: the ledger knows nothing of it any more."""

    def __init__(self, grant: Grant, on_revoke: OnRevoke, let_go: Let) -> None:
        self.number = grant.lease
        self.epoch = grant.epoch
        self.lender = grant.lender
        self.gpu = grant.gpu
        self.slab_bytes = grant.slab_bytes
        self.endpoint = grant.endpoint
        self.token = grant.token
        self.slabs: dict[int, MemorySlab | None] = dict.fromkeys(grant.slabs)
        self.over = False
        self.revoking: set[int] = set()
        """Slabs that were asked back and not let go of yet."""
        self.mapped = False
        self._on_revoke = on_revoke
        self._let_go = let_go
        self._early: tuple[float, str] | None = None

    def revoke(self, numbers: Collection[int], deadline_s: float, reason: str) -> None:
        """In the loop. Until the lease is mapped there is nothing to move; then its user hears of it."""
        asked = frozenset(numbers) & self.slabs.keys()
        self.revoking |= asked
        if not self.mapped:
            self._early = (deadline_s, reason)
        elif asked:
            try:
                self._on_revoke(self, asked, deadline_s, reason)
            except Exception:
                # Its user's fault; what else the scheduler has said is heeded all the same.
                log.exception("lease %d: on_revoke raised; %d slabs stay where they are", self.number, len(asked))

    def end(self, reason: str) -> None:
        """In the loop: the ledger has forgotten it."""
        self.over = True
        self.revoke(self.slabs.keys(), math.inf, reason)

    def is_mapped(self) -> None:
        """In the loop: its user has all slabs where they belong."""
        self.mapped = True
        if self._early is not None:
            deadline_s, reason = self._early
            self._early = None
            self.revoke(frozenset(self.revoking), deadline_s, reason)

    def release(self, numbers: Collection[int]) -> None:
        """In the loop: these slabs are unmapped. Releasing twice is fine."""
        gone = frozenset(numbers) & self.slabs.keys()
        if not gone:
            return
        self.revoking -= gone
        with ExitStack() as undo:  # a handle that cannot be closed keeps no lease
            undo.callback(self._let_go, self, gone)
            for number in gone:
                slab = self.slabs.pop(number)
                if slab is not None:
                    undo.callback(slab.close)

    def close_handle(self, number: int) -> None:
        """The slab is mapped: that keeps the memory, and descriptors are few."""
        slab = self.slabs[number]
        if slab is not None:
            slab.close()
            self.slabs[number] = None

    @property
    def holding(self) -> Holding:
        """For an `Attach`."""
        return Holding(
            self.number,
            self.epoch,
            tuple(sorted(self.slabs)),
            self.slab_bytes,
            self.lender,
            self.endpoint,
            self.token,
        )

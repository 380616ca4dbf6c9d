"""What a loan shows of itself, and what it shares with its borrower's other loans."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay.gpu.backend import MemoryBackend
from forebay.runtime.background import Background
from forebay.runtime.host_stock import HostStock
from forebay.runtime.leasing import Leasing

if TYPE_CHECKING:
    from forebay.runtime.loan import Loan


@dataclass(frozen=True)
class Piece:
    """A stretch of a loan, in bytes. `place` is the lender's name (with its `lease`), "host", or "gone" for what the
    app has let go of."""

    offset: int
    bytes: int
    place: str
    lease: int = 0


@dataclass(frozen=True)
class Revocation:
    """These stretches of a loan (offset, bytes) are asked back within `deadline_s` (`math.inf`: the ledger has
    forgotten the lease; take your time)."""

    loan: "Loan"
    ranges: tuple[tuple[int, int], ...]
    deadline_s: float
    reason: str


@dataclass(frozen=True)
class Tools:
    """What all loans of a borrower share. `on_revoke` gives the app's callback, or None; `released` is told of each
    loan that has ended, `fell_back` when memory that was asked back went to the host."""

    background: Background
    memory: MemoryBackend
    leasing: Leasing
    stock: HostStock
    slab_bytes: int
    on_revoke: Callable[[], Callable[[Revocation], object] | None]
    released: Callable[["Loan"], None]
    fell_back: Callable[[], None]

"""Moves what fell back to the host to lent memory again, when there is some: a little at a time, and never while the
app is at it. How often it asks is decided in sched/lending_returns.py.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from forebay.runtime.background import log
from forebay.sched.lending_returns import Returns

if TYPE_CHECKING:
    from forebay.runtime.loan import Loan

MOST_SLABS = 8
"""Asked for at once: with slabs of 256 MiB, 40 ms of a host link in all, 5 for one."""


class Returning:
    """In the borrower's loop. `first_s`: the pause between two questions, at first. `loans` gives those that live."""

    def __init__(self, name: str, first_s: float, loans: Callable[[], Iterable["Loan"]]) -> None:
        self._name = name
        self._loans = loans
        self._loop = asyncio.get_running_loop()
        self._pace = Returns(self._loop.time(), first_s)

    def fell_back(self) -> None:
        """Memory that was asked back is on the host now."""
        self._pace.asked_back(self._loop.time())

    async def run(self) -> None:
        """For as long as the borrower lives."""
        while True:
            # Never in a hurry, also where time has not passed: there may be nothing to do for hours.
            await asyncio.sleep(max(self._pace.wait_s(self._loop.time()), self._pace.pause_s / 16))
            if self._pace.wait_s(self._loop.time()) > 0:
                continue
            wanted, moved = 0, 0
            loan = max(self._loans(), key=lambda loan: loan.keeper.on_host, default=None)
            if loan is not None and (wanted := min(MOST_SLABS, loan.keeper.on_host)):
                moved = await loan.keeper.come_back(wanted)
            if moved:
                log.info("%s: %d slabs are lent memory again", self._name, moved)
            self._pace.asked(self._loop.time(), wanted, moved)

"""A lender or a borrower as a process of its own, driven by lines of JSON: what the kill tests kill. Run as
`python lending_party.py lender|borrower '{options}'`; answers each line with one line."""

import json
import logging
import random
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from forebay.runtime.client import Borrower, Lender, Loan, Reclaimed


def contents(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


class LenderParty:
    def __init__(self, **options: Any) -> None:
        self.came = 0
        self.taken: Reclaimed | None = None
        self.lender = Lender(on_yielded=self._came, **options)

    def _came(self, reclaimed: Reclaimed) -> None:
        self.came += reclaimed.bytes

    def ready(self) -> bool:
        return self.lender.ready()

    def name(self) -> str:
        return self.lender.name

    def offer(self, size: int) -> int:
        return self.lender.offer(size)

    def take_back(self, size: int, deadline_s: float) -> None:
        """Begins; `taken` tells."""

        def run() -> None:
            self.taken = self.lender.take_back(size, deadline_s)

        threading.Thread(target=run, daemon=True).start()

    def result(self) -> Any:
        if self.taken is None:
            return None
        return {
            "bytes": self.taken.bytes,
            "missing": self.taken.missing,
            "holders": self.taken.holders,
            "came": self.came,
        }

    def status(self) -> Any:
        status = self.lender.status()
        return {"state": status.state, "free": status.free, "lent": status.lent, "cleaning": status.cleaning}

    def close(self) -> None:
        self.lender.close()


class BorrowerParty:
    def __init__(self, ignore: bool = False, **options: Any) -> None:
        self.borrower = Borrower(**options)
        self.loan: Loan | None = None
        self.held = ExitStack()
        self.filled: tuple[int, int] = (0, 0)

    def ready(self) -> bool:
        return self.borrower.ready()

    def name(self) -> str:
        return self.borrower.name

    def allocate(self, size: int, seed: int) -> Any:
        self.loan = self.borrower.allocate(size)
        self.loan.write(0, contents(seed, self.loan.bytes))
        self.filled = (seed, self.loan.bytes)
        return {"bytes": self.loan.bytes, "where": self.loan.where, "reason": self.loan.reason}

    def allocating(self, size: int, seed: int) -> None:
        """Begins; `allocated` tells."""
        self.loan = None
        threading.Thread(target=self.allocate, args=(size, seed), daemon=True).start()

    def allocated(self) -> bool:
        return self.filled[1] > 0

    def intact(self) -> bool:
        assert self.loan is not None
        seed, size = self.filled
        return self.loan.bytes == size and self.loan.read(0, size) == contents(seed, size)

    def where(self) -> str:
        assert self.loan is not None
        return self.loan.where

    def hold(self) -> None:
        assert self.loan is not None
        self.held.enter_context(self.loan.hold())

    def let_go(self) -> None:
        self.held.close()

    def release(self) -> None:
        if self.loan is not None:
            self.loan.release()
        self.loan = None
        self.filled = (0, 0)

    def status(self) -> Any:
        status = self.borrower.status()
        return {
            "state": status.state,
            "peer": status.peer,
            "host": status.host,
            "complaints": status.complaints,
            "leases": [lease.lease for lease in status.leases],
        }

    def story(self) -> Any:
        """All that it knows of itself, for people."""
        return {
            **asdict(self.borrower.status()),
            "loan": None if self.loan is None else [str(piece) for piece in self.loan.pieces()],
            "holdings": [str(lease.holding) for lease in self.borrower._leasing.leases],
        }

    def close(self) -> None:
        self.borrower.close()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(levelname)s %(message)s")
    options = json.loads(sys.argv[2])
    party: LenderParty | BorrowerParty = (LenderParty if sys.argv[1] == "lender" else BorrowerParty)(**options)
    for line in sys.stdin:
        name, given = json.loads(line)
        method: Callable[..., Any] = getattr(party, name)
        try:
            answer = {"answer": method(**given)}
        except Exception as error:
            answer = {"error": repr(error)}
        print(json.dumps(answer), flush=True)  # noqa: T201
    party.close()


if __name__ == "__main__":
    main()

"""Borrows memory, writes to it, and says whenever it has moved and whether every byte is still there. docs/lending.md
shows it at work.

    python examples/lending/borrower.py --gpu 2 --mebibytes 128
"""

import argparse
import hashlib
import logging
import os
import signal
import threading

from forebay.runtime.client import Borrower, Loan

MIB = 1 << 20


def places(loan: Loan) -> str:
    """`64 MiB on lender-gpu0-4711-c0ffee, 64 MiB in host memory`"""
    sizes: dict[str, int] = {}
    for piece in loan.pieces():
        where = "in host memory" if piece.place == "host" else f"on {piece.place}"
        sizes[where] = sizes.get(where, 0) + piece.bytes
    return ", ".join(f"{size // MIB} MiB {where}" for where, size in sizes.items())


def digest(loan: Loan) -> str:
    return hashlib.sha256(loan.read(0, loan.bytes)).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description="Borrows memory and watches what becomes of it, until Ctrl-C.")
    parser.add_argument("--gpu", type=int, default=2, help="physical number of the GPU that is short of memory")
    parser.add_argument("--device", default="cpu:0", help="what the lent memory is made of: cpu:N or cuda:N")
    parser.add_argument("--mebibytes", type=int, default=128, help="how much to borrow")
    parser.add_argument("--slab", type=int, default=64, help="piece in which it is lent, in MiB, as at the lender")
    parser.add_argument("--scheduler", default="", help="its control endpoint, if it is not the usual one")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())

    with Borrower(options.scheduler, options.gpu, options.device, slab_bytes=options.slab * MIB) as borrower:
        print(f"{borrower.name} asks for {options.mebibytes} MiB", flush=True)
        with borrower.allocate(options.mebibytes * MIB) as loan:
            if not loan.bytes:
                raise SystemExit(f"nothing to be had: {loan.reason}")
            for offset in range(0, loan.bytes, MIB):
                loan.write(offset, os.urandom(MIB))
            before, known = digest(loan), ""
            while True:
                if (now := places(loan)) != known:
                    known = now
                    intact = "every byte is there" if digest(loan) == before else "BYTES WERE LOST"
                    print(f"{known}: {intact}", flush=True)
                if ended.wait(0.2):
                    break
        print("gave it all back", flush=True)


if __name__ == "__main__":
    main()

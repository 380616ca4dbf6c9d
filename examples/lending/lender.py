"""Lends memory of a GPU until Ctrl-C, then takes it back. docs/lending.md shows it at work.

python examples/lending/lender.py --gpu 0 --mebibytes 256
"""

import argparse
import logging
import signal
import threading

from forebay.runtime.client import Lender, Reclaimed

MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description="Lends memory of a GPU until Ctrl-C, then takes it back.")
    parser.add_argument("--gpu", type=int, default=0, help="the GPU's physical number")
    parser.add_argument("--device", default="cpu:0", help="what the memory is made of: cpu:N or cuda:N")
    parser.add_argument("--mebibytes", type=int, default=256, help="how much to offer")
    parser.add_argument("--slab", type=int, default=64, help="piece in which it is lent, in MiB")
    parser.add_argument("--scheduler", default="", help="its control endpoint, if it is not the usual one")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())

    def on_lent(lease: int, borrower: str, size: int) -> None:
        print(f"lease {lease}: {size // MIB} MiB lent to {borrower}", flush=True)

    def on_returned(lease: int, borrower: str, size: int) -> None:
        print(f"lease {lease}: {size // MIB} MiB came back from {borrower}", flush=True)

    def on_yielded(reclaimed: Reclaimed) -> None:
        print(f"{reclaimed.bytes // MIB} MiB were asked back by an operator, and are offered no longer", flush=True)

    with Lender(
        options.scheduler,
        options.gpu,
        options.device,
        slab_bytes=options.slab * MIB,
        on_lent=on_lent,
        on_returned=on_returned,
        on_yielded=on_yielded,
    ) as lender:
        offered = lender.offer(options.mebibytes * MIB)
        if not lender.ready():
            print(
                f"offering {offered // MIB} MiB as soon as there is a scheduler: {lender.status().reason}", flush=True
            )
        print(f"{lender.name} offers {offered // MIB} MiB of GPU {options.gpu}; Ctrl-C takes it back", flush=True)
        ended.wait()
        status = lender.status()
        taken = lender.take_back(max(1, status.free + status.lent + status.cleaning), deadline_s=10.0)
        print(f"took back {taken.bytes // MIB} MiB", flush=True)
        if taken.missing:
            print(f"{taken.missing // MIB} MiB are still held by {', '.join(taken.holders)}", flush=True)


if __name__ == "__main__":
    main()

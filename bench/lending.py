"""`python -m bench.lending`: how fast lent memory is. Holds only its `main()`."""

import sys


def main(arguments: list[str] | None = None) -> int:
    import argparse
    from pathlib import Path

    parser = argparse.ArgumentParser(
        prog="python -m bench.lending",
        description="Copies between a device, a neighbour's lent memory and the host: whole and scattered pieces, "
        "alone and beside products, each beside the raw copy of the same run; and a sequence out and in.",
    )
    parser.add_argument(
        "--devices", default="cpu:0,cpu:1", metavar="A[,B]", help="a borrower and its lender (cpu:0,cpu:1)"
    )
    parser.add_argument("--largest", type=int, default=1024, metavar="MIB", help="largest piece (1024), 2 or more")
    parser.add_argument("--seconds", type=float, default=0.5, metavar="S", help="for each figure beside products (0.5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args(arguments)
    devices = options.devices.split(",")
    if len(devices) > 2:
        parser.error(f"--devices names {len(devices)}; one (host copies alone) or two are compared")
    if options.largest < 2:
        parser.error(f"--largest is {options.largest} MiB; 2 or more")

    from forebay.bench.link_sweep import measure

    return measure(devices, options.largest << 20, options.seconds, options.json, arguments)


if __name__ == "__main__":
    sys.exit(main())

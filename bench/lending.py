"""`python -m bench.lending`: how fast lent memory is, and how fast it comes and goes. Holds only its `main()`."""

import sys


def main(arguments: list[str] | None = None) -> int:
    import argparse
    from pathlib import Path

    parts = ("sweep", "grants", "host", "reclaim", "tax")
    parser = argparse.ArgumentParser(
        prog="python -m bench.lending",
        description="sweep: copies between a device, a neighbour's lent memory and the host, whole and scattered, "
        "alone and beside products, and a sequence out and in; grants: how soon memory is granted and usable; "
        "host: how fast host memory for it is made, by several threads; reclaim: how soon a lender has it back with "
        "data in it; tax: what lending costs the lender. Each beside the raw copy, or the plainest way to do it, of "
        "the same run.",
    )
    parser.add_argument(
        "--devices", default="cpu:0,cpu:1", metavar="A[,B]", help="a borrower and its lender (cpu:0,cpu:1)"
    )
    parser.add_argument("--only", default=",".join(parts), metavar="PART[,PART]", help="some parts of the five above")
    parser.add_argument(
        "--largest",
        type=int,
        default=1024,
        metavar="MIB",
        help="largest piece (1024), 2 or more; as much is taken back on a CPU, ten times as much on a GPU",
    )
    parser.add_argument("--seconds", type=float, default=0.5, metavar="S", help="for each figure beside products (0.5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args(arguments)
    devices = options.devices.split(",")
    if len(devices) > 2:
        parser.error(f"--devices names {len(devices)}; one (it lends to itself, and copies to the host) or two")
    only = options.only.split(",")
    if unknown := [part for part in only if part not in parts]:
        parser.error(f"--only names {unknown[0]!r}; there are {', '.join(parts)}")
    if options.largest < 2:
        parser.error(f"--largest is {options.largest} MiB; 2 or more")

    from forebay.bench.lending_run import measure

    return measure(devices, only, options.largest << 20, options.seconds, options.json, arguments)


if __name__ == "__main__":
    sys.exit(main())

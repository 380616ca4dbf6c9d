"""`python -m bench.events`: how fast the event plane is. Holds only its `main()`."""

import sys


def main(arguments: list[str] | None = None) -> int:
    import argparse
    from pathlib import Path

    parser = argparse.ArgumentParser(
        prog="python -m bench.events",
        description="Measures tokens from a worker to the front door, events through the central core, and round "
        "trips, each beside a plain ZeroMQ program of the same run.",
    )
    parser.add_argument("--seconds", type=float, default=3.0, metavar="S", help="for each measurement (3)")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="round trips: the median of so many runs (5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args(arguments)

    from forebay.bench.event_plane import measure

    return measure(options.seconds, options.runs, options.json, arguments)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m bench.events`: how fast the event plane is. Holds only its `main()`."""

import sys


def main(arguments: list[str] | None = None) -> int:
    import argparse
    from pathlib import Path

    from forebay.bench import options
    from forebay.bench.command_line import check_outputs, reported

    parser = argparse.ArgumentParser(
        prog="python -m bench.events",
        description="Measures tokens from a worker to the front door, events through the central core, and round "
        "trips, each beside a plain ZeroMQ program of the same run.",
    )
    parser.add_argument(
        "--seconds", type=options.number(0.1, 1e4), default=3.0, metavar="S", help="for each measurement (3)"
    )
    parser.add_argument(
        "--runs",
        type=options.whole(1, 1000),
        default=5,
        metavar="N",
        help="round trips: the median of so many runs (5)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    given = parser.parse_args(arguments)

    from forebay.bench.event_plane import measure

    def work() -> int:
        check_outputs(given.json)
        return measure(given.seconds, given.runs, given.json, arguments)

    return reported(work)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m bench.scheduler`: the scheduler alone under many workers. Holds only its `main()`."""

import sys


def main(arguments: list[str] | None = None) -> int:
    import argparse
    from pathlib import Path

    from forebay.bench import options
    from forebay.bench.command_line import check_outputs, reported

    parser = argparse.ArgumentParser(
        prog="python -m bench.scheduler",
        description="The central core behind its real socket, with fake workers and a fake front door in another "
        "process that send events at a given rate: how long events wait and take, and whether memory stays flat.",
    )
    parser.add_argument("--workers", type=options.whole(1, 4096), default=256, metavar="N", help="fake workers (256)")
    parser.add_argument(
        "--rate", type=options.number(1, 1e7), default=50_000, metavar="R", help="events per second (50000)"
    )
    parser.add_argument("--seconds", type=options.number(3, 1e6), default=600, metavar="S", help="how long (600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    given = parser.parse_args(arguments)

    from forebay.bench.scheduler_load import measure

    def work() -> int:
        check_outputs(given.json)
        return measure(given.workers, given.rate, given.seconds, given.json, arguments)

    return reported(work)


if __name__ == "__main__":
    sys.exit(main())

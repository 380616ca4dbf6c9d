"""`python -m bench.demo CONFIG`: starts the server, replays a workload, stops it. Only the command line."""

import argparse
import asyncio
import sys
from pathlib import Path

from forebay.bench import options
from forebay.bench.command_line import exit_code, run_until_signal, table_console
from forebay.bench.demonstration import Result, demonstrate
from forebay.bench.errors import BenchError, Interrupted
from forebay.bench.progress import ProgressDisplay
from forebay.bench.report import print_report, write_report


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.demo",
        description="Starts the server of CONFIG as real processes, replays a small chat workload over HTTP, prints "
        "the latencies, writes report.json and stops everything. Exits with 1 if anything failed.",
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="such as examples/cpu.yaml")
    parser.add_argument("--output", type=Path, default=Path("demo"), metavar="FOLDER", help="for files (%(default)s)")
    parser.add_argument(
        "--requests", type=options.positive_int, default=80, metavar="N", help="fewer on slow machines (%(default)s)"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    command = [sys.executable, "-m", "forebay.bench.demo", *(sys.argv[1:] if argv is None else argv)]

    async def work(stop: asyncio.Event) -> Result:
        with ProgressDisplay(sys.stderr) as progress:
            return await demonstrate(arguments.config, arguments.output, arguments.requests, command, progress, stop)

    try:
        result, signal_number = run_until_signal(work)
        write_report(arguments.output / "report.json", result.report)
    except Interrupted as error:
        print(f"error: {error}", file=sys.stderr)
        return 130
    except (BenchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print_report(result.report, table_console())
    print(f"report: {arguments.output / 'report.json'}")
    problems = [*result.problems]
    if result.report.ended != "complete":
        problems.append("the replay ended early; the report is partial")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return exit_code(result.report.total.failed + len(problems), signal_number)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m runtime.worker --gpu cpu:0 --scheduler ENDPOINT`: one device's worker. Holds only `main()`."""

import sys


def main(arguments: list[str] | None = None) -> int:
    import argparse
    from pathlib import Path

    parser = argparse.ArgumentParser(
        prog="runtime.worker",
        description="Joins a scheduler with one device, and is told what to load. Waits for a scheduler that is away.",
    )
    parser.add_argument("--gpu", required=True, metavar="DEVICE", help="cpu:N or cuda:N")
    parser.add_argument("--scheduler", required=True, metavar="ENDPOINT", help="the scheduler's log line names it")
    parser.add_argument("--journal", type=Path, metavar="DIR", help="record what enters the lane core")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write its steps and copies for Perfetto; a folder: a file in it"
    )
    parser.add_argument("--parent", type=int, metavar="DESCRIPTOR", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)

    if options.journal is not None:
        from forebay.runtime.recording import prepare_folder

        try:
            prepare_folder(options.journal)
        except OSError as error:
            parser.error(f"argument --journal: {error}")

    if options.trace is not None and not (options.trace.is_dir() or options.trace.parent.is_dir()):
        parser.error(f"argument --trace: there is no folder {str(options.trace.parent)!r}; make it")

    from forebay.runtime.worker_process import work

    return work(options.gpu, options.scheduler, options.journal, options.parent, options.trace)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m runtime.scheduler [CONFIG]`: the server. Holds only `main()`."""

import sys


def main(arguments: list[str] | None = None) -> int:
    import argparse
    from pathlib import Path

    from forebay.runtime.options import port

    parser = argparse.ArgumentParser(
        prog="runtime.scheduler",
        description="Starts the scheduler, its front door, and a worker for each configured device. "
        "Without a configuration it is the coordinator alone: no devices, no models.",
    )
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help="YAML file, see docs/configuration.md")
    parser.add_argument("--port", type=port, help="listen here instead of http.port (0: any free port)")
    parser.add_argument("--journal", type=Path, metavar="DIR", help="record what enters each core, a file a core")
    parser.add_argument(
        "--ready-file", type=Path, metavar="FILE", help="write {url, endpoint} as JSON once requests can be sent"
    )
    options = parser.parse_args(arguments)

    from forebay.runtime.scheduler_process import serve

    return serve(options.config, options.port, options.journal, options.ready_file)


if __name__ == "__main__":
    sys.exit(main())

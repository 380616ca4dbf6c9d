"""`python -m bench.delivery`: from the end of a worker's step to the client's socket. Holds only its `main()`."""

import sys


def main(arguments: list[str] | None = None) -> int:
    import argparse
    from pathlib import Path

    from forebay.bench import options
    from forebay.bench.command_line import check_outputs, reported

    parser = argparse.ArgumentParser(
        prog="python -m bench.delivery",
        description="A real scheduler, front door and HTTP client; the worker's steps come from a clock. Beside it the "
        "same tokens at the same times from a bare FastAPI server.",
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="model folder (its tokenizer is used)")
    parser.add_argument("--streams", type=options.whole(1, 1024), default=32, metavar="N", help="streams at once (32)")
    parser.add_argument(
        "--rate", type=options.number(0.1, 1e4), default=20.0, metavar="R", help="tokens per second of each (20)"
    )
    parser.add_argument(
        "--tokens", type=options.whole(11, 100_000), default=200, metavar="N", help="tokens of each stream (200)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    given = parser.parse_args(arguments)

    from forebay.bench.token_delivery import measure

    def work() -> int:
        check_outputs(given.json)
        return measure(given.model, given.streams, given.rate, given.tokens, given.json, arguments)

    return reported(work)


if __name__ == "__main__":
    sys.exit(main())

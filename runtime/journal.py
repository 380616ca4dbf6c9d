"""`python -m runtime.journal FILE`: replays a recorded core. Holds only `main()`."""

import sys


def main(arguments: list[str] | None = None) -> int:
    import argparse
    from pathlib import Path

    from forebay.runtime.recording import JournalError, replay

    parser = argparse.ArgumentParser(prog="runtime.journal", description="Replays journals and compares every command.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="written by --journal DIR")
    failed = False
    for path in parser.parse_args(arguments).files:
        try:
            name, events, note = replay(path)
        except (OSError, JournalError) as error:
            failed = True
            print(error if isinstance(error, JournalError) else f"{path}: {error}", file=sys.stderr)
        else:
            print(f"{path}: {name}, {events} events, the same commands{note and f' ({note})'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

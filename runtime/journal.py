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
            name, events, cut_off = replay(path)
        except (OSError, JournalError) as error:
            failed = True
            print(f"{path}: {error}", file=sys.stderr)
        else:
            note = " (the last record was cut off)" if cut_off else ""
            print(f"{path}: {name}, {events} events, the same commands{note}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""A process for tests of supervision: works for as long as its parent lives if FILE is there, and else exits as one
that cannot work. Run as `python -m tests.runtime.supervised FILE --parent DESCRIPTOR`."""

import os
import sys
from pathlib import Path

EXIT_UNUSABLE = 78


def main() -> int:
    file, _, parent = sys.argv[1:]
    if not Path(file).exists():
        return EXIT_UNUSABLE
    with open(file, "a") as log:
        log.write(f"{os.getpid()}\n")
    os.read(int(parent), 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())

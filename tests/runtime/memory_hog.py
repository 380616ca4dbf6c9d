"""A process that takes so many bytes of memory, says so, and keeps them until its standard input ends. Run as
`python -m tests.runtime.memory_hog BYTES`."""

import mmap
import sys


def main() -> int:
    size = int(sys.argv[1])
    with mmap.mmap(-1, size) as memory:
        for page in range(0, size, mmap.PAGESIZE):
            memory[page] = 1
        sys.stdout.write("taken\n")
        sys.stdout.flush()
        sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())

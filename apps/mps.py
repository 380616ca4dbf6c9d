"""`forebay mps start DIR`, `forebay mps stop DIR`. Holds only `main()`."""

import sys


def main(arguments: list[str] | None = None) -> int:
    import argparse
    from pathlib import Path

    from forebay.runtime import mps

    parser = argparse.ArgumentParser(
        prog="forebay mps",
        description="Starts or ends an MPS daemon of your own, through which several processes share a GPU. A worker "
        "joins it by `devices[].mps` in the configuration, any other program by the variables that `start` prints.",
    )
    parser.add_argument("what", choices=["start", "stop"])
    parser.add_argument("folder", type=Path, metavar="DIR", help="where the daemon has its pipes and its logs")
    options = parser.parse_args(arguments)
    try:
        if options.what == "start":
            pid = mps.start(options.folder)
            print(f"an MPS daemon runs in {options.folder} (process {pid}); its clients need:")
            for name, value in mps.environment(options.folder.absolute()).items():
                print(f"export {name}={value}")
        else:
            print(f"the MPS daemon in {options.folder} has ended (process {mps.stop(options.folder)})")
    except mps.MpsError as error:
        print(f"forebay mps: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m bench.shapes NAME FOLDER`: a model folder of a known shape, for dummy weights. Holds only its `main()`."""

import sys


def main(arguments: list[str] | None = None) -> int:
    import argparse
    from pathlib import Path

    from forebay.bench.command_line import reported
    from forebay.bench.model_shapes import SHAPES, write_shape

    parser = argparse.ArgumentParser(
        prog="python -m bench.shapes",
        description="Writes config.json and generation_config.json of a model of a known shape, without weights: "
        "benchmarks make them up (--load-format dummy).",
    )
    parser.add_argument("name", choices=sorted(SHAPES), metavar="NAME", help=", ".join(sorted(SHAPES)))
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="is made if need be")
    given = parser.parse_args(arguments)

    def work() -> int:
        write_shape(given.name, given.folder)
        print(f"{given.folder}: {given.name}, no weights")
        return 0

    return reported(work)


if __name__ == "__main__":
    sys.exit(main())

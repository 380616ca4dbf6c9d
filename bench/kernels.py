"""`python -m bench.kernels`: our CUDA kernels, each beside its bound. Holds only its `main()`."""

import sys


def main(arguments: list[str] | None = None) -> int:
    import argparse
    from pathlib import Path

    from forebay.bench import options
    from forebay.bench.command_line import check_outputs, reported

    parser = argparse.ArgumentParser(
        prog="python -m bench.kernels",
        description="Times our kernels at the shapes of Llama-3.1-8B on a CUDA device, each beside the time that "
        "moving its bytes takes: linear layers of one row by every choice of tiles, 32 layers of them in one graph "
        "with and without programmatic dependent launch, rope with the append to the cache, and sampling.",
    )
    parser.add_argument("--device", default="cuda:0", metavar="cuda:N", help="(cuda:0)")
    parser.add_argument("--layers", type=options.whole(1, 80), default=32, metavar="N", help="of the chain (32)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    given = parser.parse_args(arguments)

    from forebay.bench.kernel_run import measure

    def work() -> int:
        check_outputs(given.json)
        return measure(given.device, given.layers, given.json)

    return reported(work)


if __name__ == "__main__":
    sys.exit(main())

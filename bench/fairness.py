"""`python -m bench.fairness MODEL`: who waits how long when memory is short. Holds only its `main()`."""

import sys


def main(arguments: list[str] | None = None) -> int:
    import argparse
    from pathlib import Path

    from forebay.bench.errors import BenchError
    from forebay.bench.fairness_merge import merge
    from forebay.bench.fairness_run import ARMS, Comparison, compare

    parser = argparse.ArgumentParser(
        prog="python -m bench.fairness",
        description="One model on one CPU device with a third of the memory that its load needs, requests at 1.2 times "
        "what it can serve: first come first served, fair slices with recomputation, with host memory and with a "
        "peer's memory to spill to, and fair shares of two tenants, one of which sends ten times as much.",
    )
    parser.add_argument("model", type=Path, metavar="MODEL", nargs="?", help="model folder")
    parser.add_argument("--requests", type=int, default=200, metavar="N", help="requests of each run (200)")
    parser.add_argument("--load", type=float, default=1.2, metavar="X", help="arrivals over capacity (1.2)")
    parser.add_argument("--memory", default="72MiB", metavar="SIZE", help="KV pool (72MiB)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="workloads (3)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first workload (0)")
    parser.add_argument("--arms", default=",".join(ARMS), metavar="LIST", help=f"some of {','.join(ARMS)}")
    parser.add_argument("--output", type=Path, default=Path("fairness"), metavar="DIR", help="logs and the plot")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument(
        "--merge",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="run nothing: of files that runs of one workload each wrote, the mean of every figure and its range",
    )
    options = parser.parse_args(arguments)
    if (options.model is None) == (options.merge is None):
        parser.error("give a MODEL to run, or --merge and the files of runs")
    if options.merge:
        try:
            return merge(options.merge, options.json, arguments)
        except BenchError as error:
            parser.error(str(error))
    if options.first < 0 or options.seeds < 1:
        parser.error(f"--first {options.first} --seeds {options.seeds}: workloads are counted from 0, one or more")
    arms = tuple(options.arms.split(","))
    if unknown := [arm for arm in arms if arm not in ARMS]:
        parser.error(f"--arms: {', '.join(unknown)} is none of {', '.join(ARMS)}")
    comparison = Comparison(
        options.model, options.requests, options.load, options.memory, options.seeds, arms, options.first
    )
    return compare(comparison, options.output, options.json, arguments)


if __name__ == "__main__":
    sys.exit(main())

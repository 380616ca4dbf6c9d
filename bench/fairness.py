"""`python -m bench.fairness MODEL`: who waits how long when memory is short. Holds only its `main()`."""

import sys


def main(arguments: list[str] | None = None) -> int:
    import argparse
    from pathlib import Path

    from forebay.bench.fairness_run import ARMS, Comparison, compare

    parser = argparse.ArgumentParser(
        prog="python -m bench.fairness",
        description="One model on one CPU device with a third of the memory that its load needs, requests at 1.2 times "
        "what it can serve: first come first served, fair slices with recomputation, with host memory and with a "
        "peer's memory to spill to, and fair shares of two tenants, one of which sends ten times as much.",
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="model folder")
    parser.add_argument("--requests", type=int, default=200, metavar="N", help="requests of each run (200)")
    parser.add_argument("--load", type=float, default=1.2, metavar="X", help="arrivals over capacity (1.2)")
    parser.add_argument("--memory", default="72MiB", metavar="SIZE", help="KV pool (72MiB)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="workloads (3)")
    parser.add_argument("--arms", default=",".join(ARMS), metavar="LIST", help=f"some of {','.join(ARMS)}")
    parser.add_argument("--output", type=Path, default=Path("fairness"), metavar="DIR", help="logs and the plot")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args(arguments)
    arms = tuple(options.arms.split(","))
    if unknown := [arm for arm in arms if arm not in ARMS]:
        parser.error(f"--arms: {', '.join(unknown)} is none of {', '.join(ARMS)}")
    comparison = Comparison(options.model, options.requests, options.load, options.memory, options.seeds, arms)
    return compare(comparison, options.output, options.json, arguments)


if __name__ == "__main__":
    sys.exit(main())

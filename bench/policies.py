"""`python -m bench.policies MODEL`: all scheduling policies on the same workloads. Holds only its `main()`."""

import sys


def main(arguments: list[str] | None = None) -> int:
    import argparse
    from pathlib import Path

    parser = argparse.ArgumentParser(
        prog="python -m bench.policies",
        description="Three models on one CPU device, a skewed workload (12 : 5 : 3) and an even one, several seeds, "
        "every policy on the same requests: SLO attainment for each model.",
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="model folder, served under three names")
    parser.add_argument(
        "--load", type=float, default=0.8, metavar="X", help="rate as a share of what the device can do at once (0.8)"
    )
    parser.add_argument("--rate", type=float, metavar="R", help="requests per second in all, instead of --load")
    parser.add_argument("--seconds", type=float, default=24.0, metavar="S", help="arrivals of each run (24)")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="workloads of each kind (2)")
    parser.add_argument("--scale", type=float, default=5.0, metavar="X", help="SLO scale that is compared (5)")
    parser.add_argument("--output", type=Path, default=Path("policies"), metavar="DIR", help="reports and the plot")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args(arguments)

    from forebay.bench.policy_comparison import Comparison, compare

    comparison = Comparison(options.model, options.load, options.rate, options.seconds, options.seeds, options.scale)
    return compare(comparison, options.output, options.json, arguments)


if __name__ == "__main__":
    sys.exit(main())

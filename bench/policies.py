"""`python -m bench.policies MODEL`: all scheduling policies on the same workloads. Holds only its `main()`."""

import sys


def main(arguments: list[str] | None = None) -> int:
    import argparse
    from pathlib import Path

    from forebay.bench import options
    from forebay.bench.command_line import check_outputs, reported

    parser = argparse.ArgumentParser(
        prog="python -m bench.policies",
        description="Three models on one CPU device, a skewed workload (12 : 5 : 3) and an even one, several seeds, "
        "every policy on the same requests: SLO attainment for each model.",
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="model folder, served under three names")
    parser.add_argument(
        "--load",
        type=options.number(0.01, 100),
        default=0.65,
        metavar="X",
        help="rate as a share of what the device can do at once (0.65)",
    )
    parser.add_argument("--rate", type=options.rate, metavar="R", help="requests per second in all, instead of --load")
    parser.add_argument(
        "--seconds", type=options.number(1, 1e5), default=18.0, metavar="S", help="arrivals of each run (18)"
    )
    parser.add_argument(
        "--seeds", type=options.whole(1, 1000), default=3, metavar="N", help="workloads of each kind (3)"
    )
    parser.add_argument(
        "--layers",
        type=options.whole(1, 1000),
        default=6,
        metavar="N",
        help="serve the first N layers of MODEL only: steps are shorter, and so more requests fit in (6)",
    )
    parser.add_argument(
        "--scale", type=options.positive_float, default=5.0, metavar="X", help="SLO scale that is compared (5)"
    )
    parser.add_argument("--output", type=Path, default=Path("policies"), metavar="DIR", help="reports and the plot")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    given = parser.parse_args(arguments)

    from forebay.bench.policy_comparison import Comparison, compare

    def work() -> int:
        check_outputs(given.output / "policies.png", given.json)
        comparison = Comparison(
            given.model, given.load, given.rate, given.seconds, given.seeds, given.scale, given.layers
        )
        return compare(comparison, given.output, given.json, arguments)

    return reported(work)


if __name__ == "__main__":
    sys.exit(main())

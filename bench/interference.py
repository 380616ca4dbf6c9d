"""`python -m bench.interference MODEL`: running answers while long prompts arrive. Holds only its `main()`."""

import sys


def main(arguments: list[str] | None = None) -> int:
    import argparse
    from pathlib import Path

    from forebay.bench import options
    from forebay.bench.command_line import check_outputs, reported
    from forebay.sched.partition import PARTITIONS

    parser = argparse.ArgumentParser(
        prog="python -m bench.interference",
        description="Time between the tokens of running answers while long prompts arrive, beside what it is without "
        "them; and the speed of those prefills, beside what it is without decodes: for each way to share the SMs, in "
        "this process, without a server.",
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="model folder")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", default="cpu:0", metavar="NAME", help="cpu:N or cuda:N (cpu:0)")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"), help="dummy: made-up weights")
    parser.add_argument(
        "--partitions", metavar="MODE,...",
        help="of none, streams, green, auto and shares of the SMs for prefills in per cent, in this order (the four; "
        "none alone on a CPU)",
    )  # fmt: skip
    parser.add_argument(
        "--models", type=options.whole(1, 2), default=2, metavar="N",
        help="2: the prompts are a second model's, of the same folder; 1: they are the same model's (2)",
    )  # fmt: skip
    parser.add_argument("--decodes", type=options.whole(1, 512), default=32, metavar="N", help="answers that run (32)")
    parser.add_argument(
        "--context", type=options.whole(1, 1_000_000), default=512, metavar="N", help="tokens of their prompts (512)"
    )
    parser.add_argument(
        "--tokens", type=options.whole(8, 1_000_000), default=2048, metavar="N",
        help="of an answer at most: prompts that are not through by then are cut off (2048)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=options.whole(2, 100_000), default=200, metavar="N",
        help="tokens of each answer that are timed undisturbed, before the prompts and again after them (200)",
    )  # fmt: skip
    parser.add_argument(
        "--prompt", type=options.whole(2, 1_000_000), default=8192, metavar="N", help="tokens of a long prompt (8192)"
    )
    parser.add_argument(
        "--prompts", type=options.whole(1, 10_000), default=8, metavar="N", help="long prompts that are timed (8)"
    )
    parser.add_argument(
        "--step-tokens", type=options.whole(1, 1 << 20), default=2048, metavar="N", help="of a step (2048)"
    )
    parser.add_argument(
        "--target", type=options.number(1, 100), default=1.5, metavar="X",
        help="TPOT that auto works for, as a multiple of the undisturbed one (1.5)",
    )  # fmt: skip
    parser.add_argument(
        "--learn", action="store_true", help="auto gets no costs that were measured, and learns them from steps alone"
    )
    parser.add_argument(
        "--threads", type=options.whole(0, 1024), default=0, metavar="N", help="of a CPU; 0: the library's own choice"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the steps of the last mode, for Perfetto")
    given = parser.parse_args(arguments)

    from forebay.bench.interference_run import Plan, measure

    def work() -> int:
        check_outputs(given.json, given.trace)
        on_cpu = given.device.startswith("cpu:")
        modes = given.partitions or ("none" if on_cpu else "none,streams,green,auto")
        plan = Plan(
            given.model, given.dtype, given.device, given.load_format, tuple(modes.split(",")), given.models,
            given.decodes, given.context, given.tokens, given.steps, given.prompt, given.prompts, given.step_tokens,
            given.target, given.learn, given.threads,
        )  # fmt: skip
        plan.check(list(PARTITIONS))
        return measure(plan, given.json, given.trace, arguments)

    return reported(work)


if __name__ == "__main__":
    sys.exit(main())

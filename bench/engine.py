"""`python -m bench.engine MODEL`: the engine by itself, beside others in one process. Holds only its `main()`."""

import sys


def main(arguments: list[str] | None = None) -> int:
    import argparse
    from pathlib import Path

    from forebay.bench import options
    from forebay.bench.command_line import check_outputs, reported
    from forebay.bench.errors import BenchError
    from forebay.bench.limits import MOST_TOKENS

    parser = argparse.ArgumentParser(
        prog="python -m bench.engine",
        description="A batch of requests through the lane core and the runner, in this process, and on a CPU through "
        "transformers' generate, and vLLM where --vllm names one: prefill and decode, tokens per second. On a GPU also "
        "what a decode step takes by batch, and the host's part of it.",
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="model folder")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", default="cpu:0", metavar="NAME", help="cpu:N or cuda:N (cpu:0)")
    parser.add_argument(
        "--load-format", default="auto", choices=("auto", "dummy"), help="dummy: made-up weights (cuda only)"
    )
    parser.add_argument(
        "--partition", default="none", choices=("none", "streams", "green", "auto"), help="lanes of a GPU (none)"
    )
    parser.add_argument(
        "--batches", type=options.whole_list(1, 4096), default=[1, 8, 64], metavar="N,...",
        help="further batches whose decode steps are timed on a GPU (1,8,64)",
    )  # fmt: skip
    parser.add_argument(
        "--step-tokens", type=options.whole(1, 1 << 20), default=8192, metavar="N", help="of a step on a GPU (8192)"
    )
    parser.add_argument(
        "--requests", type=options.whole(1, 4096), default=32, metavar="N", help="sequences in the batch (32)"
    )
    parser.add_argument(
        "--contexts",
        type=options.whole_list(1, 1_000_000),
        default=[256, 2048],
        metavar="N,...",
        help="tokens of each prompt (256,2048)",
    )
    parser.add_argument(
        "--output", type=options.whole(2, 100_000), default=32, metavar="N", help="tokens to make for each (32)"
    )
    parser.add_argument(
        "--threads", type=options.whole(0, 1024), default=0, metavar="N", help="0: the library's own choice"
    )
    parser.add_argument(
        "--vllm",
        type=Path,
        metavar="PYTHON",
        help="interpreter of an environment with vLLM (of its build for the device): measure it too",
    )
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="write kernels by device time, of a prefill and of decodes on a GPU",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    given = parser.parse_args(arguments)

    from forebay.bench.engine_gpu import Plan, measure_gpu
    from forebay.bench.engine_run import Batch, measure

    def work() -> int:
        check_outputs(given.json, given.profile)
        if not given.device.startswith("cuda:") and given.load_format != "auto":
            raise BenchError("--load-format dummy is for --device cuda:N: generate and ours must have the same weights")
        most = max(given.contexts) * given.requests
        if most > MOST_TOKENS:
            raise BenchError(
                f"{most:,} tokens of prompts at once; {MOST_TOKENS:,} are allowed: lower --contexts or --requests"
            )
        batch = Batch(given.model, given.dtype, given.requests, given.output, given.threads)
        if given.device.startswith("cuda:"):
            plan = Plan(
                batch, given.device, given.load_format, given.partition, tuple(given.batches), given.step_tokens,
                given.profile,
            )  # fmt: skip
            return measure_gpu(plan, given.contexts, given.vllm, given.json, arguments)
        return measure(batch, given.contexts, given.vllm, given.json, arguments)

    return reported(work)


if __name__ == "__main__":
    sys.exit(main())

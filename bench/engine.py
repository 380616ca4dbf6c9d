"""`python -m bench.engine MODEL`: the CPU engine beside transformers' `generate`. Holds only its `main()`."""

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
        description="A batch of requests through the lane core and the runner, in this process, and through "
        "transformers' generate, and vLLM where --vllm names one: prefill and decode, tokens per second.",
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="model folder")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
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
        help="interpreter of an environment with vLLM's CPU build: measure it too",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    given = parser.parse_args(arguments)

    from forebay.bench.engine_run import Batch, measure

    def work() -> int:
        check_outputs(given.json)
        most = max(given.contexts) * given.requests
        if most > MOST_TOKENS:
            raise BenchError(
                f"{most:,} tokens of prompts at once; {MOST_TOKENS:,} are allowed: lower --contexts or --requests"
            )
        batch = Batch(given.model, given.dtype, given.requests, given.output, given.threads)
        return measure(batch, given.contexts, given.vllm, given.json, arguments)

    return reported(work)


if __name__ == "__main__":
    sys.exit(main())

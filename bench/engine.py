"""`python -m bench.engine MODEL`: the CPU engine beside transformers' `generate`. Holds only its `main()`."""

import sys


def main(arguments: list[str] | None = None) -> int:
    import argparse
    from pathlib import Path

    parser = argparse.ArgumentParser(
        prog="python -m bench.engine",
        description="A batch of requests through the lane core and the runner, in this process, and through "
        "transformers' generate, and vLLM where --vllm names one: prefill and decode, tokens per second.",
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="model folder")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--requests", type=int, default=32, metavar="N", help="sequences in the batch (32)")
    parser.add_argument("--contexts", default="256,2048", metavar="N,...", help="tokens of each prompt (256,2048)")
    parser.add_argument("--output", type=int, default=32, metavar="N", help="tokens to make for each (32)")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="0: the library's own choice")
    parser.add_argument(
        "--vllm",
        type=Path,
        metavar="PYTHON",
        help="interpreter of an environment with vLLM's CPU build: measure it too",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args(arguments)

    from forebay.bench.engine_run import Batch, measure

    contexts = [int(part) for part in options.contexts.split(",")]
    batch = Batch(options.model, options.dtype, options.requests, options.output, options.threads)
    return measure(batch, contexts, options.vllm, options.json, arguments)


if __name__ == "__main__":
    sys.exit(main())

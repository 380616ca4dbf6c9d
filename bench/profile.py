"""`python -m bench.profile MODEL…`: what prefill and decode take, beside what they must. Holds only its `main()`."""

import sys


def main(arguments: list[str] | None = None) -> int:
    import argparse
    from pathlib import Path

    from forebay.bench import options
    from forebay.bench.command_line import check_outputs, reported, table_console

    def named(text: str) -> tuple[str, Path]:
        name, equals, folder = text.partition("=")
        return (name, Path(folder)) if equals else (Path(text).resolve().name, Path(text))

    parser = argparse.ArgumentParser(
        prog="python -m bench.profile",
        description="Measures prefills and decode steps of each model over batch, length and share of the SMs, on the "
        "device itself and without a server, and writes a cost file in MuxServe's form, which bench and the "
        "scheduler's `auto` read. The table shows each time beside its limit: what bytes and operations need at "
        "the rates of a large copy and a large product, measured in the same run.",
    )
    parser.add_argument("models", type=named, nargs="+", metavar="[NAME=]MODEL", help="model folders")
    parser.add_argument("--device", default="cpu:0", metavar="DEVICE", help="cpu:N or cuda:N (%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument(
        "--load-format", default="auto", choices=("auto", "dummy"), help="dummy: random weights of config.json's shapes"
    )
    parser.add_argument(
        "--batches",
        type=options.whole_list(1, 2048),
        metavar="N,...",
        help="sequences (powers of two to 8, on a GPU 256)",
    )
    parser.add_argument(
        "--lengths",
        type=options.whole_list(1, 1_000_000),
        metavar="N,...",
        help="tokens of a prompt, and of context (32 to 256, on a GPU 128 to 2048)",
    )
    parser.add_argument(
        "--shares",
        type=options.whole_list(1, 100),
        metavar="%,...",
        help="per cent of the SMs, on a GPU only (100 and the scheduler's splits)",
    )
    parser.add_argument(
        "--seconds", type=options.positive_float, default=150.0, metavar="S", help="at most, for a model (%(default)g)"
    )
    parser.add_argument("--memory", metavar="SIZE", help="of the KV pool (1GiB, on a GPU 48GiB)")
    parser.add_argument(
        "--step-tokens", type=options.whole(1, 1 << 20), metavar="N", help="tokens of one step (256, on a GPU 2048)"
    )
    parser.add_argument(
        "--threads", type=options.whole(0, 1024), default=0, metavar="N", help="on a CPU; 0: its choice"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("cost.json"), metavar="FILE", help="cost file (%(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, their limits as baselines")
    given = parser.parse_args(arguments)

    from forebay.bench.errors import BenchError
    from forebay.gpu.device_name import parse_device
    from forebay.runtime.config_schema import parse_bytes
    from forebay.sched.partition import SPLITS

    def work() -> int:
        check_outputs(given.output, given.json)
        gpu = parse_device(given.device).kind == "cuda"
        shares = given.shares or [100, *(SPLITS if gpu else ())]
        if not gpu and shares != [100]:
            raise BenchError(f"--shares {','.join(map(str, shares))}: {given.device} has no SMs; leave it out")
        try:
            memory = parse_bytes(given.memory or ("48GiB" if gpu else "1GiB"))
        except ValueError as error:
            raise BenchError(f"--memory: {error}") from error
        # Loads torch, which takes longer than finding all that is wrong before.
        from forebay.bench.profile_run import Profile, check_names, print_profile, profile, save_costs, save_figures

        check_names(given.models)
        slab = (256 if gpu else 32) << 20
        plan = Profile(
            models=given.models,
            device=given.device,
            dtype=given.dtype,
            load_format=given.load_format,
            batches=sorted(set(given.batches or ([1, 2, 4, 8, 16, 32, 64, 128, 256] if gpu else [1, 2, 4, 8]))),
            lengths=sorted(set(given.lengths or ([128, 512, 1024, 2048] if gpu else [32, 64, 128, 256]))),
            shares=sorted(set(shares), reverse=True),
            seconds=given.seconds,
            memory=max(memory, slab),
            slab=slab,
            step_tokens=given.step_tokens or (2048 if gpu else 256),
            threads=given.threads,
        )
        ceilings, rows = profile(plan, lambda line: print(line, file=sys.stderr, flush=True))
        save_costs(given.output, rows)
        print_profile(rows, table_console())
        print(f"cost file: {given.output}")
        if given.json is not None:
            command = ["python", "-m", "bench.profile", *(sys.argv[1:] if arguments is None else arguments)]
            save_figures(given.json, command, ceilings, rows)
        return 0

    return reported(work)


if __name__ == "__main__":
    sys.exit(main())

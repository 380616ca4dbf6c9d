"""`python -m bench.muxserve CONFIG`: MuxServe's launch command over Forebay's server. Only the command line."""

import argparse
import asyncio
import sys
from pathlib import Path

from forebay.bench import options
from forebay.bench.command_line import check_outputs, exit_code, run_until_signal, table_console
from forebay.bench.errors import BenchError, Interrupted
from forebay.bench.muxserve_run import Launch, prepare, print_table, run
from forebay.bench.muxserve_translation import POLICIES
from forebay.bench.progress import ProgressDisplay
from forebay.bench.report import Report, write_report


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.muxserve",
        description="Serves the models of MuxServe's model_config.yaml, replays a workload file against them, prints a "
        "line for each model, writes a report and ends everything. Exits with 1 if anything failed.",
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="MuxServe's model_config.yaml")
    parser.add_argument("--workload-file", type=Path, metavar="FILE", help="instead of workloads.workload_file")
    parser.add_argument(
        "--split-by-model", metavar="NAME", help="serve this model only and replay its requests only (spatial)"
    )
    parser.add_argument(
        "--schedule-approach", choices=POLICIES, default="adbs", help="fcfs is temporal under its other name (adbs)"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="what a GPU of CONFIG is (cuda where there is one)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="report to write (report.json; report-NAME.json with a split)"
    )
    parser.add_argument(
        "--server-port", type=options.port, default=0, metavar="PORT", help="of the HTTP server (any free port)"
    )
    parser.add_argument(
        "--nproc-per-node", "--nproc_per_node", type=options.positive_int, metavar="N", help="must be CONFIG's num_gpus"
    )
    ignored = parser.add_argument_group("MuxServe's options that change nothing here")
    ignored.add_argument("--nnodes", type=options.positive_int, metavar="1", help="only 1: one server, one machine")
    ignored.add_argument("--node-rank", "--node_rank", type=options.non_negative_int, metavar="0", help="only 0")
    ignored.add_argument("--master-addr", "--master_addr", metavar="ADDRESS")
    ignored.add_argument("--master-port", "--master_port", type=options.port, metavar="PORT")
    ignored.add_argument("--flexstore-port", type=options.port, metavar="PORT")
    ignored.add_argument("--mps-dir", metavar="FOLDER")
    return parser


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> list[str]:
    """Notes on options without a meaning here. Ends the process with a usage error for values that cannot be had."""
    if arguments.nnodes not in (None, 1):
        parser.error(f"argument --nnodes: {arguments.nnodes} is not allowed; 1 is: Forebay serves on one machine")
    if arguments.node_rank not in (None, 0):
        parser.error(f"argument --node-rank: {arguments.node_rank} is not allowed; 0 is: there is one node")
    reasons = {
        "nnodes": "there is always one node",
        "node_rank": "there is always one node",
        "master_addr": "there is no other node to meet",
        "master_port": "there is no other node to meet",
        "flexstore_port": "there is no store process: the workers of a device own its memory",
        "mps_dir": "workers do not use MPS",
    }
    return [
        f"--{name.replace('_', '-')}: {reason}"
        for name, reason in reasons.items()
        if getattr(arguments, name) is not None
    ]


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    for note in check(parser, arguments):
        print(f"note: {note}", file=sys.stderr)
    split = arguments.split_by_model
    output = arguments.output or Path("report.json" if split is None else f"report-{split}.json")
    launch = Launch(
        config=arguments.config,
        workload_file=arguments.workload_file,
        split_by_model=split,
        policy=arguments.schedule_approach,
        devices_per_node=arguments.nproc_per_node,
        device=arguments.device,
        server_port=arguments.server_port,
        output=output,
        command=[sys.executable, "-m", "forebay.bench.muxserve", *(sys.argv[1:] if argv is None else argv)],
    )
    try:
        check_outputs(output)
        prepared = prepare(launch)
        for note in prepared.notes:
            print(f"note: {note}", file=sys.stderr)

        async def work(stop: asyncio.Event) -> tuple[Report, list[str]]:
            with ProgressDisplay(sys.stderr) as progress:
                return await run(prepared, launch, progress, stop)

        (report, problems), signal_number = run_until_signal(work)
        write_report(output, report)
    except Interrupted as error:
        print(f"error: {error}", file=sys.stderr)
        return 130
    except (BenchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print_table(report, launch.policy, table_console())
    print(f"report: {output}")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return exit_code(report.total.failed + len(problems), signal_number)


if __name__ == "__main__":
    sys.exit(main())

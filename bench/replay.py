"""`python -m bench.replay`: replays a workload against a server and reports latencies. Only the command line."""

import argparse
import asyncio
import secrets
import sys
from pathlib import Path

from forebay.bench import options
from forebay.bench.baseline import read_baseline, write_baseline
from forebay.bench.command_line import check_outputs, exit_code, run_until_signal, table_console
from forebay.bench.errors import BenchError, Interrupted
from forebay.bench.figures import write_figures
from forebay.bench.measure import DEFAULT_SCALES, Measurement, Plan, measure_run
from forebay.bench.page import write_page
from forebay.bench.probes import relabelled
from forebay.bench.progress import ProgressDisplay
from forebay.bench.replay_figures import replay_figures
from forebay.bench.report import print_report, write_report
from forebay.bench.workload_file import read_workload


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.replay",
        description="Replays a workload over streaming HTTP against an OpenAI-compatible server. Each request leaves "
        "at its arrival time, whether or not others have finished. Exits with 1 if any request failed.",
    )
    parser.add_argument("workload", type=Path, metavar="WORKLOAD", help="file of python -m bench.workload")
    parser.add_argument(
        "--base-url", type=options.base_url, required=True, metavar="URL", help="such as http://127.0.0.1:8080"
    )
    parser.add_argument("--output", type=Path, default=Path("report.json"), help="report to write (%(default)s)")
    parser.add_argument(
        "--baseline", type=Path, metavar="FILE", help="what requests take alone; measured first where not given"
    )
    parser.add_argument("--baseline-output", type=Path, metavar="FILE", help="write the baseline, to give it again")
    parser.add_argument(
        "--scales",
        type=options.scales,
        default=list(DEFAULT_SCALES),
        metavar="S,...",
        help=f"SLO scales (1 to {DEFAULT_SCALES[-1]:g})",
    )
    parser.add_argument(
        "--time-scale",
        type=options.factor,
        default=1.0,
        metavar="X",
        help="multiply arrival times by X (0.5: twice as fast)",
    )
    parser.add_argument(
        "--fresh-prompts",
        action="store_true",
        help="exchange token ids at random, so that the server's prefix cache holds nothing of an earlier replay; what "
        "prompts share with each other stays",
    )
    parser.add_argument("--max-requests", type=options.positive_int, metavar="N", help="only the first N requests")
    parser.add_argument(
        "--timeout", type=options.positive_float, default=600.0, metavar="S", help="for each request (%(default)s)"
    )
    parser.add_argument(
        "--plots", type=Path, metavar="DIR", help="draw PNG plots and index.html, one page with all numbers and plots"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the main figures, for scripts")
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    command = [sys.executable, "-m", "forebay.bench.replay", *(sys.argv[1:] if argv is None else argv)]
    page = None if arguments.plots is None else arguments.plots / "index.html"
    try:
        check_outputs(arguments.output, arguments.baseline_output, arguments.json, page)
        workload = read_workload(arguments.workload)
        if arguments.max_requests is not None:
            workload = workload.first(arguments.max_requests)
        if arguments.fresh_prompts:
            workload = relabelled(workload, secrets.randbits(32))
        plan = Plan(
            base_url=arguments.base_url,
            workload=workload,
            origin=str(arguments.workload),
            command=command,
            scales=arguments.scales,
            time_scale=arguments.time_scale,
            timeout_s=arguments.timeout,
            baseline=None if arguments.baseline is None else read_baseline(arguments.baseline),
        )

        async def work(stop: asyncio.Event) -> Measurement:
            with ProgressDisplay(sys.stderr) as progress:
                return await measure_run(plan, progress, stop)

        measurement, signal_number = run_until_signal(work)
        report = measurement.report
        write_report(arguments.output, report)
        if arguments.baseline_output is not None:
            write_baseline(arguments.baseline_output, report.baseline)
        if arguments.json is not None:
            write_figures(arguments.json, "replay", command, replay_figures(measurement))
        if page is not None:
            from forebay.bench.plots import draw_measurement

            plots = draw_measurement(measurement, arguments.plots)
            write_page(page, report, plots, arguments.plots)
    except Interrupted as error:
        print(f"error: {error}", file=sys.stderr)
        return 130
    except (BenchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print_report(report, table_console())
    if report.ended != "complete":
        why = "the server is gone" if report.ended == "server_lost" else "interrupted"
        print(f"error: the replay ended early: {why}; the report is partial", file=sys.stderr)
    print(f"report: {arguments.output}")
    if page is not None:
        print(f"plots: {page}")
    return exit_code(report.total.failed, signal_number)


if __name__ == "__main__":
    sys.exit(main())

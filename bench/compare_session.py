"""One call of `bench.compare`: run what is missing, then show all that is kept."""

import argparse
import sys
import time
from collections.abc import Sequence

from forebay.bench.baseline import read_baseline
from forebay.bench.command_line import run_until_signal, table_console
from forebay.bench.compare_arms import VllmOptions
from forebay.bench.compare_figures import Comparison, reference_baseline
from forebay.bench.compare_folder import ComparisonFolder
from forebay.bench.compare_run import Sweep, run_sweep
from forebay.bench.compare_setup import Setup
from forebay.bench.compare_table import print_comparison, save_comparison
from forebay.bench.errors import BenchError, Interrupted
from forebay.bench.progress import ProgressDisplay
from forebay.runtime.config_schema import parse_bytes


def compare(given: argparse.Namespace, setup: Setup, command: Sequence[str]) -> int:
    """The exit status: 0 also where an arm failed, which the table says. Raises BenchError and Interrupted."""
    folder = ComparisonFolder(given.output)
    folder.open(setup)
    if given.fresh and not given.table:
        for arm in given.arms:
            folder.forget(arm, given.rates)
    remaining: list[str] = []
    if not given.table:
        try:
            kv_bytes = parse_bytes(given.vllm_kv) if given.vllm_kv else 0
        except ValueError as error:
            raise BenchError(f"--vllm-kv: {error}") from error
        sweep = Sweep(
            setup,
            folder,
            given.arms,
            given.rates,
            VllmOptions(given.vllm, given.vllm_command, given.vllm_options, kv_bytes),
            time.strftime("%Y-%m-%d %H:%M:%S"),
            command,
            given.drain,
            given.budget,
            given.timeout,
        )
        with ProgressDisplay(sys.stderr) as progress:
            remaining, number = run_until_signal(lambda stop: run_sweep(sweep, progress, stop))
        if number is not None:
            raise Interrupted("interrupted; what was measured is kept, and the same command goes on")
    show(given, folder, remaining, command)
    return 0


def show(given: argparse.Namespace, folder: ComparisonFolder, remaining: Sequence[str], command: Sequence[str]) -> None:
    """Tables, plots and figures of all that is kept. Raises BenchError and OSError."""
    points, arms = folder.points(), folder.arms()
    if not points:
        for state in arms.values():
            print(f"{state.arm}: {state.failure or 'no point yet'}")
        for one in remaining:
            print(f"remains: {one} requests/s; the same command goes on")
        raise BenchError(f"{folder.folder}: no point has been measured")
    if given.baseline is None:
        reference, baseline = reference_baseline(points, arms)
    else:
        reference, baseline = str(given.baseline), read_baseline(given.baseline)
        baseline.check_models(sorted({sample.model for point in points for sample in point.samples}), reference)
    comparison = Comparison(points, arms, baseline, reference, given.scales, given.target)
    print_comparison(comparison, remaining, table_console())

    from forebay.bench.compare_plots import draw_comparison

    for path in draw_comparison(comparison, folder.folder / "plots"):
        print(f"plot: {path}")
    if given.json is not None:
        save_comparison(given.json, command, comparison)

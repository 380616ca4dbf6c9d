"""What bench.interference found, as figures and as a table."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from forebay.bench.command_line import table_console
from forebay.bench.figures import Figure
from forebay.bench.interference_loop import Seen


@dataclass(frozen=True)
class Found:
    """Of one mode. `alone` holds the undisturbed tokens; `prefill_alone` is in tokens per second."""

    mode: str
    alone: Seen
    beside: Seen
    prefill_alone: float

    @property
    def prefill_beside(self) -> float:
        return self.beside.prompt_tokens / self.beside.took

    def figures(self) -> dict[str, Figure]:
        """Each beside what it is alone."""
        found = {
            f"tpot_p{part}_{self.mode}": Figure(_ms(self.beside.gaps, part), "ms", _ms(self.alone.gaps, part))
            for part in (50, 99)
        }
        if self.beside.decodes and self.alone.decodes:
            step = Figure(_ms(self.beside.decodes, 50), "ms", _ms(self.alone.decodes, 50))
            found[f"decode_step_on_device_{self.mode}"] = step
        return found | {f"prefill_{self.mode}": Figure(self.prefill_beside, "tokens/s", self.prefill_alone)}


def print_table(title: str, all_found: Sequence[Found]) -> None:
    table = Table(title=title)
    table.add_column("mode")
    for heading in (
        "TPOT p50 ms alone", "beside", "x", "TPOT p99 ms alone", "beside", "x", "step ms on device alone", "beside",
        "prefill tokens/s alone", "beside", "x",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    table.add_column("chunks by % of SMs")
    for found in all_found:
        cells = []
        for part in (50, 99):
            alone, beside = _ms(found.alone.gaps, part), _ms(found.beside.gaps, part)
            cells += [f"{alone:.2f}", f"{beside:.2f}", f"{beside / alone:.2f}"]
        for seen in (found.alone, found.beside):
            cells.append(f"{_ms(seen.decodes, 50):.2f}" if seen.decodes else "-")
        ratio = found.prefill_beside / found.prefill_alone
        cells += [f"{found.prefill_alone:,.0f}", f"{found.prefill_beside:,.0f}", f"{ratio:.2f}"]
        chunks = ", ".join(f"{share or 100}: {count}" for share, count in sorted(found.beside.chunks.items()))
        table.add_row(found.mode, *cells, chunks)
    console = table_console()
    console.print(table)
    for found in all_found:
        if not found.beside.whole:
            console.print(
                f"{found.mode}: the answers came to their end before the prompts were through; what is shown is of "
                f"{found.beside.prompt_tokens:,} tokens of prompts in {found.beside.took:.1f} s",
                highlight=False,
            )


def _ms(seconds: Sequence[float], percentile: int) -> float:
    return 1e3 * float(np.percentile(seconds, percentile))

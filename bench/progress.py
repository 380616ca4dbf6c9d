"""How far a measurement is, on standard error: a bar for people at a terminal, plain lines for everything else."""

import time
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

LINE_INTERVAL_S = 5.0
"""Between two plain lines of one activity."""


class ProgressDisplay:
    """One activity at a time: `start` names it, `update` says how far it is."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._title = ""
        self._last_line = 0.0
        self._last_text = ""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[detail]}"),
                console=self._console,
            )
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start(self, title: str, total: int | None) -> None:
        """Begins an activity of `total` parts (None: unknown)."""
        self._title = title
        self._last_line = 0.0
        self._last_text = ""
        if self._bar is not None:
            self._task = self._bar.add_task(title, total=total, detail="")

    def update(self, done: int, detail: str, *, last: bool = False) -> None:
        """`done` parts of the activity. Plain lines come at most every LINE_INTERVAL_S, and always the `last` one."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, detail=detail)
            return
        now = time.monotonic()
        if (last or now - self._last_line >= LINE_INTERVAL_S) and detail != self._last_text:
            self._last_line, self._last_text = now, detail
            self._console.print(f"{self._title}: {detail}", highlight=False, markup=False, soft_wrap=True)

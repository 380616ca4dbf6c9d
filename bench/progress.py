"""How far a measurement is, on standard error: a bar for people at a terminal, plain lines for everything else."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

LINE_INTERVAL_S = 5.0
"""Between two plain lines of one activity."""

BAR_WIDTH = 12
"""Columns, so that what is told beside the bar has room on a terminal of 80."""


class ProgressDisplay:
    """One activity at a time: `start` names it and ends the one before, `update` says how far it is. `clock` tells
    seconds."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = Console(file=stream)
        self._clock = clock
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._total: int | None = None
        self._title = ""
        self._last_line = 0.0
        self._last_text = ""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(BAR_WIDTH),
                _Parts(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[detail]}", markup=False, table_column=Column(overflow="fold")),
                console=self._console,
                get_time=self._clock,
            )
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._end()
            self._bar.stop()

    def start(self, title: str, total: int | None) -> None:
        """Begins an activity of `total` parts (None: it has no parts that could be counted)."""
        self._end()
        self._title = title
        self._total = total
        self._last_line = 0.0
        self._last_text = ""
        if self._bar is not None:
            self._task = self._bar.add_task(title, total=total, detail="", counted=total is not None)

    def update(self, done: int, detail: str, *, last: bool = False) -> None:
        """`done` parts of the activity. The `last` update ends it, and what comes later is not shown. Plain lines come
        at most every LINE_INTERVAL_S, and always the last one."""
        if self._bar is not None:
            if self._task is not None:
                self._bar.update(self._task, completed=done, detail=detail)
            if last:
                self._end()
            return
        now = self._clock()
        if (last or now - self._last_line >= LINE_INTERVAL_S) and detail != self._last_text:
            self._last_line, self._last_text = now, detail
            self._console.print(f"{self._title}: {detail}", highlight=False, markup=False, soft_wrap=True)

    def _end(self) -> None:
        """Stops the activity's clock. The bar of one without parts becomes a whole one, that of others stays where
        it is."""
        if self._bar is None or self._task is None:
            return
        if self._total is None:
            self._bar.update(self._task, total=1, completed=1)
        self._bar.stop_task(self._task)
        self._task = None


class _Parts(ProgressColumn):
    """Parts done and all parts; nothing for an activity whose parts cannot be counted."""

    def render(self, task: Task) -> Text:
        return Text(f"{int(task.completed)}/{task.total:.0f}" if task.fields["counted"] else "")

"""Progress that a person can follow: on a terminal a bar with the budget left, elsewhere some lines on stderr."""

from __future__ import annotations

import math
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

_LINE_EVERY_S = 15.0


class Budget:
    """Seconds that may be spent, counted from the start; `math.inf` if they are only counted."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.ended = False
        self._start = time.monotonic()

    def restart(self) -> None:
        """Count from now on again; what has been ended stays so."""
        self._start = time.monotonic()

    def end(self) -> None:
        """Leave nothing."""
        self.ended = True

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    @property
    def left(self) -> float:
        """Seconds left, not below 0."""
        return 0.0 if self.ended else max(0.0, self.seconds - self.spent)


class _BudgetLeft(ProgressColumn):
    """The budget that is left: steps do not take as long as it would take to do all of them, they end with it."""

    def __init__(self, budget: Budget) -> None:
        super().__init__()
        self._budget = budget

    def render(self, task: Task) -> Text:
        """Seconds, or minutes and seconds; nothing where time has no limit."""
        if math.isinf(self._budget.left):
            return Text("")
        minutes, seconds = divmod(round(self._budget.left), 60)
        return Text(f"budget left {minutes}:{seconds:02d}", style="progress.remaining")


class Steps:
    """A named run of steps, shown with what is being done and how much of the budget is left."""

    def __init__(self, console: Console, title: str, total: int, budget: Budget) -> None:
        # A log, or what a pipe gets, is for results: progress goes to stderr there.
        elsewhere = console.file is sys.stdout and not console.is_terminal
        self._console = Console(stderr=True, quiet=console.quiet) if elsewhere else console
        self._title, self._total, self._budget = title, total, budget
        self._done = 0
        self._said = time.monotonic()
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=28),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                _BudgetLeft(budget),
                TextColumn("{task.fields[what]}", style="dim"),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task(title, total=total, what="")

    def __enter__(self) -> Steps:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._console.print(
            f"{self._title}: {self._done} of {self._total}, {self._budget.spent:.0f} s since the start", soft_wrap=True
        )

    def at(self, what: str) -> None:
        """Say what is being done now."""
        if self._bar is not None:
            self._bar.update(self._task, what=what)

    def step(self, what: str = "", count: int = 1) -> None:
        """Count finished steps."""
        self._done += count
        if self._bar is not None:
            self._bar.update(self._task, advance=count, what=what)
        elif time.monotonic() - self._said > _LINE_EVERY_S:
            self._said = time.monotonic()
            self._console.print(
                f"{self._title}: {self._done} of {self._total}, {self._left()}  {what}",
                soft_wrap=True,
            )

    def _left(self) -> str:
        left = self._budget.left
        return f"{self._budget.spent:.0f} s since the start" if math.isinf(left) else f"budget left {left:.0f} s"

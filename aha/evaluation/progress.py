"""A progress bar with the remaining time; a line now and then where there is no terminal."""

from __future__ import annotations

import math
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

EVERY = 30.0  # seconds between lines in a log


class Bar:
    """Progress over samples.

    Args:
        title: what is done.
        total: samples, where known.
        shown: False for all processes but one.
    """

    def __init__(self, title: str, total: int | None, *, shown: bool = True) -> None:
        self.console = Console(stderr=True)
        self.title, self.total, self.shown = title, total, shown
        self.done, self.worked = 0.0, 0.0
        self.start = self.last = time.monotonic()
        self._bar: Progress | None = None
        if shown and self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            remaining = (TextColumn("left"), TimeRemainingColumn())
            self._bar = Progress(*columns, *remaining, console=self.console, speed_estimate_period=300)
            self._task = self._bar.add_task(title, total=total)

    def __enter__(self) -> Bar:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, samples: float, *, worked: bool = True) -> None:
        """Count samples as done; ``worked=False`` for those found done, which say nothing about speed."""
        self.done = min(self.done + samples, self.total or math.inf)  # other processes' share is an estimate
        self.worked += samples if worked else 0
        if self._bar:
            self._bar.update(self._task, completed=round(self.done))
        elif self.shown and time.monotonic() - self.last > EVERY:
            self.last = time.monotonic()
            left = ""
            if self.total and self.worked:
                seconds = (self.total - self.done) * (self.last - self.start) / self.worked
                left = f", {seconds / 60:.0f} min left" if seconds > 90 else f", {seconds:.0f} s left"
            self.console.print(f"{self.title}: {self.done:.0f} of {self.total or '?'}{left}", highlight=False)

"""The progress of long work: a bar on a terminal, elsewhere a line every half minute."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

from data.printable import console

SECONDS = 30  # between lines without a terminal


class ProgressBar:
    """Shows on standard error how much of some work is done, within a `with` block."""

    def __init__(self, description: str, total: int, unit: str = "", show: bool = True):
        """Makes a bar.

        Args:
          description: what is done, such as "preparing data".
          total: the amount of work.
          unit: what is counted, such as "answers"; "B" for bytes.
          show: whether anything is printed.
        """
        self.description, self.total, self.unit, self.show = description, total, unit, show
        self.done, self._due = 0, time.monotonic() + SECONDS
        self._bar: Any = None

    def __enter__(self) -> Self:
        if self.show and sys.stderr.isatty():
            self._bar = _bar(self.unit == "B")
            self._task = self._bar.add_task(self.description, total=self.total)
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, amount: int = 1) -> None:
        """Counts an amount of work as done."""
        self.done += amount
        if self._bar is not None:
            self._bar.advance(self._task, amount)
        elif self.show and time.monotonic() >= self._due:
            self._due = time.monotonic() + SECONDS
            console(stderr=True).print(self.line(), markup=False, highlight=False, soft_wrap=True)

    def line(self) -> str:
        """Returns the state in words, such as "preparing data: 1.2 of 3.4 GB"."""
        if self.unit != "B":
            return f"{self.description}: {self.done:,} of {self.total:,} {self.unit}".rstrip()
        scale, name = next((s, n) for s, n in _SIZES if self.total >= s or s == 1)
        return f"{self.description}: {self.done / scale:,.1f} of {self.total / scale:,.1f} {name}"


_SIZES = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "B"))


def _bar(bytes_: bool) -> Any:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn() if bytes_ else MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console(stderr=True),
    )

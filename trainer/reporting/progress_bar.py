"""The progress of a run on a terminal, or as lines in a file."""

import time
from collections.abc import Callable
from typing import Any

from data.printable import console
from trainer.reporting.meter import NAMES

# Without a terminal, progress is printed at least this often.
LINE_SECONDS = 30


class ProgressBar:
    """Shows loss, tokens/s and time left.

    On a terminal it is a bar. Elsewhere it prints a line for the first row, then one every
    LINE_SECONDS or twentieth of the run, whichever is sooner.
    """

    def __init__(
        self,
        steps: int,
        start_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
        loss_name: str = NAMES[0],
    ) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._steps, self._clock, self._loss_name = steps, clock, loss_name
        self._next_step, self._next_time = 0, 0.0  # when a line is due: at once
        self._console = console(stderr=True)
        self._live = self._console.is_terminal
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            console=self._console,
            disable=not self._live,
        )
        self._progress.start()
        self._task = self._progress.add_task("train", total=steps, completed=start_step, text="")

    def update(self, row: dict[str, Any], seconds_left: float | None) -> None:
        """Shows a row of metrics."""
        step = row["step"]
        text = (
            f"loss {short(row.get(self._loss_name))}  {short(row.get('tokens_per_second'), 0)} "
            f"tokens/s  {_duration(seconds_left)} left"
        )
        self._progress.update(self._task, completed=step, text=text)
        if not self._live and (
            step >= min(self._steps, self._next_step) or self._clock() >= self._next_time
        ):
            self._next_step = step + max(1, self._steps // 20)
            self._next_time = self._clock() + LINE_SECONDS
            self.say(f"step {step}/{self._steps}  {text}")

    def say(self, text: str) -> None:
        """Prints a line above the bar; the terminal wraps it, so that paths can be copied."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Removes the bar and restores the terminal."""
        self._progress.stop()


def short(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _duration(seconds: float | None) -> str:
    """Seconds as 1:02:03 or 2:03; None as -:--."""
    if seconds is None:
        return "-:--"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"

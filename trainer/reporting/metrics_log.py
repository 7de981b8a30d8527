"""A run's log: its metrics and evaluations as JSON lines, on boards and beside a progress bar."""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from data.errors import UserError
from data.printable import printable
from trainer.config.load import resolved
from trainer.config.schema import RunConfig
from trainer.reporting.boards import Board, TensorBoard, WeightsAndBiases
from trainer.reporting.meter import NAMES, plain_number
from trainer.reporting.progress_bar import ProgressBar, short
from trainer.run.directory import RunDirectory
from trainer.run.logs import Written


class MetricsLog:
    """Writes metrics.jsonl, evaluations' NAME.jsonl and the boards; shows a progress bar."""

    def __init__(
        self,
        run: RunDirectory,
        config: RunConfig,
        step: int = 0,
        *,
        evaluated: bool = True,
        logged: Mapping[str, Mapping[str, Any]] | None = None,
        evaluations: Sequence[str] = ("held_out",),
        loss_name: str = NAMES[0],
        write: bool = True,
    ) -> None:
        """Opens the files and boards.

        Args:
          step: the restored one, 0 for none; later lines of the files are removed.
          evaluated: whether the evaluations of `step` are logged already; otherwise their lines are
            removed too.
          logged: `MetricsLog.logged` at the save of `step`; a warning names lines lost or changed
            since.
          evaluations: names of the evaluations.
          loss_name: of the progress bar's metric.
          write: only the first of several processes writes.
        """
        self._written: dict[str, Written] = {}  # by the file's name
        self._files: dict[str, Any] = {}
        self._boards: list[Board] = []
        self._bar: ProgressBar | None = None
        self._loss_name = loss_name
        if not write:
            return
        self._written = run.cut_back(step, evaluated, evaluations, logged)
        run.folder.mkdir(parents=True, exist_ok=True)
        self._files = {
            name: open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
            for name, path in (
                ("train", run.metrics),
                *((name, run.folder / f"{name}.jsonl") for name in evaluations),
            )
        }
        logging = config.logging
        if logging.tensorboard:
            self._boards.append(TensorBoard(run.tensorboard, step))
        if logging.wandb:
            self._boards.append(
                WeightsAndBiases(run.folder, logging.wandb, config.name, resolved(config))
            )
        if logging.console:
            self._bar = ProgressBar(config.train.steps, step, loss_name=loss_name)

    def train(self, row: dict[str, Any], seconds_left: float | None = None) -> None:
        """Logs one row of training metrics, as returned by `Meter.read`."""
        self._write("train", row)
        if self._bar:
            self._bar.update(row, seconds_left)

    def evaluation(self, name: str, row: dict[str, Any]) -> None:
        """Writes an evaluation's row {"step", ...} to NAME.jsonl and the boards; prints texts.

        A step measured again, as after resuming with another `checkpoint.best`, already has a row.
        """
        written = self._written.get(f"{name}.jsonl")
        if written is not None and written.last_step == row["step"]:
            return
        self._write(name, row)
        for prompt, answer in row.items():
            if isinstance(answer, str):
                self.say(f"step {row['step']}: {_one_line(prompt)} -> {_one_line(answer)}")
        loss = row.get(f"held_out_{self._loss_name}")
        if self._bar and loss is not None:
            self._bar.say(f"step {row['step']}: held-out loss {short(loss)}")

    def say(self, text: str) -> None:
        """Prints a line above the progress bar, if there is one."""
        if self._bar:
            self._bar.say(text)

    @property
    def logged(self) -> dict[str, dict[str, Any]]:
        """A checkpoint's record of each file, by file name."""
        return {name: written.data for name, written in self._written.items()}

    def _write(self, name: str, row: dict[str, Any]) -> None:
        if not self._files:
            return
        row = {
            key: value if isinstance(value, str) else plain_number(value)
            for key, value in row.items()
        }
        file = self._files[name]
        try:
            line = json.dumps(row, allow_nan=False) + "\n"
            file.write(line)
            file.flush()  # after every line, so that a killed run keeps it
            self._written[os.path.basename(file.name)].add(line.encode())
        except OSError as error:
            self._files.pop(name)
            with contextlib.suppress(OSError):  # closing tries to write again
                file.close()
            raise UserError(
                f"{file.name}: cannot be written ({error.strerror}); make it writable, and the "
                "same command resumes from the last checkpoint"
            ) from error
        for board in self._boards:
            board.add(name, row)

    def close(self) -> None:
        """Closes the files and boards, and stops the bar."""
        for file in self._files.values():
            file.close()
        for board in self._boards:
            board.close()
        if self._bar:
            self._bar.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _one_line(text: str) -> str:
    """Returns the first 200 characters of a text on one line, without control characters."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= 200 else line[:200] + " ..."

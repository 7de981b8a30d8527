"""Boards for a run's metrics: TensorBoard, and Weights & Biases on request."""

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from data.errors import UserError


class Board(Protocol):
    """A destination of metrics in addition to the run's files."""

    def add(self, kind: str, row: dict[str, Any]) -> None:
        """Adds a row {"step", NAME: number, text or None} of a kind such as `train`."""

    def close(self) -> None:
        """Writes or sends everything that was added."""


class TensorBoard:
    """Writes rows as scalars and texts `KIND/NAME` to event files.

    Hides what an earlier start logged after `start_step`.
    """

    def __init__(self, folder: Path, start_step: int) -> None:
        # Not tensorboardX's SummaryWriter: its thread ends at the first disk error, and its queue
        # then fills.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._folder, self._event = folder, Event
        with self._named_errors():
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(folder / "events"), f".{os.getpid()}")
            self._writer.write_event(
                Event(step=start_step + 1, session_log=SessionLog(status=SessionLog.START))
            )
            self._writer.flush()

    def add(self, kind: str, row: dict[str, Any]) -> None:
        """Adds one row, as in `Board`."""
        from tensorboardX.summary import scalar, text

        with self._named_errors():
            for name, value in row.items():
                if name != "step" and value is not None:
                    summary = (text if isinstance(value, str) else scalar)(f"{kind}/{name}", value)
                    self._writer.write_event(
                        self._event(wall_time=time.time(), step=row["step"], summary=summary)
                    )
            self._writer.flush()

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Raises UserError, naming the folder, for a disk error."""
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{self._folder}: cannot be written ({error.strerror}); make it writable and "
                "repeat the command, or give --logging.tensorboard false"
            ) from error

    def close(self) -> None:
        """Closes the event files."""
        with contextlib.suppress(OSError):  # every row was flushed or raised an error
            self._writer.close()


class WeightsAndBiases:
    """Sends rows as `KIND/NAME` over `step` to a W&B run, which later starts continue.

    `step` is an ordinary metric, since W&B's counter refuses steps repeated after a restore. W&B's
    environment variables apply: WANDB_MODE=offline keeps everything in `folder` for a later `wandb
    sync`.

    Raises:
      UserError: wandb is not installed, or cannot start (no login, no network).
    """

    def __init__(self, folder: Path, project: str, name: str, config: dict[str, Any]) -> None:
        wandb = import_wandb()
        id_file = folder / "wandb" / "run_id"
        if not id_file.exists():
            id_file.parent.mkdir(parents=True, exist_ok=True)
            id_file.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
        try:
            self._run = wandb.init(
                project=project,
                name=name,
                config=config,
                dir=str(folder),
                resume="allow",
                id=id_file.read_text("utf-8"),
            )
        except wandb.Error as error:
            raise UserError(
                f"logging.wandb: {str(error).splitlines()[0]}; WANDB_MODE=offline works without "
                "an account"
            ) from None
        self._run.define_metric("*", step_metric="step")

    def add(self, kind: str, row: dict[str, Any]) -> None:
        """Adds one row, as in `Board`."""
        self._run.log(
            {
                name if name == "step" else f"{kind}/{name}": value
                for name, value in row.items()
                if value is not None
            }
        )

    def close(self) -> None:
        """Ends the run's upload."""
        self._run.finish()


def import_wandb() -> ModuleType:
    """Imports `wandb`. Raises UserError if it is not installed."""
    try:
        import wandb
    except ImportError:
        raise UserError(
            "logging.wandb: the package wandb is not installed; pip install wandb, or leave "
            "logging.wandb out"
        ) from None
    return wandb

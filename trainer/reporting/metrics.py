"""A run's metrics (memory, times, rates) and their log (JSONL, boards, progress bar).

A line of metrics.jsonl is {"step": ..., NAMES...}, and with several sources `loss_by_source/NAME`
for each with a target in the step. Losses, target_tokens, grad_norm and learning_rate are the
step's. Times and rates are means over the steps since the previous line; data_wait_seconds is the
time the devices waited for data. compile_seconds and the peaks cover the process so far; epoch,
tokens_seen (without padding) and wall_seconds (training, including evaluations and saves) the whole
run, over all its starts.
"""

import contextlib
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from data.errors import UserError
from data.printable import console, printable
from model.attention import Mask
from model.config import TransformerConfig
from trainer.devices import peak_flops
from trainer.flops import flops_per_step, pairs_per_layer
from trainer.reporting.boards import Board, TensorBoard, WeightsAndBiases
from trainer.run.directory import RunDirectory
from trainer.run.logs import Written

NAMES = (
    "loss_nats_per_target",
    "target_tokens",
    "tokens_per_second",
    "tokens_per_second_per_device",
    "mfu",
    "grad_norm",
    "learning_rate",
    "data_wait_seconds",
    "step_seconds",
    "compile_seconds",
    "peak_device_gib",
    "peak_host_gib",
    "padding_share",
)
# Metrics that differ between runs with bitwise equal results.
MEASURED = (
    "tokens_per_second",
    "tokens_per_second_per_device",
    "mfu",
    "data_wait_seconds",
    "step_seconds",
    "compile_seconds",
    "peak_device_gib",
    "peak_host_gib",
    "wall_seconds",
)


# Memory


def peak_device_gib(devices: Iterable[Any]) -> float | None:
    """The peak memory over this process's `devices` so far; None if not reported."""
    stats = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    peaks = [peak for peak in stats if peak is not None]
    return max(peaks) / 2**30 if peaks else None


def peak_host_gib() -> float:
    """The peak resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # bytes on macOS, KiB on Linux


# Timing


class Meter:
    """Measures steps, data waits and compiling; computes rates and the time left.

    meter = Meter(model_config, devices, mask=mask)
    with meter.compiling(): ...                 # before or between steps; not part of a step
    meter.start()
    for step in ...:
        loss = ...                              # dispatched
        computed = meter.when_computed(loss)
        with meter.waiting_for_data(computed): batch = ...
        wait for the loss
        meter.count(lengths, batch_tokens)
        if time to log: row = meter.read(step, loss_nats_per_target=..., target_tokens=..., ...)
        with meter.paused(): save, evaluate     # not part of a step
    """

    def __init__(
        self,
        config: TransformerConfig,
        devices: Iterable[Any],
        clock: Callable[[], float] = time.perf_counter,
        mask: Mask = Mask(),
        frozen: Collection[str] | None = None,
    ) -> None:
        """Starts measuring.

        Args:
          config: the model, for FLOPs.
          devices: all devices of the mesh, including other processes'.
          clock: returns seconds.
          mask: the attention mask, for FLOPs.
          frozen: as in `flops_per_step`.
        """
        self._config, self._devices, self._clock, self._mask = config, list(devices), clock, mask
        self._frozen = frozen
        peak = peak_flops(self._devices[0].device_kind)
        self._peak = peak * len(self._devices) if peak else None
        self.compile_seconds = 0.0
        self.seconds_per_step: float | None = None
        self._start = clock()
        self._watcher = ThreadPoolExecutor(1, "when_computed")
        self._reset()

    def _reset(self) -> None:
        self._steps = self._tokens = self._batch_tokens = 0
        self._pairs = 0.0
        self._not_counted = 0.0
        self._data_waits: list[
            tuple[float, float, Future[float] | None]
        ] = []  # begin, end, and when the devices became idle
        self._start = self._clock()

    def start(self) -> None:
        """Begins the first interval; earlier time counts for no step."""
        self._reset()

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """A context for compiling: its time counts as compile_seconds and for no step."""
        before = self._clock()
        with self.paused():
            yield
        self.compile_seconds += self._clock() - before

    @contextlib.contextmanager
    def waiting_for_data(self, computed: Future[float] | None = None) -> Iterator[None]:
        """A context for a wait for data, which is part of the step.

        Its time counts as data_wait_seconds; with `computed`, from `when_computed`, only the time
        after that, since the devices were still busy.
        """
        before = self._clock()
        yield
        self._data_waits.append((before, self._clock(), computed))

    def when_computed(self, arrays: Any) -> Future[float]:
        """Returns a future of the clock's time at which the devices have computed these arrays."""

        def wait() -> float:
            import jax

            jax.block_until_ready(arrays)
            return self._clock()

        return self._watcher.submit(wait)

    def _data_wait(self) -> float:
        """Returns the seconds that the devices waited for data since the last reading."""
        return sum(
            max(0.0, end - (max(begin, computed.result()) if computed else begin))
            for begin, end, computed in self._data_waits
        )

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose time counts for no step."""
        before = self._clock()
        yield
        self._not_counted += self._clock() - before

    def count(self, lengths: np.ndarray, batch_tokens: int, shared: np.ndarray | int = 0) -> None:
        """Counts a finished step's global batch.

        Args:
          lengths: tokens of each document in it.
          batch_tokens: all tokens, padding included.
          shared: tokens of earlier documents that each document also sees.
        """
        self._steps += 1
        self._tokens += int(np.sum(lengths))
        self._batch_tokens += batch_tokens
        self._pairs += pairs_per_layer(self._config, lengths, self._mask, shared)

    def read(self, step: int, **values: float) -> dict[str, Any]:
        """Returns metrics for `step`, with the loop's `values`; begins the next interval."""
        seconds = max(self._clock() - self._start - self._not_counted, 1e-9)
        steps = max(self._steps, 1)
        self.seconds_per_step = seconds / steps
        rate = self._tokens / seconds
        flops = flops_per_step(self._config, self._tokens, self._pairs, self._frozen)
        row = {
            **values,
            "tokens_per_second": rate,
            "tokens_per_second_per_device": rate / len(self._devices),
            "mfu": flops / seconds / self._peak if self._peak else None,
            "data_wait_seconds": self._data_wait() / steps,
            "step_seconds": self.seconds_per_step,
            "compile_seconds": self.compile_seconds,
            "peak_device_gib": peak_device_gib(_local(self._devices)),
            "peak_host_gib": peak_host_gib(),
            "padding_share": 1 - self._tokens / self._batch_tokens if self._batch_tokens else 0.0,
        }
        self._reset()
        names = dict.fromkeys([*(name for name in NAMES if name in row), *values])
        return {"step": step, **{name: _number(row[name]) for name in names}}

    def seconds_left(self, step: int, steps: int) -> float | None:
        """The seconds left after `step` at the last pace; None before the first reading."""
        return None if self.seconds_per_step is None else (steps - step) * self.seconds_per_step


def _local(devices: Iterable[Any]) -> list[Any]:
    """This process's devices; only they report their memory."""
    import jax

    return [device for device in devices if device.process_index == jax.process_index()]


def _number(value: Any) -> float | int | None:
    """`value` as a plain number; None for nan and inf, which JSON cannot express."""
    if value is None or isinstance(value, int):
        return value
    value = value.item() if hasattr(value, "item") else value
    return value if math.isfinite(value) else None


# Writing


class MetricsLog:
    """Writes metrics.jsonl, evaluations' NAME.jsonl and the boards; shows a progress bar."""

    def __init__(
        self,
        run: RunDirectory,
        *,
        steps: int,
        start_step: int = 0,
        evaluated: bool = True,
        tensorboard: bool = True,
        console: bool = True,
        write: bool = True,
        wandb: dict[str, Any] | None = None,
        evaluations: Sequence[str] = ("held_out",),
        loss_name: str = NAMES[0],
        logged: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Opens the files and boards.

        Args:
          steps: of the whole run.
          start_step: the restored step; later lines of the files are removed first.
          evaluated: whether the evaluations of `start_step` are logged already; otherwise their
            lines are removed too.
          write: only the first of several processes writes.
          wandb: project, name and config of a `WeightsAndBiases`; None for none.
          evaluations: names of the evaluations; loss_name: of the progress bar's metric.
          logged: `self.logged` at the save of `start_step`; a warning names lines lost or changed
            since.
        """
        self._written: dict[str, Written] = {}  # by the file's name
        self._files: dict[str, Any] = {}
        self._boards: list[Board] = []
        self._bar: ProgressBar | None = None
        self._loss_name = loss_name
        if not write:
            return
        self._written = run.cut_back(start_step, evaluated, evaluations, logged)
        run.folder.mkdir(parents=True, exist_ok=True)
        self._files = {
            name: open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
            for name, path in (
                ("train", run.metrics),
                *((name, run.folder / f"{name}.jsonl") for name in evaluations),
            )
        }
        if tensorboard:
            self._boards.append(TensorBoard(run.tensorboard, start_step))
        if wandb:
            self._boards.append(WeightsAndBiases(run.folder, **wandb))
        if console:
            self._bar = ProgressBar(steps, start_step, loss_name=loss_name)

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
            self._bar.say(f"step {row['step']}: held-out loss {_short(loss)}")

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
            key: value if isinstance(value, str) else _number(value) for key, value in row.items()
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
            f"loss {_short(row.get(self._loss_name))}  {_short(row.get('tokens_per_second'), 0)} "
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


def _one_line(text: str, most: int = 200) -> str:
    """Returns a text on one line of up to `most` characters, without control characters."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= most else line[:most] + " ..."


def _short(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _duration(seconds: float | None) -> str:
    """Seconds as 1:02:03 or 2:03; None as -:--."""
    if seconds is None:
        return "-:--"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"

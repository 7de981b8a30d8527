"""Profiles of chosen steps: device and host timelines for TensorBoard, XProf or Perfetto."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import jax

from data.errors import UserError
from data.folders import scratch_folder
from trainer.config.schema import LoggingConfig
from trainer.run.cluster import warn
from trainer.run.directory import RunDirectory

# Where TensorBoard and XProf look in RUN/profile: a session with a file per host.
SESSIONS = "plugins/profile"


def session_of(steps: tuple[int, ...]) -> str:
    """Returns the folder in RUN/profile of a profile of these steps, the first and the last one."""
    return f"{SESSIONS}/steps_{steps[0]}_{steps[1]}"


def check_processes(logging: LoggingConfig) -> None:
    """Raises UserError if a process that should write profiles does not exist."""
    count = jax.process_count()
    if unknown := [number for number in logging.profile_processes if not 0 <= number < count]:
        raise UserError(
            f"logging.profile_processes: found {unknown[0]}; 0 to {count - 1} would work, or []"
        )


def profiled_here(logging: LoggingConfig) -> tuple[int, ...]:
    """Returns the first and the last step that this process profiles; () for none."""
    processes = logging.profile_processes
    return logging.profile_steps if not processes or jax.process_index() in processes else ()


def warn_if_passed(steps: tuple[int, ...], step: int, run: RunDirectory) -> None:
    """Warns if a run that continues from `step` has passed the steps to profile, and no start has
    profiled them."""
    if steps and step >= steps[1] and not run.has_profile(session_of(steps)):
        warn(
            f"logging.profile_steps: found {list(steps)}, but the run continues from step {step}, "
            "so nothing is profiled; later steps would work"
        )


class Profiler:
    """Captures the run's steps from `steps[0]` to `steps[1]`; each process captures its devices.

    Args:
      keep: called with the name in RUN/profile and the content of each file of the profile.
      steps: the first and the last step, counted from 1; () captures nothing.
      outside: makes a context for starting and writing, whose time counts for no step.
    """

    def __init__(
        self,
        keep: Callable[[str, bytes], object],
        steps: tuple[int, ...],
        outside: Callable[[], AbstractContextManager],
    ) -> None:
        self._keep, self._steps, self._outside = keep, steps, outside
        self._running = contextlib.ExitStack()
        self._scratch: Path | None = None

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """The context of step `number`, counted from 1; the profile shows the number."""
        if self._steps and not self._scratch and self._steps[0] <= number <= self._steps[1]:
            with self._outside():
                self._scratch = self._running.enter_context(scratch_folder())
                jax.profiler.start_trace(str(self._scratch))
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            yield
        if self._scratch and number >= self._steps[1]:
            self.close()

    def close(self) -> None:
        """Ends a running capture and keeps it, all processes' in one session."""
        if not self._scratch:
            return
        with self._outside(), self._running:
            jax.profiler.stop_trace()
            session = session_of(self._steps)
            # Processes on one host would write the same file.
            prefix = f"process{jax.process_index()}." if jax.process_count() > 1 else ""
            for path in sorted(self._scratch.glob(f"{SESSIONS}/*/*")):
                self._keep(f"{session}/{prefix}{path.name}", path.read_bytes())
        self._scratch = None

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

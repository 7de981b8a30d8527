"""Profiles of chosen steps: device and host timelines for TensorBoard, XProf or Perfetto."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import jax

from data.folders import scratch_folder

# Where TensorBoard and XProf look in RUN/profile: a session with a file per host.
SESSIONS = "plugins/profile"


def session_of(steps: tuple[int, ...]) -> str:
    """Returns the folder in RUN/profile of a profile of these steps, the first and the last one."""
    return f"{SESSIONS}/steps_{steps[0]}_{steps[1]}"


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

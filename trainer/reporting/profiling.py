"""Profiles of chosen steps: device and host timelines for TensorBoard, XProf or Perfetto."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import jax


class Profiler:
    """Captures the run's steps from `steps[0]` to `steps[1]`; each process its devices.

    Args:
      folder: of the profile.
      steps: the first and the last step, counted from 1; () captures nothing.
      outside: makes a context for starting and writing, whose time belongs to no step.
    """

    def __init__(
        self, folder: Path, steps: tuple[int, ...], outside: Callable[[], AbstractContextManager]
    ) -> None:
        self._folder, self._steps, self._outside, self._running = folder, steps, outside, False

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """The context of step `number`, counted from 1; the profile shows the number."""
        if self._steps and not self._running and self._steps[0] <= number <= self._steps[1]:
            with self._outside():
                jax.profiler.start_trace(str(self._folder))
            self._running = True
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            yield
        if self._running and number >= self._steps[1]:
            self.close()

    def close(self) -> None:
        """Ends a running capture, and writes it."""
        if self._running:
            self._running = False
            with self._outside():
                jax.profiler.stop_trace()

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

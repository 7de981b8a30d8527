"""A profile of chosen steps: what each device and the host did when, for TensorBoard, XProf or Perfetto."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import jax


class Profiler:
    """Captures the steps from `steps[0]` to `steps[1]` into `folder`; nothing where `steps` is empty.

    Each process captures what its own devices did. A run that begins or ends within the steps captures what it has of them.
    outside: a context for the time that beginning and writing take, which is no step's.
    """

    def __init__(self, folder: Path, steps: tuple[int, ...], outside: Callable[[], AbstractContextManager]) -> None:
        self._folder, self._steps, self._outside, self._running = folder, steps, outside, False

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around the work of step `number` (from 1), by which the profile calls it."""
        if self._steps and not self._running and self._steps[0] <= number <= self._steps[1]:
            with self._outside():
                jax.profiler.start_trace(str(self._folder))
            self._running = True
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            yield
        if self._running and number >= self._steps[1]:
            self.close()

    def close(self) -> None:
        """Writes what was captured, if anything is being captured."""
        if self._running:
            self._running = False
            with self._outside():
                jax.profiler.stop_trace()

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

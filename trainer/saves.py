"""When a run saves its state, and whether there is time to after a notice to end."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from data.errors import first_line

from .checkpoint.clock import SaveClock
from .checkpoint.saving import SaveError
from .reporting.metrics_log import MetricsLog
from .run.watchdog import Watchdog
from .state import TrainingState

LONG_WAIT = 1.0  # seconds of waiting for the previous save after which the log says so


class Saves:
    """Saves a run's state: in the run's folder, and on the hosts if `checkpoint.local` is given.

    Args:
      log: of the run, which each checkpoint records and which says what a save waits for.
      assets: folder of the files that each checkpoint gets too, such as the tokenizer's.
    """

    def __init__(
        self, state: TrainingState, watchdog: Watchdog, log: MetricsLog, assets: Path
    ) -> None:
        self.state, self.watchdog, self.log, self.assets = state, watchdog, log, assets
        self.config, self.store, self.local = state.config.checkpoint, state.store, state.local
        self.clock = SaveClock(self.config.minutes)
        self._step = 0  # of the last save
        self._failed = False  # the save before the last one

    def due(self) -> bool:
        """Returns whether to save now. Every process calls this after every step."""
        return self.clock.due(self.state.step) or self.state.due(self.config.every)

    def save(self, logged: dict[str, Any] | None = None, is_last: bool = False) -> None:
        """Starts to save a checkpoint of the state.

        Args:
          logged: `log.logged` as the next start will find it, if not as it is now.
          is_last: whether the process ends after it, so that it is tried whatever failed before.

        Raises:
          UserError: a parameter is not finite.
          SaveError: the previous save failed; see `_end_previous`.
        """
        self.state.require_finite()
        self._wait(lambda: self._end_previous(is_last), "checkpoint", "every or a faster store")
        self._step = self.state.step
        self.store.protected = self.state.best.step
        self.clock.saved()
        self.store.save(
            self.state.step,
            model=self.state.saved_params,
            optimizer=self.state.optimizer_state,
            data=self.state.saved_data(self.log.logged if logged is None else logged),
            assets=self.assets,
            shapes=self.state.objective.model.unpadded_shapes,
        )

    def _end_previous(self, is_last: bool) -> None:
        """Waits for the previous save. If it failed for a reason that may have passed, this one
        takes its place, unless the one before failed too; the last one does even then."""
        try:
            self.store.wait()
        except SaveError as error:
            if not error.may_pass or (self._failed and not is_last):
                raise
            self._failed = True
            self.state.best.forget(self._step, self.state.step)
            self.log.say(f"step {self.state.step}: {first_line(error)}; saving this step instead")
        else:
            self._failed = False

    def save_locally(self) -> None:
        """Starts to save a local checkpoint, if one is due; the last step has no need of one.

        Raises:
          UserError: a parameter is not finite.
        """
        if (
            self.local is None
            or self.state.finished
            or self.state.step % self.config.local_every != 0
        ):
            return
        self.state.require_finite()
        self._wait(self.local.wait, "local checkpoint", "local_every")
        self.local.save(
            self.state.step,
            self.state.saved_params,
            self.state.optimizer_state,
            self.state.saved_data(self.log.logged),
        )

    def _wait(self, wait: Callable[[], None], what: str, higher: str) -> None:
        """Waits for the previous save, which may still be removing old ones; says so if it takes
        long."""
        start = time.monotonic()
        with self._saving():
            wait()
        if (seconds := time.monotonic() - start) >= LONG_WAIT:
            self.log.say(
                f"step {self.state.step}: waited {seconds:.1f} s for the previous {what}; a higher "
                f"checkpoint.{higher} would avoid this"
            )

    def wait(self) -> None:
        """Waits until the newest checkpoints count, in the run's folder and on the hosts."""
        with self._saving():
            self.store.wait()
            if self.local is not None:
                self.local.wait()

    def _saving(self) -> AbstractContextManager[None]:
        return self.watchdog.phase("saving", self.state.config.distributed.save_minutes)

    def no_time_to_finish(self) -> str | None:
        """Returns why a SIGTERM now would end the run within its step; None if there is time.

        Called from a thread other than the loop's. Waits for a save that is under way.
        """
        grace, begun = self.config.grace_seconds, time.monotonic()
        step_seconds = self.watchdog.step_seconds_left()
        if not grace or step_seconds is None or step_seconds + self.store.save_seconds <= grace:
            return None
        needed = step_seconds + self.store.save_seconds
        self.store.wait_at_most(grace - (time.monotonic() - begun))
        return (
            f"preempted (SIGTERM): step {self.state.step + 1} was not finished, since it and its "
            f"checkpoint need about {needed:,.0f} s more and checkpoint.grace_seconds is "
            f"{grace:g}; the same command resumes the run from {self._newest()}"
        )

    def _newest(self) -> str:
        """Names what a start would go on from."""
        newest, local = max(self.store.steps(), default=0), (self.local and self.local.newest) or 0
        if local > newest:
            return f"the local checkpoint of step {local}"
        return str(self.store.path(newest)) if newest else "its beginning"

"""What a run does about a loss, a gradient or a parameter that is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from data.errors import UserError

from .checkpoint.store import CheckpointStore
from .config.schema import TrainConfig
from .objective import Objective, Params
from .run.cluster import warn
from .step import StepMetrics

SHOWN_RECORDS = 20  # of a step with a non-finite loss


class FiniteSteps:
    """Counts the steps whose loss and gradient were finite, and refuses or skips the others.

    Attributes:
      updates: steps without skipped ones.
      skipped: steps since the last update.
      last_finite_step: the last one after which the loss was still finite.
    """

    def __init__(
        self,
        config: TrainConfig,
        objective: Objective,
        store: CheckpointStore,
        data: Mapping[str, Any],
    ) -> None:
        """Goes on from a checkpoint's data; {} begins."""
        self.config, self.objective, self.store = config, objective, store
        self.updates, self.skipped = data.get("updates", 0), data.get("skipped", 0)
        self.last_finite_step = data.get("step", 0) - 1

    @property
    def data(self) -> dict[str, int]:
        """What a checkpoint holds."""
        return {"updates": self.updates, "skipped": self.skipped}

    def count(self, step: int, metrics: StepMetrics) -> None:
        """Counts the step that follows `step` finished ones, by its metrics.

        Raises:
          UserError: the run should stop at a step that is not finite.
        """
        if self._is_finite(step, metrics):
            self.updates, self.skipped, self.last_finite_step = self.updates + 1, 0, step
        else:
            self.skipped += 1

    def _is_finite(self, step: int, metrics: StepMetrics) -> bool:
        """Returns whether loss and gradient are finite; otherwise reports the step and its records.

        Raises:
          UserError: the run should stop at such a step.
        """
        values = {
            self.objective.loss_name: float(metrics.loss),
            "grad_norm": float(metrics.grad_norm),
        }
        not_finite = [
            f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)
        ]
        if not not_finite:
            return True
        records = self.objective.record_ids(step)
        more = f" and {len(records) - SHOWN_RECORDS:,} more" if len(records) > SHOWN_RECORDS else ""
        problem = (
            f"step {step + 1}: {' and '.join(not_finite)}; its records are "
            f"{', '.join(records[:SHOWN_RECORDS])}{more}"
        )
        if self.config.non_finite == "stop":
            raise UserError(
                f"{problem}; {self._sound_checkpoints()}: fix those records or lower "
                "optimizer.learning_rate in another --run_dir, or give --train.non_finite skip "
                "to skip such steps"
            )
        warn(f"{problem}; skipped, the parameters are unchanged")
        return False

    def require_trained(self, step: int) -> None:
        """Raises UserError if steps were skipped to the end, so that nothing good was trained."""
        if step > 0 and self.updates == 0:
            raise UserError(
                f"{self.store.path(step)}: all {step} steps were skipped, since no loss "
                "or gradient was finite; nothing was trained: see the records in the warnings, "
                "or lower optimizer.learning_rate, in another --run_dir"
            )
        if self.skipped and not self.objective.has_held_out:  # no loss tells that it is good
            last = (
                f"the last {self.skipped} steps were" if self.skipped > 1 else "the last step was"
            )
            raise UserError(
                f"{self.store.path(step)}: {last} skipped, since no loss or gradient was "
                f"finite; {self._sound_checkpoints()}: evaluate this one, or lower "
                "optimizer.learning_rate in another --run_dir"
            )

    def require_finite(self, step: int, params: Params) -> None:
        """Raises UserError if a trained parameter is not finite: the update overflowed."""
        name = next((name for name, x in params.items() if not _is_finite(x)), None)
        if name is not None:
            raise self.unsound(step, f"{name} is not finite after the update")

    def unsound(self, step: int, problem: str) -> UserError:
        """Returns the error for a problem that keeps the run from being saved after `step`."""
        return UserError(
            f"step {step}: {problem}, so nothing is saved; {self._sound_checkpoints()}: "
            "lower optimizer.learning_rate in another --run_dir"
        )

    def _sound_checkpoints(self) -> str:
        """Says which checkpoints gave a finite loss in the step after them."""
        sound = [step for step in self.store.steps() if step <= self.last_finite_step]
        if not sound:
            return "no checkpoint is known to be good"
        return f"{self.store.path(sound[-1])} is good"


def _is_finite(array: jax.Array) -> bool:
    """Whether an array is finite; in host memory, this process's part of it."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return True
    if array.sharding.memory_kind == "pinned_host":
        return all(
            bool(np.isfinite(np.asarray(shard.data, np.float32)).all())
            for shard in array.addressable_shards
        )
    return bool(_all_finite(array))


@jax.jit
def _all_finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(array).all()

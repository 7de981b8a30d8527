"""A run's best checkpoint by a metric of its evaluations, and early stopping."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from data.errors import UserError

from .config.schema import CheckpointConfig, RunConfig
from .run.identity import changed_setting, evaluation_called


@dataclasses.dataclass
class BestCheckpoint:
    """The best measurement so far. Checkpoints hold it, so that a resumed run knows it.

    Attributes:
      config: names the metric, the better direction, and the patience.
      measured_by: the settings of the evaluation that measures the metric, see `_measuring`.
      step, value: the best measurement; None before the first.
      waited: measurements since the best.
      is_measured: whether some evaluation measures the metric.
      before: the step and value of the previous best.
      last: the step and value of the last measurement.
      forgotten: which earlier best is no longer kept, and why; "" for none.
    """

    config: CheckpointConfig
    measured_by: Mapping[str, Any] | None = None
    step: int | None = None
    value: float | None = None
    waited: int = 0
    is_measured: bool = False
    before: tuple[int | None, float | None] = dataclasses.field(default=(None, None), compare=False)
    last: tuple[int | None, float] = dataclasses.field(default=(None, math.nan), compare=False)
    forgotten: str = dataclasses.field(default="", compare=False)

    @classmethod
    def of(cls, config: RunConfig, data: Mapping[str, Any]) -> BestCheckpoint:
        """Reads a checkpoint's data; begins without a measurement if they have none, or one of
        something else than `checkpoint.best` names now."""
        saved, best = data.get("best") or {}, cls(config.checkpoint, _measuring(config))
        step, metric = saved.get("step"), config.checkpoint.best
        if (saved.get("metric"), saved.get("is")) != (metric, config.checkpoint.best_value):
            now = f"is {metric} ({config.checkpoint.best_value})" if metric else "is not given"
            why = f"checkpoint.best {now} now"
        # Earlier releases did not record it.
        elif _differ(saved.get("measured_by", best.measured_by), best.measured_by):
            why = f"evaluations: what measures {metric} has changed"
        else:
            best.step, best.value, best.waited = step, saved["value"], saved["waited"]
            best.is_measured = "measured_by" in saved or best.measured_by is not None
            return best
        if step is not None:
            best.forgotten = (
                f"the best by {saved['metric']} so far, step {step}, is no longer kept: {why}"
            )
        return best

    @property
    def data(self) -> dict[str, Any]:
        """The data a checkpoint holds; empty if no metric is named."""
        if self.config.best is None:
            return {}
        return {
            "best": {
                "metric": self.config.best,
                "is": self.config.best_value,
                "measured_by": self.measured_by,
                "step": self.step,
                "value": self.value,
                "waited": self.waited,
            }
        }

    @property
    def exhausted(self) -> bool:
        """Whether to end the run: no measurement within its patience was better."""
        return 0 < self.config.patience <= self.waited

    @property
    def why(self) -> str:
        """Why the run's patience is exhausted."""
        name, better = self.config.best, self.config.best_value
        if self.value is None:
            return f"{name} was never a finite number in {self.waited} measurements"
        return (
            f"{name} was {better} at step {self.step} ({self.value:.6g}), "
            f"{self.waited} measurement{'s' * (self.waited > 1)} ago"
        )

    @property
    def to_be_checked(self) -> bool:
        """Whether the metric has not been measured yet, as after resuming with another metric."""
        return self.config.best is not None and not self.is_measured

    def would_end(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether a step's metrics exhaust the patience; changes nothing."""
        after = dataclasses.replace(self)
        after.update(step, metrics)
        return after.exhausted

    def update(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Takes a step's metrics; returns whether they contain a new best, which a non-finite value
        never is."""
        if self.config.best is None or self.config.best not in metrics:
            return False
        self.is_measured = True
        value = float(metrics[self.config.best])
        self.last = step, value
        if not self._is_better(value):
            self.waited += 1
            return False
        self.before = self.step, self.value
        self.step, self.value, self.waited = step, value, 0
        return True

    def _is_better(self, value: float) -> bool:
        sign = 1 if self.config.best_value == "lowest" else -1
        return math.isfinite(value) and (self.value is None or sign * value < sign * self.value)

    def warning_on_resuming(self, config: RunConfig) -> str | None:
        """Returns what has changed since the checkpoint, if the best one is not kept any more or
        is always the last step; None otherwise.

        Raises:
          UserError: as `require`.
        """
        if self.forgotten or not self.is_measured or self.measured_by is None:
            return self.forgotten or None
        return self.require({self.config.best or "": _steps_between(config)}, config.train.steps)

    def forget(self, step: int, instead: int) -> None:
        """Returns to the previous best if `step`, whose checkpoint could not be saved, is the best.

        Args:
          instead: the step that is saved now, which may be better than that.
        """
        if self.step != step:
            return
        self.step, self.value = self.before
        measured, value = self.last
        if measured == instead and self._is_better(value):
            self.step, self.value, self.waited = instead, value, 0

    def require(self, measured: Mapping[str, int], steps: int) -> str | None:
        """Refuses a metric that no evaluation measures, or that cannot end the run early.

        Args:
          measured: the names of all evaluations' metrics, and the steps between measurements.
          steps: of the run.

        Returns:
          A warning if the best is always the last step; or None.

        Raises:
          UserError: lists the available metrics, or names the field that measures more often.
        """
        name, patience = self.config.best, self.config.patience
        self.is_measured = True
        if name is None:
            return None
        if name not in measured:
            raise UserError(
                f"checkpoint.best: found {name!r}, which no evaluation measures; available: "
                f"{', '.join(sorted(measured)) or 'none, without held-out data and evaluations'}"
            )
        if 0 < measured[name] < steps:
            return None
        rarely = f"{name} is measured only before the first and after the last step"
        is_loss = name.startswith("held_out_")
        every = max(1, steps // 10)
        more = f"--train.evaluate_every {every}" if is_loss else f"`every: {every}` in its entry"
        if patience and not measured[name]:
            raise UserError(
                f"checkpoint.patience: found {patience}, but {rarely}; {more} would work"
            )
        return (
            f"checkpoint.best: {rarely}, so the last step is the best"
            f"{' and the run never ends early' if patience else ''}; {more} would measure it more "
            "often"
        )


def _entry(config: RunConfig) -> Mapping[str, Any] | None:
    """Returns the entry of `evaluations` that measures checkpoint.best; None if none does."""
    name = (config.checkpoint.best or "").partition("/")[0]
    return evaluation_called(name, config.evaluations)


def _measuring(config: RunConfig) -> dict[str, Any] | None:
    """Returns the settings of what measures checkpoint.best, in JSON: {} for held-out data, whose
    fingerprint checkpoints have anyway; None if nothing does."""
    if (entry := _entry(config)) is not None:
        return json.loads(json.dumps(entry))
    return {} if (config.checkpoint.best or "").startswith("held_out_") else None


def _differ(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> bool:
    """Returns whether two of `_measuring` measure different things."""
    if old is None or new is None:
        return old is not new
    return changed_setting(old, new) is not None


def _steps_between(config: RunConfig) -> int:
    """Returns the steps between measurements of checkpoint.best."""
    entry = _entry(config)
    return config.train.evaluate_every if entry is None else int(entry.get("every", 0))

"""What a run has trained so far: begun at step 0, or restored from its newest good checkpoint."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

import jax

from data.errors import UserError

from .best import BestCheckpoint
from .build import run_notes
from .checkpoint.items import Restored
from .checkpoint.local_tier import LocalTier
from .checkpoint.store import CheckpointStore
from .config.schema import RunConfig
from .finite import FiniteSteps
from .objective import Objective, Params
from .run.cluster import warn
from .run.versions import difference, versions
from .step import StepBuilder


class TrainingState:
    """One process's arrays and counters of a run, which `restore_or_begin` sets.

    Attributes:
      trainable, frozen: the parameters that are trained, and the others.
      optimizer_state: moments and counters.
      step: number of finished steps.
      tokens_seen: tokens of the finished steps, without padding.
      rows_left_out: rows before the next batch that were not trained, since the run was extended
        after a last step that had only some of a batch's rows.
      logged: the newest checkpoint's record of the logs.
      evaluated: whether the evaluations that are due after `step` have been done.
      shortened: whether the restored step has become the last one, so that its evaluations are due.
      only_local: whether the run's folder has no checkpoint of the restored step.
      finite: which steps had a finite loss.
      best: the best measurement so far, and how many measurements ago.
    """

    def __init__(
        self,
        config: RunConfig,
        objective: Objective,
        builder: StepBuilder,
        store: CheckpointStore,
        local: LocalTier | None,
    ) -> None:
        self.config, self.objective, self.builder = config, objective, builder
        self.store, self.local = store, local

    def restore_or_begin(self) -> None:
        """Restores the newest good checkpoint, local or in the run's folder, or begins at step
        0."""
        self.trainable: Params = {}  # frees the arrays of an earlier call
        self.frozen: Params = {}
        self.optimizer_state: Any = None
        self.shortened = self.only_local = False
        self._seen = self._saved_so_far()
        steps, _ = self._seen
        if self._restore_local(after=max(steps, default=0)):
            return
        newest = self.store.latest_good(meanwhile=True)
        # The newest one in the folder may be damaged, and a local one older than it.
        if steps and newest != steps[-1] and self._restore_local(after=newest or 0):
            return
        if newest is None:
            self._begin()
        else:
            restored = self.store.restore(
                newest, self.builder.abstract_saved, self.builder.abstract_optimizer
            )
            self._resume_from(restored, str(self.store.path(newest)))

    def catch_up(self) -> bool:
        """Restores again if another process has saved since; returns whether one has."""
        behind = self._saved_so_far() != self._seen
        if behind:
            self.restore_or_begin()
        return behind

    @property
    def finished(self) -> bool:
        """Whether no step and no evaluation is left, or the run's patience is exhausted."""
        no_step_left = self.step >= self.config.train.steps
        return self.best.exhausted or (no_step_left and not self.shortened)

    def due(self, every: int) -> bool:
        """Whether something done every `every` steps, and after the last one, is due now."""
        return self.step == self.config.train.steps or (every > 0 and self.step % every == 0)

    def require_finite(self) -> None:
        """Raises UserError if a trained parameter is not finite: the update overflowed."""
        self.finite.require_finite(self.step, self.trainable)

    @property
    def params(self) -> Params:
        """All parameters."""
        return {**self.trainable, **self.frozen}

    @property
    def saved_params(self) -> Params:
        """The parameters that checkpoints hold."""
        return self.trainable if self.builder.saves_trainable_only else self.params

    def saved_data(self, logged: dict[str, Any]) -> dict[str, Any]:
        """Returns what checkpoints say of the run's progress, with their record of the logs."""
        return {
            "step": self.step,
            "steps": self.config.train.steps,
            **self._fingerprints,
            "inputs": self.objective.inputs,
            "evaluated": self.evaluated,
            **self.finite.data,
            "tokens_seen": self.tokens_seen,
            "rows_seen": self.rows_seen,
            "wall_seconds": self.wall_seconds,
            "logged": logged,
            "versions": versions(),
            **self.best.data,
        }

    @property
    def rows_seen(self) -> int:
        """The rows of the finished steps."""
        return self.objective.rows_taken(self.step) - self.rows_left_out

    def start_clock(self) -> None:
        """Counts the run's seconds of training from now on."""
        self._started = time.monotonic()

    @property
    def wall_seconds(self) -> float:
        """The run's seconds of training, over all its starts."""
        return self._earlier_seconds + time.monotonic() - self._started

    def say(self, text: str) -> None:
        """Prints a line before there is a progress bar."""
        if self.config.logging.console and jax.process_index() == 0:
            print(text, file=sys.stderr)

    def _saved_so_far(self) -> tuple[list[int], dict[str, Any]]:
        """Returns the steps of all checkpoints in the run's folder, and its record of local
        ones."""
        local = {} if self.local is None else self.local.recorded()
        return self.store.steps_for_all(), local

    def _begin(self) -> None:
        params = self.builder.stored(self.objective.read_params())
        self.optimizer_state = self.builder.init_optimizer(
            {name: params[name] for name in self.builder.trainable}
        )
        self._set_params(self._placed(params))
        self._set_progress({})
        self.say(
            "\n".join(
                (self.builder.saved_size, *run_notes(self.config, self.objective.model.config))
            )
        )

    def _restore_local(self, after: int) -> bool:
        """Restores the newest local checkpoint after a step, if there is a usable one."""
        if self.local is None:
            return False
        abstract = self.builder.abstract_saved, self.builder.abstract_optimizer
        restored = self.local.restore(*abstract, after)
        self.say(self.local.describe(*abstract, self.config.checkpoint.local_every))
        if restored is None:
            return False
        best = BestCheckpoint.of(self.config, restored.data).step
        if best not in (None, restored.step, *self._seen[0]):
            warn(
                f"{self.local.folder}: the local checkpoint of step {restored.step} is not used, "
                f"since saving the best one, of step {best}, had not ended"
            )
            return False
        self.only_local = True
        self._resume_from(restored, f"local checkpoint, {self.local.folder}")
        return True

    def _resume_from(self, restored: Restored, path: str) -> None:
        """Resumes from a checkpoint's state; `path` names it."""
        data = restored.data
        self._check_fingerprints(data, path)
        if change := difference(data.get("versions", versions())):
            warn(
                f"{path}: was written with {change}; the run continues, but may not repeat bit by "
                "bit what that code would have computed"
            )
        base = (
            self._placed(self.objective.read_params()) if self.builder.saves_trainable_only else {}
        )
        self._set_params({**base, **restored.model})
        self.optimizer_state = restored.optimizer
        self._set_progress(data)
        self._say_resumed(path)

    def _set_progress(self, data: Mapping[str, Any]) -> None:
        """Sets everything but the arrays from a checkpoint's data; {} begins."""
        self.step, last = data.get("step", 0), self.config.train.steps
        self.evaluated = data.get("evaluated", False)
        self.shortened = self.step == last < data.get("steps", 0)
        self.finite = FiniteSteps(self.config.train, self.objective, self.store, data)
        self.tokens_seen = data.get("tokens_seen", 0)
        self._earlier_seconds = data.get("wall_seconds", 0.0)
        # Earlier releases filled every batch.
        rows_seen = data.get("rows_seen", self.step * self.config.train.batch_size)
        self.rows_left_out = self.objective.rows_taken(self.step) - rows_seen
        self.logged: dict[str, Any] = data.get("logged", {})
        self.best = BestCheckpoint.of(self.config, data)
        self.store.protected = self.best.step

    def _say_resumed(self, path: str) -> None:
        """Says where the run stands, and what has changed since the checkpoint.

        Raises:
          UserError: as `BestCheckpoint.require`.
        """
        if not self.finished and (warning := self.best.warning_on_resuming(self.config)):
            warn(f"{path}: {warning}")
        if self.best.exhausted:
            self.say(
                f"already stopped at step {self.step}: {self.best.why}; a higher "
                "checkpoint.patience continues it"
            )
        elif self.finished:
            self.say(f"already trained to step {self.step}")
        else:
            self.say(f"continuing from step {self.step} ({path})")
        is_extended = self.config.train.epochs is not None or not self.finished
        if self.rows_left_out > 0 and is_extended:
            warn(
                f"{path}: the run was extended after a last step that took only the rows left of "
                f"its epochs: the other {self.rows_left_out} rows of that batch are not trained on"
            )

    def _check_fingerprints(self, saved: dict[str, Any], path: str) -> None:
        """Raises UserError if the checkpoint's data, initial parameters or other inputs were
        different."""
        remedy = "give the files that the run began with, or another --run_dir"
        for name, current in self._fingerprints.items():
            if saved.get(name, current) != current:
                reason = (
                    "was trained on other data, or on text that earlier rules made of these data"
                    if name == "fingerprint"
                    else "began with another model"
                )
                raise UserError(
                    f"{path}: {reason} (fingerprint {saved[name]}, now {current}); {remedy}"
                )
        for name, fields in saved.get("inputs", {}).items():
            now = self.objective.inputs.get(name, {})
            for field in fields.keys() & now.keys():  # releases may add some
                if fields[field] != now[field]:
                    raise UserError(
                        f"{path}: began with another {name} ({field} {fields[field]}, now "
                        f"{now[field]}); {remedy}"
                    )

    @property
    def _fingerprints(self) -> dict[str, str]:
        """A checkpoint's fingerprints of the run's input files."""
        return {"fingerprint": self.objective.fingerprint, "model": self.objective.origin}

    def _placed(self, params: Params) -> Params:
        """Moves the parameters to the memory, device or host, where the step expects them."""
        return {
            name: jax.device_put(x, self.builder.abstract_params[name].sharding)
            for name, x in params.items()
        }

    def _set_params(self, params: Params) -> None:
        self.trainable = {name: params[name] for name in self.builder.trainable}
        self.frozen = {name: x for name, x in params.items() if name not in self.trainable}

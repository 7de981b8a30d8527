"""The training loop: resumes a run, takes its remaining steps, logs, evaluates and saves."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from data.folders import named_errors
from model.quantized_weights import weight_of

from .checkpoint.local_tier import LocalTier
from .checkpoint.store import CheckpointStore
from .config.checks import peak_warning
from .config.schema import RunConfig
from .evaluation import Evaluation
from .mesh import make_mesh
from .objective import AUXILIARY, BY_SOURCE, DeviceBatch, HostBatch, Objective
from .reporting.boards import import_wandb
from .reporting.meter import Meter
from .reporting.metrics_log import MetricsLog
from .reporting.profiling import Profiler, check_processes, profiled_here, warn_if_passed
from .run.cluster import barrier, first_then_others, require_same, warn
from .run.directory import RunDirectory
from .run.identity import shared_fields
from .run.logs import replace_file
from .run.notices import notices
from .run.opening import check_run, open_run
from .run.preemption import Interrupted, Preempted, interruptible
from .run.versions import require_same_code, versions
from .run.watchdog import Watchdog
from .saves import Saves
from .state import TrainingState
from .step import StepBuilder, StepMetrics


def train(
    config: RunConfig,
    make_objective: Callable[[RunConfig, Mesh], Objective],
    evaluations: Sequence[Evaluation] = (),
    stage_follows: bool = False,
) -> Path:
    """Trains a run to its last step on devices that are started, resuming from its newest
    checkpoint if it has one.

    Args:
      make_objective: creates the objective on the devices' mesh.
      evaluations: run during training, in this order.
      stage_follows: whether another run starts when this one returns; if so, a preemption notice
        during or after the last step still raises Preempted.

    Returns:
      The folder of the last checkpoint.

    Raises:
      UserError, ValueError: a problem that the user can fix, in one line.
      Preempted: SIGTERM or Ctrl-C ended training; its last step is saved.
    """
    config, objective = _open_inputs(config, make_objective)
    with (
        contextlib.ExitStack() as lock,  # released last: closing the store waits for a save
        CheckpointStore(config.location, keep=config.checkpoint.keep) as store,
        contextlib.closing(Watchdog(config.distributed)) as watchdog,
        _local_tier(config, objective.model.mesh) as local,
    ):
        builder = StepBuilder.of(
            config, objective.model, objective.loss, objective.abstract_batch(), objective.totals
        )
        state = TrainingState(config, objective, builder, store, local)
        state.restore_or_begin()
        training = _Training(state, evaluations, watchdog)
        training.compile()
        # The folder is claimed only now: if the data, the model or the step is rejected, another
        # attempt may still use it.
        with named_errors(config.folder):
            run = training.claim_folder(lock)
            return training.run(run, stage_follows)


def _open_inputs(
    config: RunConfig, make_objective: Callable[[RunConfig, Mesh], Objective]
) -> tuple[RunConfig, Objective]:
    """Opens the model and the data, and compares the processes.

    Returns:
      The configuration with its number of steps, and the objective.

    Raises:
      UserError, ValueError: see `train`.
    """
    require_same_code()
    check_processes(config.logging)
    if config.logging.wandb:
        import_wandb()  # reports a missing package now, not after an hour of preparing data
    mesh = make_mesh(config.mesh, schedule=config.attention.schedule)
    check_run(config, jax.process_index() == 0, steps_known=config.train.epochs is None)
    objective = make_objective(config, mesh)
    config = dataclasses.replace(config, train=objective.config.train)  # with its steps
    if config.train.epochs is not None:  # before compiling: the run there may have another length
        check_run(config, jax.process_index() == 0)
    if warning := peak_warning(config):
        warn(warning)
    require_same(
        {
            "the model's fingerprint": objective.origin,
            "the data's fingerprint": objective.fingerprint,
            **{f"the model's {name}": value for name, value in objective.inputs.items()},
            **shared_fields(config),
        }
    )
    return config, objective


def _local_tier(
    config: RunConfig, mesh: Mesh
) -> contextlib.AbstractContextManager[LocalTier | None]:
    """Returns the open checkpoints on the hosts, which the context closes; None without
    `checkpoint.local`."""
    if not config.checkpoint.local:
        return contextlib.nullcontext()
    return contextlib.closing(
        LocalTier(config.checkpoint.local, config.folder, config.location, mesh)
    )


class _Training:
    """Advances a run's state: compiles, takes steps, logs, evaluates and saves.

    Attributes:
      log, profiler, saves: open while `run` takes steps.
      get_notice: returns the signal that asks the run to end, see `run.notices`.
    """

    log: MetricsLog
    profiler: Profiler
    saves: Saves
    get_notice: Callable[[], signal.Signals | None]

    def __init__(
        self, state: TrainingState, evaluations: Sequence[Evaluation], watchdog: Watchdog
    ) -> None:
        self.state, self.evaluations, self.watchdog = state, evaluations, watchdog
        self.config, self.objective = state.config, state.objective
        self.store, self.local = state.store, state.local
        self.compiled_step: jax.stages.Compiled | None = None
        model = self.objective.model
        self.meter = Meter(
            model.config,
            model.mesh.devices.flat,
            mask=model.mask,
            frozen={weight_of(name) for name in model.parameters} - set(state.builder.trainable),
        )

    def compile(self) -> None:
        """Compiles the step and prepares evaluations, unless already done or no steps remain."""
        if self.state.finished or self.compiled_step is not None:
            return
        with (
            self.meter.compiling(),
            self.watchdog.phase("compiling", self.config.distributed.compile_minutes),
        ):
            # Lowering takes seconds and raises most configuration errors.
            lowered = self.state.builder.lower_train()
            count = self.objective.model.mesh.size
            self.state.say(f"compiling for {count} device{'s' if count > 1 else ''}")
            self.compiled_step = lowered.compile()
            for evaluation in self.evaluations:
                evaluation.prepare(self.objective, self.state.builder)
            barrier("compiled")

    def claim_folder(self, lock: contextlib.ExitStack) -> RunDirectory:
        """Locks the run's folder, which `lock` releases, and writes the configuration there;
        restores again if another process trained this run before this one took the lock."""
        run = first_then_others(
            lambda message: open_run(self.config, message is None, lock), lambda run: ""
        )
        self.store.before = run.before_checkpoint
        if self.state.catch_up():
            self.compile()
        if self.local is not None:
            self.local.before = run.before_checkpoint
            self.local.claim()
        return run

    def run(self, run: RunDirectory, stage_follows: bool) -> Path:
        """Trains to the last step and returns its checkpoint's folder.

        Raises:
          Preempted: see `train`.
        """
        state = self.state
        if state.finished and not state.only_local:
            state.finite.require_trained(state.step)
            return self.store.path(state.step)
        steps = profiled_here(self.config.logging)
        with (
            self._open_log(run) as self.log,
            Profiler(run.keep_profile, steps, self.meter.paused) as self.profiler,
        ):
            # Now: the initial model's files may be gone by the time a checkpoint is saved.
            if jax.process_index() == 0:
                self._write_files(run)
                warn_if_passed(self.config.logging.profile_steps, state.step, run)
            # Notices are not caught: nothing to save yet.
            is_best = not state.finished and self._evaluate_before_training()
            self.saves = Saves(state, self.watchdog, self.log, run.assets)
            with notices(self.saves.no_time_to_finish) as self.get_notice:
                notice = self._take_steps(is_best)
                self._finish()
                if stage_follows and (notice := notice or self.get_notice()):
                    raise Preempted(notice, self.store.path(state.step))
        return self.store.path(state.step)

    def _take_steps(self, is_best: bool) -> signal.Signals | None:
        """Takes the remaining steps, evaluating and saving when due; returns the notice to end that
        came during the last one, if any.

        Args:
          is_best: whether the evaluations before training found a new best, which the restored
            checkpoint does not know.
        """
        state, notice = self.state, None
        state.start_clock()
        no_step_left = state.best.exhausted or state.step >= self.config.train.steps
        if state.only_local:
            unsaved = no_step_left or state.step == state.best.step
        else:  # in a bucket a save first removes the checkpoint that it replaces
            unsaved = no_step_left and is_best and not self.config.in_bucket
        if unsaved:
            self.saves.save()
        if no_step_left:
            return None
        batches = self.objective.batches(state.step)
        self.meter.start()
        batch: DeviceBatch | None = self._next_batch(batches)
        while batch is not None and not state.best.exhausted:
            with self.profiler.step(state.step + 1):
                batch = self._train_step(batch, batches)
            notice = self.get_notice()
            self._evaluate_and_save(notice)
        return notice

    def _next_batch(
        self, batches: Iterator[HostBatch], computed: Future[float] | None = None
    ) -> DeviceBatch:
        """Fetches a batch; time after `computed` (when the running step ends) counts as waiting."""
        with self.meter.waiting_for_data(computed):
            batch = next(batches)
        return self.objective.to_device(batch)

    def _train_step(self, batch: DeviceBatch, batches: Iterator[HostBatch]) -> DeviceBatch | None:
        """Trains on `batch` while fetching the next one; returns that, or None after the last."""
        assert self.compiled_step is not None
        state, last = self.state, self.state.step + 1 >= self.config.train.steps
        self.watchdog.begin_step(state.step + 1)
        state.trainable, state.optimizer_state, metrics = self.compiled_step(
            state.trainable, state.frozen, state.optimizer_state, batch, np.int32(state.step)
        )
        computed = self.meter.when_computed(metrics)
        next_batch = None if last else self._next_batch(batches, computed)
        lengths = self.objective.lengths(state.step)
        shared = self.objective.shared_lengths(state.step)
        metrics = jax.device_get(metrics)  # waits for the step
        state.finite.count(state.step, metrics)
        self.meter.count(lengths, self.objective.tokens_per_batch, shared)
        state.tokens_seen += int(lengths.sum())
        state.step += 1
        if state.due(self.config.train.log_every):
            row = self.meter.read(state.step, **self._named(metrics), **self._progress())
            self.log.train(row, self.meter.seconds_left(state.step, self.config.train.steps))
        return next_batch

    def _evaluate_and_save(self, notice: signal.Signals | None) -> None:
        """Evaluates and saves if due; on a preemption notice, saves at once.

        Raises:
          Preempted: there is a notice and steps remain.
        """
        state, saves = self.state, self.saves
        due, logged, save_is_due = self._due_evaluations(), self.log.logged, saves.due()
        state.evaluated = not due
        steps_remain = state.step < self.config.train.steps
        try:
            if notice and steps_remain:
                raise Interrupted(notice)
            interrupt = self.get_notice if steps_remain else lambda: None
            with self.meter.paused(), interruptible(interrupt):
                is_best = self._evaluate(due)
                saves.save_locally()
                if is_best or state.best.exhausted or save_is_due:
                    saves.save()
        except Interrupted as interrupted:
            # There may be no time for evaluations, so the next start runs them first, and removes
            # what they have logged.
            saves.save(logged, is_last=True)
            saves.wait()
            raise Preempted(interrupted.notice, self.store.path(state.step)) from None

    def _finish(self) -> None:
        """Waits for the last saves, and says where the last and the best checkpoint are."""
        state, best = self.state, self.state.best
        if best.exhausted:
            self.log.say(f"stopped at step {state.step}: {best.why}")
        self.saves.wait()
        if self.local is not None:
            self.local.finish()
        state.finite.require_trained(state.step)
        self.log.say(f"saved {self.store.path(state.step)}")
        if best.step not in (None, state.step):
            self.log.say(
                f"best: {self.store.path(best.step)} ({self.config.checkpoint.best} "
                f"{best.value:.6g})"
            )

    def _open_log(self, run: RunDirectory) -> MetricsLog:
        state = self.state
        return MetricsLog(
            run,
            self.config,
            state.step,
            evaluated=state.evaluated,
            # An earlier start may have logged evaluations of what has become the last step.
            logged=None if state.shortened else state.logged,
            evaluations=[evaluation.name for evaluation in self.evaluations],
            loss_name=self.objective.loss_name,
            write=jax.process_index() == 0,
        )

    def _write_files(self, run: RunDirectory) -> None:
        """Writes the checkpoints' assets and the code's versions to the run's folder."""
        shutil.rmtree(run.assets, ignore_errors=True)
        self.objective.write_assets(run.assets)
        replace_file(run.versions, (json.dumps(versions(), indent=1) + "\n").encode())

    def _progress(self) -> dict[str, float]:
        """Returns the run's progress under the names used in the log."""
        rows = self.objective.rows_per_epoch
        return {
            **({"epoch": self.state.rows_seen / rows} if rows else {}),
            "tokens_seen": self.state.tokens_seen,
            "wall_seconds": self.state.wall_seconds,
        }

    def _named(self, metrics: StepMetrics) -> dict[str, float]:
        """Returns a step's metrics by their names in the log; sources without targets have none."""
        named = {
            self.objective.loss_name: float(metrics.loss),
            self.objective.weight_name: float(metrics.weight),
            "grad_norm": float(metrics.grad_norm),
            "learning_rate": float(metrics.learning_rate),
        }
        by_source = zip(self.objective.sources, map(float, metrics.loss_by_source), strict=True)
        named |= {BY_SOURCE + source: loss for source, loss in by_source if not math.isnan(loss)}
        named |= {AUXILIARY + name: float(loss) for name, loss in metrics.auxiliary.items()}
        measures = {name: float(value) for name, value in metrics.measures.items()}
        # A mean over nothing is NaN.
        return named | {name: x for name, x in measures.items() if not math.isnan(x)}

    def _evaluate_before_training(self) -> bool:
        """Runs all evaluations before the first step, or on resuming those that preemption skipped;
        returns whether `checkpoint.best` has a new best.

        Raises:
          UserError: no evaluation measures the metric that `checkpoint.best` names.
        """
        if self.state.step == 0 or self.state.best.to_be_checked:
            return self._evaluate(self.evaluations)
        if self.state.shortened or not self.state.evaluated:
            # If none is due, all of them.
            return self._evaluate(self._due_evaluations() or self.evaluations)
        return False

    def _due_evaluations(self) -> list[Evaluation]:
        return [evaluation for evaluation in self.evaluations if self.state.due(evaluation.every)]

    def _evaluate(self, evaluations: Sequence[Evaluation]) -> bool:
        """Runs the evaluations, and then all others if these end the run early; returns whether
        `checkpoint.best` has a new best."""
        state, best = self.state, self.state.best
        measured, every = dict[str, float](), dict[str, int]()
        for evaluation in evaluations:
            metrics = self._measure(evaluation)
            measured |= metrics
            every |= dict.fromkeys(metrics, evaluation.every)
        loss_name = f"held_out_{self.objective.loss_name}"
        if state.step > 0 and not math.isfinite(loss := measured.get(loss_name, 0.0)):
            state.require_finite()
            raise state.finite.unsound(state.step, f"{loss_name} is {loss}")
        if state.step > 0 and best.would_end(state.step, measured):
            # Before the best is updated: if it is interrupted, the next start does all of this.
            for evaluation in self.evaluations:
                if evaluation not in evaluations:
                    self._measure(evaluation)
        state.evaluated = True
        # The first call runs all evaluations.
        if best.to_be_checked and (warning := best.require(every, self.config.train.steps)):
            warn(warning)
        return state.step > 0 and best.update(state.step, measured)

    def _measure(self, evaluation: Evaluation) -> dict[str, float]:
        """Runs an evaluation; returns its metrics without answers."""
        with self.watchdog.phase(
            f"evaluating {evaluation.name}", self.config.distributed.evaluate_minutes
        ):
            metrics = evaluation.run(self.state.params, self.state.step)
        if metrics:
            self.log.evaluation(evaluation.name, {"step": self.state.step, **metrics})
        return {name: value for name, value in metrics.items() if not isinstance(value, str)}

"""The training loop: resumes a run, takes its remaining steps, logs, evaluates and saves."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from data.errors import UserError
from data.folders import named_errors
from model.quantized_weights import weight_of

from .config.checks import peak_warning
from .config.schema import RunConfig
from .evaluation import Evaluation
from .mesh import make_mesh, start_devices
from .objective import AUXILIARY, BY_SOURCE, DeviceBatch, HostBatch, Objective
from .reporting.boards import import_wandb
from .reporting.meter import Meter
from .reporting.metrics_log import LogStart, MetricsLog
from .reporting.profiling import Profiler, session_of
from .resources import Resources, open_resources
from .run.cluster import barrier, first_then_others, require_same, warn
from .run.directory import RunDirectory
from .run.identity import shared_fields
from .run.logs import replace_file
from .run.notices import notices
from .run.opening import check_run, open_run
from .run.preemption import Interrupted, Preempted, interruptible
from .run.versions import require_same_code, versions
from .saves import Saves
from .state import TrainingState
from .step import StepBuilder, StepMetrics


def train(
    config: RunConfig,
    make_objective: Callable[[RunConfig, Mesh], Objective],
    evaluations: Sequence[Evaluation] = (),
    stage_follows: bool = False,
) -> Path:
    """Trains a run to its last step, resuming from its newest checkpoint if it has one.

    Args:
      make_objective: creates the objective once the devices are known.
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
    with open_resources(config, objective.model.mesh) as resources:
        training = _Training(config, objective, evaluations, resources)
        training.compile()
        # The folder is claimed only now: if the data, the model or the step is rejected, another
        # attempt may still use it.
        with named_errors(config.folder):
            run = training.claim_folder()
            return training.run(run, stage_follows)


def _open_inputs(
    config: RunConfig, make_objective: Callable[[RunConfig, Mesh], Objective]
) -> tuple[RunConfig, Objective]:
    """Starts the devices, opens the model and the data, and compares the processes.

    Returns:
      The configuration with its number of steps, and the objective.

    Raises:
      UserError, ValueError: see `train`.
    """
    start_devices(config)
    require_same_code()
    _check_profiled(config.logging.profile_processes)
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


def _check_profiled(processes: Sequence[int]) -> None:
    """Raises UserError if one of these processes does not exist."""
    count = jax.process_count()
    if unknown := [process for process in processes if not 0 <= process < count]:
        raise UserError(
            f"logging.profile_processes: found {unknown[0]}; 0 to {count - 1} would work, or []"
        )


class _Session(NamedTuple):
    """What is open while a start takes steps.

    Attributes:
      get_notice: returns the signal that asks the run to end, see `run.notices`.
    """

    log: MetricsLog
    profiler: Profiler
    saves: Saves
    get_notice: Callable[[], signal.Signals | None]


class _Training:
    """Advances a run's state: compiles, takes steps, logs, evaluates and saves."""

    def __init__(
        self,
        config: RunConfig,
        objective: Objective,
        evaluations: Sequence[Evaluation],
        resources: Resources,
    ) -> None:
        self.config, self.objective, self.evaluations = config, objective, evaluations
        self.resources, self.watchdog = resources, resources.watchdog
        self.store, self.local = resources.store, resources.local
        self.builder = StepBuilder.of(
            config, objective.model, objective.loss, objective.abstract_batch(), objective.totals
        )
        model = objective.model
        self.meter = Meter(
            model.config,
            model.mesh.devices.flat,
            mask=model.mask,
            frozen={weight_of(name) for name in model.parameters} - set(self.builder.trainable),
        )
        self.compiled_step: jax.stages.Compiled | None = None
        self.state = TrainingState(config, objective, self.builder, self.store, self.local)

    def compile(self) -> None:
        """Compiles the step and prepares evaluations, unless already done or no steps remain."""
        if self.state.finished or self.compiled_step is not None:
            return
        with (
            self.meter.compiling(),
            self.watchdog.phase("compiling", self.config.distributed.compile_minutes),
        ):
            # Lowering takes seconds and raises most configuration errors.
            lowered = self.builder.lower_train()
            count = self.objective.model.mesh.size
            self.state.say(f"compiling for {count} device{'s' if count > 1 else ''}")
            self.compiled_step = lowered.compile()
            for evaluation in self.evaluations:
                evaluation.prepare(self.objective, self.builder)
            barrier("compiled")

    def claim_folder(self) -> RunDirectory:
        """Locks the run's folder and writes the configuration there; restores again if another
        process trained this run before this one took the lock."""

        def open_and_lock(message: str | None) -> RunDirectory:
            return open_run(self.config, process_zero=message is None, lock=self.resources.lock)

        run = first_then_others(open_and_lock, lambda run: "")
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
        if self.state.finished:
            self.state.finite.require_trained(self.state.step)
            return self.store.path(self.state.step)
        with (
            self._open_log(run) as log,
            Profiler(run.keep_profile, self._profiled_steps, self.meter.paused) as profiler,
        ):
            # Now: the initial model's files may be gone by the time a checkpoint is saved.
            if jax.process_index() == 0:
                self._warn_of_profile(run)
                shutil.rmtree(run.assets, ignore_errors=True)
                self.objective.write_assets(run.assets)
                replace_file(run.versions, (json.dumps(versions(), indent=1) + "\n").encode())
            self._evaluate_before_training(log)  # notices are not caught: nothing to save yet
            saves = Saves(self.state, self.resources, run.assets)
            with notices(saves.no_time_to_finish) as get_notice:
                self._train(_Session(log, profiler, saves, get_notice), stage_follows)
        return self.store.path(self.state.step)

    def _train(self, session: _Session, stage_follows: bool) -> None:
        """Takes the remaining steps, evaluating and saving when due."""
        best, notice = self.state.best, None
        if not best.exhausted:
            for _ in self._steps(session):
                notice = session.get_notice()
                self._after_step(session, notice)
                if best.exhausted:
                    break
        self._finish(session)
        if stage_follows and (notice := notice or session.get_notice()):
            raise Preempted(notice, self.store.path(self.state.step))

    def _finish(self, session: _Session) -> None:
        """Waits for the last saves, and says where the last and the best checkpoint are."""
        state, best, log = self.state, self.state.best, session.log
        if best.exhausted:
            log.say(f"stopped at step {state.step}: {best.why}")
        session.saves.wait()
        if self.local is not None:
            self.local.finish()
        state.finite.require_trained(state.step)
        log.say(f"saved {self.store.path(state.step)}")
        if best.step not in (None, state.step):
            log.say(
                f"best: {self.store.path(best.step)} ({self.config.checkpoint.best} "
                f"{best.value:.6g})"
            )

    @property
    def _profiled_steps(self) -> tuple[int, ...]:
        """The first and the last step that this process profiles; () for none."""
        logging = self.config.logging
        processes = logging.profile_processes
        return logging.profile_steps if not processes or jax.process_index() in processes else ()

    def _warn_of_profile(self, run: RunDirectory) -> None:
        """Warns if the run has passed the steps to profile, and no start has profiled them."""
        steps, step = self.config.logging.profile_steps, self.state.step
        if steps and step >= steps[1] and not run.has_profile(session_of(steps)):
            warn(
                f"logging.profile_steps: found {list(steps)}, but the run continues from step "
                f"{step}, so nothing is profiled; later steps would work"
            )

    def _evaluate_before_training(self, log: MetricsLog) -> None:
        """Runs all evaluations before the first step, or on resuming those that preemption skipped.

        Raises:
          UserError: no evaluation measures the metric that `checkpoint.best` names.
        """
        if self.state.step == 0 or self.state.best.to_be_checked:
            self._evaluate(self.evaluations, log)
        elif self.state.shortened or not self.state.evaluated:
            # If none is due, all of them.
            self._evaluate(self._due_evaluations() or self.evaluations, log)

    def _open_log(self, run: RunDirectory) -> MetricsLog:
        state = self.state
        # An earlier start may have logged evaluations of what has become the last step.
        logged = None if state.shortened else state.logged
        return MetricsLog(
            run,
            self.config,
            LogStart(state.step, state.evaluated, logged),
            evaluations=[evaluation.name for evaluation in self.evaluations],
            loss_name=self.objective.loss_name,
            write=jax.process_index() == 0,
        )

    def _steps(self, session: _Session) -> Iterator[None]:
        """Trains to the last step; yields after each step."""
        state = self.state
        state.start_clock()
        if state.only_local and state.step in (state.best.step, self.config.train.steps):
            session.saves.save(session.log)
        if state.shortened:  # only evaluations were left
            return
        batches = self.objective.batches(state.step)
        self.meter.start()
        batch: DeviceBatch | None = self._next_batch(batches)
        while batch is not None:
            with session.profiler.step(self.state.step + 1):
                batch = self._train_step(batch, batches, session.log)
            yield

    def _next_batch(
        self, batches: Iterator[HostBatch], computed: Future[float] | None = None
    ) -> DeviceBatch:
        """Fetches a batch; time after `computed` (when the running step ends) counts as waiting."""
        with self.meter.waiting_for_data(computed):
            batch = next(batches)
        return self.objective.to_device(batch)

    def _train_step(
        self, batch: DeviceBatch, batches: Iterator[HostBatch], log: MetricsLog
    ) -> DeviceBatch | None:
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
            log.train(row, self.meter.seconds_left(state.step, self.config.train.steps))
        return next_batch

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

    def _after_step(self, session: _Session, notice: signal.Signals | None) -> None:
        """Evaluates and saves if due; on a preemption notice, saves at once.

        Raises:
          Preempted: there is a notice and steps remain.
        """
        log, saves = session.log, session.saves
        due, logged = self._due_evaluations(), log.logged
        save_is_due = saves.due()
        self.state.evaluated = not due
        steps_remain = self.state.step < self.config.train.steps
        try:
            if notice and steps_remain:
                raise Interrupted(notice)
            interrupt = session.get_notice if steps_remain else lambda: None
            with self.meter.paused(), interruptible(interrupt):
                is_best = self._evaluate(due, log)
                saves.save_locally(log)
                if is_best or self.state.best.exhausted or save_is_due:
                    saves.save(log)
        except Interrupted as interrupted:
            # There may be no time for evaluations, so the next start runs them first, and removes
            # what they have logged.
            saves.save(log, logged, is_last=True)
            saves.wait()
            if self.local is not None:
                self.local.wait()
            raise Preempted(interrupted.notice, self.store.path(self.state.step)) from None

    def _due_evaluations(self) -> list[Evaluation]:
        return [evaluation for evaluation in self.evaluations if self.state.due(evaluation.every)]

    def _evaluate(self, evaluations: Sequence[Evaluation], log: MetricsLog) -> bool:
        """Runs the evaluations, and then all others if these end the run early; returns whether
        `checkpoint.best` has a new best."""
        state, best = self.state, self.state.best
        measured, every = dict[str, float](), dict[str, int]()
        for evaluation in evaluations:
            metrics = self._measure(evaluation, log)
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
                    self._measure(evaluation, log)
        state.evaluated = True
        # The first call runs all evaluations.
        if best.to_be_checked and (warning := best.require(every, self.config.train.steps)):
            warn(warning)
        return state.step > 0 and best.update(state.step, measured)

    def _measure(self, evaluation: Evaluation, log: MetricsLog) -> dict[str, float]:
        """Runs an evaluation; returns its metrics without answers."""
        with self.watchdog.phase(
            f"evaluating {evaluation.name}", self.config.distributed.evaluate_minutes
        ):
            metrics = evaluation.run(self.state.params, self.state.step)
        if metrics:
            log.evaluation(evaluation.name, {"step": self.state.step, **metrics})
        return {name: value for name, value in metrics.items() if not isinstance(value, str)}

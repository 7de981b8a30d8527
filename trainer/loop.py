"""The training loop: restores or initializes, trains an objective, logs, evaluates, saves."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from data.errors import UserError
from data.folders import named_errors

from .best import BestCheckpoint
from .build import run_notes
from .checkpoint.clock import SaveClock
from .checkpoint.local_tier import LocalTier
from .checkpoint.store import CheckpointStore
from .config.load import resolved
from .config.schema import RunConfig
from .evaluation import Evaluation
from .mesh import make_mesh, start_devices
from .objective import AUXILIARY, BY_SOURCE, DeviceBatch, HostBatch, Objective, Params
from .reporting.boards import import_wandb
from .reporting.metrics import Meter, MetricsLog
from .reporting.profiling import Profiler
from .run.cluster import barrier, first_then_others, require_same
from .run.directory import RunDirectory, check_run, open_run, shared_fields
from .run.logs import replace_file
from .run.preemption import Preempted, notices
from .run.versions import difference, require_same_code, versions
from .run.watchdog import Watchdog
from .step import StepBuilder, StepMetrics

SHOWN_RECORDS = 20  # of a step with a non-finite loss
LONG_WAIT = 1.0  # seconds of waiting for the previous save after which the log says so


def train(
    config: RunConfig,
    make_objective: Callable[[RunConfig, Mesh], Objective],
    evaluations: Sequence[Evaluation] = (),
    stage_follows: bool = False,
) -> Path:
    """Trains a run to its last step, from its newest checkpoint if it has one.

    Args:
      make_objective: creates the objective once the devices are known.
      evaluations: measured during training, in this order.
      stage_follows: another run begins when this one returns; a notice to end during or after the
        last step then still raises Preempted.

    Returns:
      The folder of the last checkpoint.

    Raises:
      UserError, ValueError: a user's error, in one line.
      Preempted: SIGTERM or Ctrl-C ended training; its last step is saved.
    """
    start_devices(config)
    require_same_code()
    _check_profiled(config.logging.profile_processes)
    if config.logging.wandb:
        import_wandb()  # reports a missing package now, not after an hour of preparing data
    mesh = make_mesh(config.mesh, schedule=config.attention.schedule)
    folder = check_run(
        config, jax.process_index() == 0, steps_known=config.train.epochs is None
    ).folder
    objective = make_objective(config, mesh)
    config = dataclasses.replace(config, train=config.train.for_epochs(objective.rows_per_epoch))
    require_same(
        {
            "the model's fingerprint": objective.origin,
            "the data's fingerprint": objective.fingerprint,
            **{f"the model's {name}": value for name, value in objective.inputs.items()},
            **shared_fields(config),
        }
    )
    # The lock is released last: closing the store waits for a save to finish.
    with (
        contextlib.ExitStack() as lock,
        CheckpointStore(config.location, keep=config.checkpoint.keep) as store,
        contextlib.closing(Watchdog(config.distributed)) as watchdog,
        contextlib.ExitStack() as resources,
    ):
        local = None
        if config.checkpoint.local:
            local = LocalTier(config.checkpoint.local, config.folder, config.location, mesh)
            resources.callback(local.close)
        training = _Training(config, objective, evaluations, store, watchdog, local)
        training.compile()

        def open_and_lock(message: str | None) -> RunDirectory:
            return open_run(config, process_zero=message is None, lock=lock)

        # The folder is claimed only now, so another attempt may use it if the data, the model or
        # the step is refused.
        with named_errors(folder):
            run = first_then_others(open_and_lock, lambda run: "")
            store.before = run.before_checkpoint
            training.catch_up()
            if local is not None:
                local.before = run.before_checkpoint
                local.claim()
            return training.run(run, stage_follows)


def _check_profiled(processes: Sequence[int]) -> None:
    """Raises UserError for a process that does not exist."""
    count = jax.process_count()
    if wrong := [number for number in processes if not 0 <= number < count]:
        raise UserError(
            f"logging.profile_processes: found {wrong[0]}; 0 to {count - 1} would work, or []"
        )


class _Training:
    """The state of one process in a run: arrays, compiled steps, the number of finished steps.

    Attributes:
      trainable, frozen: the parameters that are trained, and the others.
      optimizer_state: moments and counters.
      step: number of finished steps.
      tokens_seen: tokens of the finished steps, without padding.
      earlier_seconds: of training before this start.
      logged: the newest checkpoint's record of the logs.
      evaluated: whether the evaluations that are due after `step` have been done.
      best: the best measurement so far, and how many measurements ago.
    """

    def __init__(
        self,
        config: RunConfig,
        objective: Objective,
        evaluations: Sequence[Evaluation],
        store: CheckpointStore,
        watchdog: Watchdog,
        local: LocalTier | None,
    ) -> None:
        self.config, self.objective, self.evaluations, self.store = (
            config,
            objective,
            evaluations,
            store,
        )
        self.watchdog, self.local = watchdog, local
        self.builder = StepBuilder.of(
            config, objective.model, objective.loss, objective.abstract_batch(), objective.totals
        )
        self.meter = Meter(
            objective.model.config, objective.model.mesh.devices.flat, mask=objective.model.mask
        )
        self.compiled_step: jax.stages.Compiled | None = None
        self._initialize()

    def _initialize(self) -> None:
        """Restores the newest good checkpoint, local or in the run's folder, or begins at step
        0."""
        self.trainable: Params = {}  # frees the arrays of an earlier call
        self.frozen: Params = {}
        self.optimizer_state: Any = None
        self.seen = self._saved_so_far()
        steps, _ = self.seen
        if self._restore_local(after=max(steps, default=0)):
            return
        newest = self.store.latest_good(meanwhile=True)
        # The newest one in the folder may be damaged, and a local one older than it.
        if steps and newest != steps[-1] and self._restore_local(after=newest or 0):
            return
        if newest is None:
            self._begin()
        else:
            self._restore(newest)

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
        self.step, self.evaluated = 0, False
        self.updates = 0  # steps without skipped ones
        self.skipped = 0  # steps since the last update
        self.sound_step = -1  # the last one after which the loss was still finite
        self.tokens_seen, self.earlier_seconds = 0, 0.0
        self.logged: dict[str, Any] = {}
        self.best = BestCheckpoint(self.config.checkpoint)
        self._print(
            "\n".join(
                (self.builder.saved_size, *run_notes(self.config, self.objective.model.config))
            )
        )

    def _restore(self, checkpoint_step: int) -> None:
        """Restores a checkpoint of the run's folder."""
        restored = self.store.restore(
            checkpoint_step, self.builder.abstract_saved, self.builder.abstract_optimizer
        )
        self._go_on(
            restored.model,
            restored.optimizer,
            restored.data or {},
            str(self.store.path(checkpoint_step)),
        )

    def _restore_local(self, after: int) -> bool:
        """Restores the newest local checkpoint after a step, if there is a usable one."""
        if self.local is None:
            return False
        abstract = self.builder.abstract_saved, self.builder.abstract_optimizer
        restored = self.local.restore(*abstract, after)
        self._print(self.local.describe(*abstract, self.config.checkpoint.local_every))
        if restored is None:
            return False
        place = f"local checkpoint, {self.local.folder}"
        self._go_on(restored.model, restored.optimizer, restored.data, place)
        return True

    def _go_on(self, model: Params, optimizer: Any, data: dict[str, Any], path: str) -> None:
        """Takes over a checkpoint's state; `path` names it."""
        self._check_fingerprints(data, path)
        if jax.process_index() == 0 and (change := difference(data.get("versions", versions()))):
            print(
                f"warning: {path}: was written with {change}; the run continues, but may not "
                "repeat bit by bit what that code would have computed",
                file=sys.stderr,
            )
        base = (
            self._placed(self.objective.read_params()) if self.builder.saves_trainable_only else {}
        )
        self._set_params({**base, **model})
        self.optimizer_state = optimizer
        self.step, self.evaluated, self.updates = data["step"], data["evaluated"], data["updates"]
        self.skipped, self.sound_step = data.get("skipped", 0), data["step"] - 1
        self.tokens_seen, self.earlier_seconds, self.logged = (
            data["tokens_seen"],
            data["wall_seconds"],
            data["logged"],
        )
        self.best = BestCheckpoint.restored(self.config.checkpoint, data)
        self.store.protected = self.best.step
        if self.best.exhausted:
            self._print(
                f"already stopped at step {self.step}: {self._best_words}; a higher "
                "checkpoint.patience continues it"
            )
        else:
            self._print(
                f"already trained to step {self.step}"
                if self.finished
                else f"continuing from step {self.step} ({path})"
            )

    @property
    def finished(self) -> bool:
        """Whether no step is left, or the run's patience is exhausted."""
        return self.step >= self.config.train.steps or self.best.exhausted

    @property
    def _best_words(self) -> str:
        config = self.config.checkpoint
        if self.best.value is None:
            return f"{config.best} was never a finite number in {self.best.waited} measurements"
        return (
            f"{config.best} was {config.best_is} at step {self.best.step} ({self.best.value:.6g}), "
            f"{self.best.waited} measurements ago"
        )

    def _check_fingerprints(self, saved: dict[str, Any], path: str) -> None:
        """Raises UserError if the checkpoint's data, initial parameters or other inputs were
        different."""
        remedy = "give the files that the run began with, or another --run_dir"
        for name, current in self._fingerprints.items():
            if saved.get(name, current) != current:
                difference = (
                    "was trained on other data, or on text that earlier rules made of these data"
                    if name == "fingerprint"
                    else "began with another model"
                )
                raise UserError(
                    f"{path}: {difference} (fingerprint {saved[name]}, now {current}); {remedy}"
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

    def _print(self, text: str) -> None:
        """Prints a line before there is a progress bar."""
        if self.config.logging.console and jax.process_index() == 0:
            print(text, file=sys.stderr)

    def compile(self) -> None:
        """Compiles the training step and prepares evaluations, unless done or no step is left."""
        if self.finished or self.compiled_step is not None:
            return
        with (
            self.meter.compiling(),
            self.watchdog.phase("compiling", self.config.distributed.compile_minutes),
        ):
            # Takes seconds, and raises most errors of a configuration.
            lowered = self.builder.lower_train()
            count = self.objective.model.mesh.size
            self._print(f"compiling for {count} device{'s' if count > 1 else ''}")
            self.compiled_step = lowered.compile()
            for evaluation in self.evaluations:
                evaluation.prepare(self.objective, self.builder)
            barrier("compiled")

    def catch_up(self) -> None:
        """Restores again if another process trained here before this one had the lock."""
        if self._saved_so_far() != self.seen:
            self._initialize()
            self.compile()

    def run(self, run: RunDirectory, stage_follows: bool) -> Path:
        """Trains to the last step and returns its checkpoint's folder.

        Raises:
          Preempted: see `train`.
        """
        if self.finished:
            self._require_trained()
            return self.store.path(self.step)
        with (
            self._open_log(run) as log,
            Profiler(run.keep_profile, self._profiled_steps, self.meter.paused) as profiler,
        ):
            # Now, since the initial model's files may be gone when a checkpoint is saved.
            if jax.process_index() == 0:
                shutil.rmtree(run.assets, ignore_errors=True)
                self.objective.write_assets(run.assets)
                replace_file(run.versions, (json.dumps(versions(), indent=1) + "\n").encode())
            self._evaluate_before_training(log)  # without notices: there is nothing to save yet
            with notices(self._no_time_to_finish) as asked_to_end:
                self._train(run, log, profiler, asked_to_end, stage_follows)
        return self.store.path(self.step)

    def _train(
        self,
        run: RunDirectory,
        log: MetricsLog,
        profiler: Profiler,
        asked_to_end: Callable[[], signal.Signals | None],
        stage_follows: bool,
    ) -> None:
        """Takes the remaining steps, and does what is due after each."""
        notice = None
        for _ in () if self.best.exhausted else self._steps(profiler, log):
            notice = asked_to_end()
            self._after_step(run, log, notice)
            if self.best.exhausted:
                break
        if self.best.exhausted:
            log.say(f"stopped at step {self.step}: {self._best_words}")
        self._wait_for_save()
        if self.local is not None:
            self.local.finish()
        self._require_trained()
        log.say(f"saved {self.store.path(self.step)}")
        if self.best.step not in (None, self.step):
            log.say(
                f"best: {self.store.path(self.best.step)} ({self.config.checkpoint.best} "
                f"{self.best.value:.6g})"
            )
        if stage_follows and (notice := notice or asked_to_end()):
            raise Preempted(notice, self.store.path(self.step))

    @property
    def _profiled_steps(self) -> tuple[int, ...]:
        """The first and the last step that this process profiles; () for none."""
        logging = self.config.logging
        chosen = logging.profile_processes
        return logging.profile_steps if not chosen or jax.process_index() in chosen else ()

    def _evaluate_before_training(self, log: MetricsLog) -> None:
        """Runs all evaluations before the first step, or those that a preempted start missed.

        Raises:
          UserError: `checkpoint.best` names a metric that none of them measures.
        """
        if self.step == 0 or self.best.to_be_checked:
            self._evaluate(self.evaluations, log)
        elif not self.evaluated:
            # All, if none is due.
            self._evaluate(self._due_evaluations() or self.evaluations, log)

    def _open_log(self, run: RunDirectory) -> MetricsLog:
        logging, wandb = self.config.logging, None
        if logging.wandb:
            wandb = {
                "project": logging.wandb,
                "name": self.config.name,
                "config": resolved(self.config),
            }
        return MetricsLog(
            run,
            steps=self.config.train.steps,
            start_step=self.step,
            evaluated=self.evaluated,
            evaluations=[evaluation.name for evaluation in self.evaluations],
            tensorboard=logging.tensorboard,
            loss_name=self.objective.loss_name,
            logged=self.logged,
            console=logging.console,
            write=jax.process_index() == 0,
            wandb=wandb,
        )

    def _steps(self, profiler: Profiler, log: MetricsLog) -> Iterator[None]:
        """Trains to the last step; yields after each step."""
        batches = self.objective.batches(self.step)
        self.started = time.monotonic()
        self.save_clock = SaveClock(self.config.checkpoint.minutes)
        self.meter.start()
        batch: DeviceBatch | None = self._next_batch(batches)
        while batch is not None:
            with profiler.step(self.step + 1):
                batch = self._train_step(batch, batches, log)
            yield

    def _next_batch(
        self, batches: Iterator[HostBatch], computed: Future[float] | None = None
    ) -> DeviceBatch:
        """Fetches a batch; time after `computed`, the running step's end, counts as waiting."""
        with self.meter.waiting_for_data(computed):
            batch = next(batches)
        return self.objective.to_device(batch)

    def _train_step(
        self, batch: DeviceBatch, batches: Iterator[HostBatch], log: MetricsLog
    ) -> DeviceBatch | None:
        """Trains on `batch`, meanwhile fetches the next one; None after the last step."""
        assert self.compiled_step is not None
        self.watchdog.begin_step(self.step + 1)
        self.trainable, self.optimizer_state, metrics = self.compiled_step(
            self.trainable, self.frozen, self.optimizer_state, batch, np.int32(self.step)
        )
        computed = self.meter.when_computed(metrics)
        next_batch = (
            self._next_batch(batches, computed) if self.step + 1 < self.config.train.steps else None
        )
        metrics = jax.device_get(metrics)  # waits for the step
        if self._check_finite(metrics):
            self.updates, self.skipped, self.sound_step = self.updates + 1, 0, self.step
        else:
            self.skipped += 1
        lengths = self.objective.lengths(self.step)
        shared = self.objective.shared_lengths(self.step)
        self.meter.count(lengths, self.objective.tokens_per_batch, shared)
        self.tokens_seen += int(lengths.sum())
        self.step += 1
        if self._due(self.config.train.log_every):
            row = self.meter.read(self.step, **self._named(metrics), **self._progress())
            log.train(row, self.meter.seconds_left(self.step, self.config.train.steps))
        return next_batch

    def _progress(self) -> dict[str, float]:
        """Returns the run's progress by the names in the log."""
        rows = self.objective.rows_per_epoch
        epoch = {"epoch": self.step * self.config.train.batch_size / rows} if rows else {}
        return {**epoch, "tokens_seen": self.tokens_seen, "wall_seconds": self._wall_seconds()}

    def _wall_seconds(self) -> float:
        """Returns the run's seconds of training, over all its starts."""
        return self.earlier_seconds + time.monotonic() - self.started

    def _named(self, metrics: StepMetrics) -> dict[str, float]:
        """Returns a step's metrics by the names in the log, without sources that have no target."""
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
        # The mean of nothing is not a number.
        return named | {name: x for name, x in measures.items() if not math.isnan(x)}

    def _check_finite(self, metrics: StepMetrics) -> bool:
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
        records = self.objective.record_ids(self.step)
        more = f" and {len(records) - SHOWN_RECORDS:,} more" if len(records) > SHOWN_RECORDS else ""
        problem = (
            f"step {self.step + 1}: {' and '.join(not_finite)}; its records are "
            f"{', '.join(records[:SHOWN_RECORDS])}{more}"
        )
        if self.config.train.non_finite == "stop":
            raise UserError(
                f"{problem}; {self._sound_checkpoints()}: fix those records or lower "
                "optimizer.learning_rate in another --run_dir, or give --train.non_finite skip "
                "to skip such steps"
            )
        if jax.process_index() == 0:
            print(f"warning: {problem}; skipped, the parameters are unchanged", file=sys.stderr)
        return False

    def _require_trained(self) -> None:
        """Raises UserError if steps were skipped to the end, so that nothing good was trained."""
        if self.step > 0 and self.updates == 0:
            raise UserError(
                f"{self.store.path(self.step)}: all {self.step} steps were skipped, since no loss "
                "or gradient was finite; nothing was trained: see the records in the warnings, "
                "or lower optimizer.learning_rate, in another --run_dir"
            )
        if self.skipped and not self.objective.has_held_out:  # no loss tells that it is good
            last = (
                f"the last {self.skipped} steps were" if self.skipped > 1 else "the last step was"
            )
            raise UserError(
                f"{self.store.path(self.step)}: {last} skipped, since no loss or gradient was "
                f"finite; {self._sound_checkpoints()}: evaluate this one, or lower "
                "optimizer.learning_rate in another --run_dir"
            )

    def _sound_checkpoints(self) -> str:
        """Says which checkpoints gave a finite loss in the step after them."""
        sound = [step for step in self.store.steps() if step <= self.sound_step]
        if not sound:
            return "no checkpoint is known to be good"
        return f"{self.store.path(sound[-1])} is good"

    def _require_finite_parameters(self) -> None:
        """Raises UserError if a trained parameter is not finite: the update overflowed."""
        name = next((name for name, x in self.trainable.items() if not _is_finite(x)), None)
        if name is not None:
            raise self._unsound(f"{name} is not finite after the update")

    def _unsound(self, problem: str) -> UserError:
        return UserError(
            f"step {self.step}: {problem}, so nothing is saved; {self._sound_checkpoints()}: "
            "lower optimizer.learning_rate in another --run_dir"
        )

    def _after_step(self, run: RunDirectory, log: MetricsLog, notice: Any) -> None:
        """Evaluates and saves if due; on notice saves at once.

        Raises:
          Preempted: on notice, unless the last step is done.
        """
        due = self._due_evaluations()
        save_is_due = self.save_clock.due(self.step) or self._due(self.config.checkpoint.every)
        self.evaluated = not due
        if notice and self.step < self.config.train.steps:
            # There may be no time for evaluations, so the next start begins with them.
            self._save(run, log)
            self._wait_for_save()
            if self.local is not None:
                self.local.wait()
            raise Preempted(notice, self.store.path(self.step))
        with self.meter.paused():
            is_best = self._evaluate(due, log)
            self._save_locally(log)
            if is_best or self.best.exhausted or save_is_due:
                self._save(run, log)

    def _no_time_to_finish(self) -> str | None:
        """Returns why a SIGTERM now would end the run within its step; None if there is time.

        Called by another thread than the loop's. A save that is under way is waited for.
        """
        grace, begun = self.config.checkpoint.grace_seconds, time.monotonic()
        step_seconds = self.watchdog.step_seconds_left()
        if not grace or step_seconds is None or step_seconds + self.store.save_seconds <= grace:
            return None
        needed = step_seconds + self.store.save_seconds
        self.store.wait_at_most(grace - (time.monotonic() - begun))
        newest = self._newest()
        return (
            f"preempted (SIGTERM): step {self.step + 1} was not finished, since it and its "
            f"checkpoint need about {needed:,.0f} s more and checkpoint.grace_seconds is "
            f"{grace:g}; the same command resumes the run from " + newest
        )

    def _newest(self) -> str:
        """Names what a start would go on from."""
        newest, local = max(self.store.steps(), default=0), (self.local and self.local.newest) or 0
        if local > newest:
            return f"the local checkpoint of step {local}"
        return str(self.store.path(newest)) if newest else "its beginning"

    def _due_evaluations(self) -> list[Evaluation]:
        return [evaluation for evaluation in self.evaluations if self._due(evaluation.every)]

    def _due(self, every: int) -> bool:
        """Whether something done every `every` steps, and after the last one, is due now."""
        return self.step == self.config.train.steps or (every > 0 and self.step % every == 0)

    def _evaluate(self, evaluations: Sequence[Evaluation], log: MetricsLog) -> bool:
        """Runs the evaluations, and returns whether `checkpoint.best` has a new best."""
        measured: dict[str, float] = {}
        for evaluation in evaluations:
            with self.watchdog.phase(
                f"evaluating {evaluation.name}", self.config.distributed.evaluate_minutes
            ):
                metrics = evaluation.run({**self.trainable, **self.frozen}, self.step)
            if metrics:
                log.evaluation(evaluation.name, {"step": self.step, **metrics})
            measured.update(
                {name: value for name, value in metrics.items() if not isinstance(value, str)}
            )
        self.evaluated = True
        loss_name = f"held_out_{self.objective.loss_name}"
        if self.step > 0 and not math.isfinite(loss := measured.get(loss_name, 0.0)):
            self._require_finite_parameters()
            raise self._unsound(f"{loss_name} is {loss}")
        if self.best.to_be_checked:
            self.best.require(measured)  # before that, only all evaluations run
        return self.step > 0 and self.best.update(self.step, measured)

    def _wait_for_save(self) -> None:
        """Waits until the newest checkpoint counts."""
        with self.watchdog.phase("saving", self.config.distributed.save_minutes):
            self.store.wait()

    def _save(self, run: RunDirectory, log: MetricsLog) -> None:
        """Starts to save a checkpoint of this step.

        Raises:
          UserError: a parameter is not finite.
        """
        self._require_finite_parameters()
        start = time.monotonic()
        self._wait_for_save()  # the previous save may still be removing old checkpoints
        if (seconds := time.monotonic() - start) >= LONG_WAIT:
            log.say(
                f"step {self.step}: waited {seconds:.1f} s for the previous checkpoint; a higher "
                "checkpoint.every or a faster store would avoid this"
            )
        self.store.protected = self.best.step
        self.save_clock.saved()
        self.store.save(
            self.step,
            model=self._saved_params(),
            optimizer=self.optimizer_state,
            data=self._saved_data(log),
            assets=run.assets,
            shapes=self.objective.model.own_shapes,
        )

    def _save_locally(self, log: MetricsLog) -> None:
        """Starts to save a local checkpoint, if one is due; the last step has no need of one.

        Raises:
          UserError: a parameter is not finite.
        """
        every = self.config.checkpoint.local_every
        if self.local is None or self.finished or self.step % every != 0:
            return
        self._require_finite_parameters()
        start = time.monotonic()
        with self.watchdog.phase("saving", self.config.distributed.save_minutes):
            self.local.wait()
        if (seconds := time.monotonic() - start) >= LONG_WAIT:
            log.say(
                f"step {self.step}: waited {seconds:.1f} s for the previous local checkpoint; a "
                "higher checkpoint.local_every would avoid this"
            )
        self.local.save(
            self.step, self._saved_params(), self.optimizer_state, self._saved_data(log)
        )

    def _saved_params(self) -> Params:
        """Returns the parameters that checkpoints hold."""
        frozen = {} if self.builder.saves_trainable_only else self.frozen
        return {**self.trainable, **frozen}

    def _saved_data(self, log: MetricsLog) -> dict[str, Any]:
        """Returns what checkpoints say of the run's progress."""
        return {
            "step": self.step,
            **self._fingerprints,
            "inputs": self.objective.inputs,
            "evaluated": self.evaluated,
            "updates": self.updates,
            "skipped": self.skipped,
            "tokens_seen": self.tokens_seen,
            "wall_seconds": self._wall_seconds(),
            "logged": log.logged,
            "versions": versions(),
            **self.best.data,
        }


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

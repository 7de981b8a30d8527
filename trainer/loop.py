"""The training loop: restore or begin, step, log, evaluate, save. Knows an objective, not what it is made of."""
from __future__ import annotations

import contextlib
import math
import shutil
import sys
import warnings
from pathlib import Path

import jax
import numpy as np

from data.errors import UserError
from model.loss import LossSums

from .checkpoint.store import CheckpointStore, own_shapes
from .config.load import resolved
from .config.schema import RunConfig
from .mesh import make_mesh, simulate
from .objective import Objective
from .optimizer import split_trainable
from .reporting.boards import import_wandb
from .reporting.metrics import Meter, MetricsLog
from .reporting.profiling import Profiler
from .run.cluster import barrier, first_then_others, join
from .run.directory import RunDirectory, check_run, open_run
from .run.lock import held
from .run.preemption import Preempted, notices
from .step import BY_SOURCE, StepBuilder
from .text import TextObjective


def train(config: RunConfig) -> Path:
    """Runs (or goes on with) the run that `config` describes, to its last step; gives the newest checkpoint's folder.

    Raises:
      UserError, ValueError: what a user can mend, in one line; Preempted: ended by SIGTERM or Ctrl-C, its last step saved.
    """
    processes = join(config.distributed, simulated=bool(config.mesh.simulate))
    if config.mesh.simulate:
        simulate(config.mesh.simulate, processes)
    if config.logging.wandb:
        import_wandb()  # found missing now, not after an hour of data
    mesh = make_mesh(config.mesh, schedule=config.attention.schedule)
    first = jax.process_index() == 0
    folder = check_run(config, first).folder
    objective = TextObjective(config, mesh)
    # The lock is let go of last: leaving the store waits for what is being saved.
    with contextlib.ExitStack() as lock, CheckpointStore(folder, keep=config.checkpoint.keep) as store:
        training = _Training(config, objective, store)
        training.compile()
        # Only now is the folder this run's: after data, a model or a step that is refused, another try may use it.
        def opened(told: str | None) -> RunDirectory:
            run = open_run(config, write=told is None)
            if told is None:
                lock.enter_context(held(run.lock))
            return run

        run = first_then_others(opened, lambda run: "")
        training.catch_up()
        return training.run(run)


class _Training:
    """One process's part in a run: the arrays, the compiled steps and the place in the data."""

    def __init__(self, config: RunConfig, objective: Objective, store: CheckpointStore):
        self.config, self.objective, self.store = config, objective, store
        model = objective.model
        self.trained, self.fixed = split_trainable(model.parameters, config.model.trainable)
        self.builder = StepBuilder.of(config, model, objective.loss, objective.abstract_batch(), objective.sources)
        self.meter = Meter(model.config, model.mesh.devices.flat, mask=model.mask)
        self.train_step = None
        self.step = self._restore()

    def _restore(self) -> int:
        """Parameters, moments and the step they belong to: from the newest good checkpoint, or fresh."""
        self.trainable = self.frozen = self.optimizer_state = None  # of an earlier restore: the memory is needed
        self.steps_seen = self.store.steps_for_all()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            latest = self.store.latest_good()
        for warning in told:
            print(f"warning: {warning.message}", file=sys.stderr)
        if latest is None:
            params = self.objective.read_params()
            self.optimizer_state = self.builder.init_optimizer({name: params[name] for name in self.trained})
            self._take({name: jax.device_put(x, self.builder.abstract_params[name].sharding) for name, x in params.items()})
            self.evaluated = False
            return 0
        restored = self.store.restore(latest, self.builder.abstract_params, self.builder.abstract_optimizer)
        for what, here in self._origins.items():
            if (there := restored.data.get(what, here)) != here:
                other = "was trained on other data" if what == "fingerprint" else "began with another model"
                raise UserError(f"{self.store.path(latest)}: {other} (fingerprint {there}, now {here}); give the files that "
                                "the run began with, or another --run_dir")
        self._take(restored.model)
        self.optimizer_state, self.evaluated = restored.optimizer, restored.data.get("evaluated", True)
        done = restored.data["step"] >= self.config.train.steps
        self._say(f"already trained to step {latest}" if done else f"going on from step {latest} ({self.store.path(latest)})")
        return restored.data["step"]

    def catch_up(self) -> None:
        """Restores again if another start has saved in this folder since: it may have come and gone before this one had the
        lock."""
        if self.store.steps_for_all() != self.steps_seen:
            self.step = self._restore()
            self.compile()

    @property
    def _origins(self) -> dict[str, str]:
        """What a checkpoint tells of the files that its run was made from, wherever these lie."""
        return {"fingerprint": self.objective.fingerprint, "model": self.objective.origin}

    def _say(self, text: str) -> None:
        """A line where there is no progress bar yet."""
        if self.config.logging.console and jax.process_index() == 0:
            print(text, file=sys.stderr)

    def _take(self, params) -> None:
        self.trainable = {name: params[name] for name in self.trained}
        self.frozen = {name: params[name] for name in self.fixed}

    def compile(self) -> None:
        """The steps, once; not if the run is at its end already."""
        if self.step >= self.config.train.steps or self.train_step is not None:
            return
        with self.meter.compiling():
            lowered = self.builder.lower_train()  # what refuses a step speaks here, and within seconds
            self._say(f"compiling for {self.objective.model.mesh.size} devices")
            self.train_step = lowered.compile()
            if self.objective.has_held_out:
                self.evaluate_step = self.builder.lower_evaluate().compile()
            barrier("compiled")

    def run(self, run: RunDirectory) -> Path:
        """Trains to the last step; gives its checkpoint's folder."""
        config, steps = self.config, self.config.train.steps
        if self.step >= steps:
            return self.store.path(self.step)
        logging, wandb = config.logging, None
        if logging.wandb:
            wandb = {"project": logging.wandb, "name": config.name, "config": resolved(config)}
        with MetricsLog(run, steps=steps, start_step=self.step, evaluated=self.evaluated,
                        tensorboard=logging.tensorboard, console=logging.console, write=jax.process_index() == 0,
                        wandb=wandb) as log, \
                Profiler(run.profile, logging.profile_steps, self.meter.paused) as profiler, notices() as last:
            if jax.process_index() == 0:  # once: the files that the model came from may be gone when it is saved
                shutil.rmtree(run.assets, ignore_errors=True)
                self.objective.write_assets(run.assets)
            if not self.evaluated:
                self._evaluate(log)
            batches = self.objective.batches(self.step)
            self.meter.start()
            batch = self._next(batches)
            while self.step < steps:
                with profiler.step(self.step + 1):
                    batch = self._train_one(batch, batches, log)
                self.evaluated = not self._due(config.train.evaluate_every)
                if (told := last(self.step)) and self.step < steps:
                    # Before the held-out loss, for which there may be no time: the next start begins with it.
                    self._save(run)
                    self.store.wait()
                    raise Preempted(told, self.store.path(self.step))
                if not self.evaluated:
                    with self.meter.paused():
                        self._evaluate(log)
                if self._due(config.checkpoint.every):
                    with self.meter.paused():
                        self._save(run)
            self.store.wait()
            log.say(f"saved {self.store.path(self.step)}")
        return self.store.path(self.step)

    def _due(self, every: int) -> bool:
        """Whether what is done every so many steps, and after the last, is to be done now."""
        return self.step == self.config.train.steps or (every > 0 and self.step % every == 0)

    def _place(self, host: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return self.objective.to_device(host)

    def _next(self, batches) -> dict[str, jax.Array]:
        with self.meter.waiting_for_data():
            host = next(batches)
        return self._place(host)

    def _train_one(self, batch, batches, log) -> dict[str, jax.Array] | None:
        """One step; gives the batch of the next, if there is one, which is placed while this step runs."""
        self.trainable, self.optimizer_state, metrics = self.train_step(
            self.trainable, self.frozen, self.optimizer_state, batch, np.int32(self.step))
        following = self._next(batches) if self.step + 1 < self.config.train.steps else None
        metrics = {name: float(value) for name, value in metrics.items()}  # waits for the step
        # 0 / 0 where the step has no target of a source: that source has no loss.
        metrics = {name: x for name, x in metrics.items() if not (name.startswith(BY_SOURCE) and math.isnan(x))}
        self._check_finite(metrics)
        self.meter.count(self.objective.lengths(self.step), self.objective.tokens_per_batch)
        self.step += 1
        if self._due(self.config.train.log_every):
            row = self.meter.read(self.step, **metrics)
            log.train(row, self.meter.seconds_left(self.step, self.config.train.steps))
        return following

    def _check_finite(self, metrics) -> None:
        """Names the step and its records where loss or gradient is not finite; UserError where the run is to stop."""
        broken = [name for name in ("loss_nats_per_target", "grad_norm") if not math.isfinite(metrics[name])]
        if not broken:
            return
        found = (f"step {self.step + 1}: {' and '.join(f'{name} is {metrics[name]}' for name in broken)}; its records are "
                 f"{', '.join(self.objective.record_ids(self.step))}")
        if self.config.train.non_finite == "stop":
            raise UserError(f"{found}; the checkpoints before this step are good: mend those records or lower "
                            "optimizer.learning_rate in another --run_dir, or give --train.non_finite skip to leave such steps "
                            "out")
        if jax.process_index() == 0:
            print(f"warning: {found}; skipped, the parameters are left as they were", file=sys.stderr)

    def _evaluate(self, log) -> None:
        """Held-out loss: a weighted mean over all held-out target tokens, not a mean of batches; that of each source too."""
        self.evaluated = True
        batches = [jax.tree.map(lambda x: np.asarray(x, np.float64), self.evaluate_step(
            self.trainable, self.frozen, self._place(host))) for host in self.objective.held_out()]
        if not batches:
            return
        sums: LossSums = jax.tree.map(lambda *parts: sum(parts), *batches)
        if sums.weight:
            totals, weights = sums.by_source
            log.held_out({"step": self.step, "held_out_loss_nats_per_target": sums.total / sums.weight,
                          "held_out_target_tokens": sums.weight,
                          **{f"held_out_{BY_SOURCE}{name}": totals[i] / weights[i]
                             for i, name in enumerate(self.objective.sources) if weights[i]}})

    def _save(self, run: RunDirectory) -> None:
        self.store.save(self.step, model={**self.trainable, **self.frozen}, optimizer=self.optimizer_state,
                        data={"step": self.step, **self._origins, "evaluated": self.evaluated}, assets=run.assets,
                        shapes=own_shapes(self.objective.model.config))

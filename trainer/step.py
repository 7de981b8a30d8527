"""The training step and the evaluation step, compiled ahead of time from shapes alone.

A step's rows may be computed in parts, one after the other. What is added up is the *sum* of the weighted losses, and its
gradient in float32; the division by the sum of weights comes last, so the parts may hold as few or many targets as they like.
"""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from model.sharding import BATCH_AXES, OnHost

from .config.schema import RunConfig
from .optimizer import clipping, learning_rate, make_optimizer, optimizer_shardings, split_trainable
from .streaming import chosen, in_host_memory, streamed_update

# Begins the name of a metric that is one source's; the source's name follows.
BY_SOURCE = "loss_by_source/"


@dataclasses.dataclass(frozen=True)
class StepBuilder:
    """Everything that the compiled steps are made from.

    Attributes:
      model: has `parameters`, `shardings` and `mesh`; loss: `(params, batch) -> LossSums` of the global batch.
      trainable: names of the parameters that move.
      abstract_batch: name -> ShapeDtypeStruct with sharding.
      accumulation: parts that a batch is computed in; its rows are a multiple of data x fsdp x accumulation.
      skip_non_finite: whether a step of which loss or gradient is not finite leaves parameters and moments as they were.
      moments_on_host, parameters_on_host: whether the moments, or the parameters, lie in the host's memory. A layer's are
        brought over when it is their turn; gradients are on the device.
      sources: names of the sources that `loss` tells apart, if it does; each has its own loss in the metrics.
    """

    model: object
    loss: Callable
    trainable: tuple[str, ...]
    abstract_batch: dict
    optimizer_config: object
    steps: int
    accumulation: int = 1
    skip_non_finite: bool = False
    moments_on_host: bool = False
    sources: tuple[str, ...] = ()
    parameters_on_host: bool = False

    @classmethod
    def of(cls, config: RunConfig, model, loss: Callable, batch: dict, sources: tuple[str, ...] = ()) -> StepBuilder:
        """As a run's configuration wants it; `batch` as abstract_batch."""
        trained, _ = split_trainable(model.parameters, config.model.trainable)
        return cls(model, loss, tuple(trained), batch, config.optimizer, config.train.steps, config.train.accumulation,
                   config.train.non_finite == "skip", config.memory.moments_on_host, sources, config.memory.parameters_on_host)

    @functools.cached_property
    def optimizer(self):
        return make_optimizer(self.optimizer_config, self.steps)

    @functools.cached_property
    def abstract_params(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Every parameter, float32 and sharded."""
        place = in_host_memory if self.parameters_on_host else lambda sharding: sharding
        return {name: jax.ShapeDtypeStruct(parameter.shape, jnp.float32, sharding=place(self.model.shardings[name]))
                for name, parameter in self.model.parameters.items()}

    @property
    def abstract_trainable(self):
        return {name: self.abstract_params[name] for name in self.trainable}

    @property
    def abstract_frozen(self):
        return {name: x for name, x in self.abstract_params.items() if name not in self.trainable}

    @functools.cached_property
    def abstract_optimizer(self):
        return optimizer_shardings(self.optimizer, self.abstract_trainable, self.model.mesh, self.moments_on_host)

    def init_optimizer(self, trainable):
        """Fresh moments, born sharded."""
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_optimizer)
        return jax.jit(self.optimizer.init, out_shardings=shardings)(trainable)

    def train(self, trainable, frozen, optimizer_state, batch, step):
        """One step: new parameters, new moments, and scalars. The gradient is taken outside `shard_map`."""
        def loss(by, part):
            params = jax.tree.map(OnHost, trainable, by) if self.parameters_on_host else by
            sums = self.loss({**params, **frozen}, part)
            return sums.total, sums

        def loss_and_gradient(part):
            by = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), trainable) if self.parameters_on_host else trainable
            return jax.value_and_grad(loss, has_aux=True)(by, part)

        (_, sums), gradient = self._over_parts(loss_and_gradient, batch)
        value, gradient = jax.tree.map(lambda x: x / jnp.maximum(sums.weight, 1e-9), (sums.total, gradient))
        norm = optax.global_norm(gradient)
        metrics = {"loss_nats_per_target": value, "target_tokens": sums.weight, "grad_norm": norm,
                   "learning_rate": learning_rate(self.optimizer_config, self.steps, step),
                   **{BY_SOURCE + name: sums.by_source.total[i] / sums.by_source.weight[i]
                      for i, name in enumerate(self.sources)}}
        good = jnp.isfinite(value) & jnp.isfinite(norm) if self.skip_non_finite else True
        if self.moments_on_host or self.parameters_on_host:
            gradient, _ = clipping(self.optimizer_config).update(gradient, optax.EmptyState())
            moving = make_optimizer(dataclasses.replace(self.optimizer_config, clip_norm=0), self.steps)
            return *streamed_update(moving, gradient, optimizer_state, trainable, good), metrics
        updates, moved_state = self.optimizer.update(gradient, optimizer_state, trainable)
        moved = optax.apply_updates(trainable, updates), moved_state
        return *chosen(good, moved, (trainable, optimizer_state)), metrics

    def _over_parts(self, fn, batch):
        """The sum over a batch's parts of fn(part): a tree of float32 arrays."""
        if self.accumulation == 1:
            return fn(batch)
        mesh = self.model.mesh
        shards = mesh.shape["data"] * mesh.shape["fsdp"]
        where = NamedSharding(mesh, PartitionSpec(None, BATCH_AXES, "sequence"))

        def split(x):
            # Each device's own rows are divided, so that none moves to another device.
            rows, length = x.shape
            parts = x.reshape(shards, self.accumulation, -1, length).swapaxes(0, 1)
            return lax.with_sharding_constraint(parts.reshape(self.accumulation, rows // self.accumulation, length), where)

        def add(sums, part):
            return jax.tree.map(jnp.add, sums, fn(part)), None

        zero = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), jax.eval_shape(fn, batch))
        return lax.scan(add, zero, jax.tree.map(split, batch))[0]

    def lower_train(self):
        """The step, lowered; compile it, or read it. Parameters and moments are donated."""
        step = jax.ShapeDtypeStruct((), jnp.int32)
        where = [jax.tree.map(lambda x: x.sharding, tree) for tree in (self.abstract_trainable, self.abstract_optimizer)]
        # Saying where the results lie keeps the compiler from choosing otherwise, which would cost a compile at step 2.
        jitted = jax.jit(self.train, donate_argnums=(0, 2), out_shardings=(*where, None))
        return jitted.lower(self.abstract_trainable, self.abstract_frozen, self.abstract_optimizer, self.abstract_batch, step)

    def lower_evaluate(self):
        """(trainable, frozen, batch) -> LossSums, lowered."""
        def evaluate(trainable, frozen, batch):
            return self._over_parts(lambda part: self.loss({**trainable, **frozen}, part), batch)

        return jax.jit(evaluate).lower(self.abstract_trainable, self.abstract_frozen, self.abstract_batch)

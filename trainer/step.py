"""The training step and the evaluation step, compiled ahead of time from shapes.

A batch may be computed in consecutive parts (gradient accumulation). The parts' *sums* of weighted
losses and their gradients are accumulated in float32 and divided by the total weight at the end, so
parts may differ in weight.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from model.dropout import token_keys
from model.loss import LossSums
from model.memory.options import MemoryConfig
from model.quantized_weights import weights_in
from model.sharding import OnHost, mesh_axes_of
from model.transformer import ROUTER_TOTALS

from .config.schema import OptimizerConfig, RunConfig, TrainConfig
from .objective import (
    AbstractBatch,
    DeviceBatch,
    Loss,
    LossParams,
    Params,
    Totals,
    TrainableModel,
)
from .optimizer import (
    abstract_state,
    apply_updates,
    clipping,
    learning_rate,
    make_optimizer,
    trainable_names,
)
from .streaming import in_host_memory, keep_unless_finite, streamed_update


class StepMetrics(NamedTuple):
    """A training step's measurements; scalars in float32."""

    loss: Float[Array, ""]
    """The weighted mean of the batch's losses."""
    weight: Float[Array, ""]
    """The sum of the weights."""
    grad_norm: Float[Array, ""]
    """The global norm of the gradient, before clipping."""
    learning_rate: Float[Array, ""]
    loss_by_source: Float[Array, " S"]
    """The mean loss of each source; NaN for a source without weight in the batch."""
    auxiliary: dict[str, Float[Array, ""]]
    """The layers' auxiliary losses, by name, divided by the same weight; {} in dense models."""
    measures: dict[str, Float[Array, ""]]
    """Other quantities of the objective, by name, divided by the same weight."""


@dataclasses.dataclass(frozen=True)
class StepBuilder:
    """Builds the compiled steps of a model and a loss.

    Attributes:
      model: the model whose parameters are trained.
      loss: the loss of a global batch; see `Objective.loss`.
      abstract_batch: shapes, dtypes and shardings of a global batch.
      optimizer_config: the optimizer.
      train_config: `steps`, for the learning rate; `accumulation`, the number of parts of each
        device's rows; `non_finite`: "skip" leaves parameters and moments unchanged in a step with a
        non-finite loss or gradient.
      memory_config: whether moments and parameters are in host memory; gradients always stay on the
        device.
      trainable_pattern: regular expression for the names of trained parameters.
      seed: of dropout.
      totals: see `Objective.totals`; None for none.
    """

    model: TrainableModel
    loss: Loss
    abstract_batch: AbstractBatch
    optimizer_config: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    train_config: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    memory_config: MemoryConfig = dataclasses.field(default_factory=MemoryConfig)
    trainable_pattern: str = ".*"
    seed: int = 0
    totals: Totals | None = None

    @classmethod
    def of(
        cls,
        config: RunConfig,
        model: TrainableModel,
        loss: Loss,
        abstract_batch: AbstractBatch,
        totals: Totals | None = None,
    ) -> StepBuilder:
        """Returns the builder of a configuration's steps."""
        return cls(
            model,
            loss,
            abstract_batch,
            optimizer_config=config.optimizer,
            train_config=config.train,
            memory_config=config.memory,
            trainable_pattern=config.model.trainable,
            seed=config.model.seed,
            totals=totals,
        )

    @functools.cached_property
    def trainable(self) -> tuple[str, ...]:
        """Names of the trained parameters."""
        names = [name for name, parameter in self.model.parameters.items() if not parameter.frozen]
        return tuple(trainable_names(names, self.trainable_pattern))

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """Clipping, the configured optimizer, and an optional average of the weights."""
        return self._make_optimizer(self.optimizer_config)

    def _make_optimizer(self, config: OptimizerConfig) -> optax.GradientTransformation:
        model = self.model
        return make_optimizer(
            config, self.train_config.steps, model.parameters, model.unpadded_shapes
        )

    @functools.cached_property
    def abstract_params(self) -> dict[str, jax.ShapeDtypeStruct]:
        """All parameters with their shardings: trained ones in `optimizer.weight_dtype`, an
        adapter's frozen base in the compute dtype."""
        shardings = self.model.shardings
        if self.memory_config.parameters_on_host:
            shardings = {name: in_host_memory(sharding) for name, sharding in shardings.items()}
        return {
            name: jax.ShapeDtypeStruct(
                parameter.shape,
                jnp.dtype(
                    self.optimizer_config.weight_dtype
                    if name in self.trainable
                    else parameter.dtype
                ),
                sharding=shardings[name],
            )
            for name, parameter in self.model.parameters.items()
        }

    @property
    def abstract_trainable(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The trained ones of `abstract_params`."""
        return {name: self.abstract_params[name] for name in self.trainable}

    @property
    def abstract_frozen(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The frozen ones of `abstract_params`."""
        return {name: x for name, x in self.abstract_params.items() if name not in self.trainable}

    @property
    def saves_trainable_only(self) -> bool:
        """Whether checkpoints hold only trained parameters: adapters without their base."""
        return self.model.config.adapter is not None

    @property
    def abstract_saved(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The `abstract_params` in checkpoints."""
        return self.abstract_trainable if self.saves_trainable_only else self.abstract_params

    @property
    def saved_size(self) -> str:
        """A message with the number of trained parameters and a checkpoint's size."""
        trained, total = (
            sum(weights_in(name, x) for name, x in params.items())
            for params in (self.abstract_trainable, self.abstract_params)
        )
        saved = jax.tree.leaves((self.abstract_saved, self.abstract_optimizer))
        size = sum(math.prod(x.shape) * x.dtype.itemsize for x in saved)
        return (
            f"trains {trained:,} of {total:,} parameters; a checkpoint takes {size / 1e6:,.1f} MB"
        )

    @functools.cached_property
    def abstract_optimizer(self) -> Any:
        """The optimizer's state, with shardings."""
        return abstract_state(
            self.optimizer,
            self.abstract_trainable,
            self.model.mesh,
            self.memory_config.moments_on_host,
        )

    def stored(self, params: Params) -> Params:
        """Returns parameters in the dtypes the step keeps them in."""
        dtypes = {name: x.dtype for name, x in self.abstract_params.items()}
        return {
            name: x if x.dtype == dtypes[name] else x.astype(dtypes[name])
            for name, x in params.items()
        }

    def init_optimizer(self, trainable: Params) -> Any:
        """Returns a new optimizer state, created sharded."""
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_optimizer)
        return jax.jit(self.optimizer.init, out_shardings=shardings)(trainable)

    def lower_train(self) -> jax.stages.Lowered:
        """Returns the lowered training step `train`, which donates parameters and moments."""
        step = jax.ShapeDtypeStruct((), jnp.int32)
        shardings = [
            jax.tree.map(lambda x: x.sharding, tree)
            for tree in (self.abstract_trainable, self.abstract_optimizer)
        ]
        # With free result shardings the compiler might choose others, and the second step would
        # recompile.
        jitted = jax.jit(self.train, donate_argnums=(0, 2), out_shardings=(*shardings, None))
        return jitted.lower(
            self.abstract_trainable,
            self.abstract_frozen,
            self.abstract_optimizer,
            self.abstract_batch,
            step,
        )

    def lower_evaluate(self) -> jax.stages.Lowered:
        """Returns the lowered evaluation step: parameters and batch to `LossSums`."""
        return self.trace_evaluate().lower()

    def trace_evaluate(self) -> jax.stages.Traced:
        """Returns the traced evaluation step; needs no devices, and raises most option errors."""

        def evaluate(params, batch):
            totals = self._batch_totals(params, batch) | self._router_totals(params, batch)
            return self._over_parts(lambda part: self.loss(params, {**part, **totals}), batch)

        return jax.jit(evaluate).trace(self.abstract_params, self.abstract_batch)

    def train(
        self,
        trainable: Params,
        frozen: Params,
        optimizer_state: Any,
        batch: DeviceBatch,
        step: Int[Array, ""],
    ) -> tuple[Params, Any, StepMetrics]:
        """Computes one training step.

        Args:
          trainable, frozen: the trained parameters, and the others.
          batch: a global batch.
          step: number of finished steps.

        Returns:
          The new trained parameters, the new state of the optimizer, and the metrics.
        """
        adapter = self.model.config.adapter
        if adapter is not None and adapter.dropout_rate:
            batch = {**batch, "dropout": token_keys(self.seed, step, batch["index"])}
        params: LossParams = {**trainable, **frozen}
        totals = self._batch_totals(params, batch) | self._router_totals(params, batch)
        sums, gradient = self._over_parts(
            lambda part: self._sums_and_gradient(trainable, frozen, {**part, **totals}), batch
        )
        loss, auxiliary, measures, gradient = jax.tree.map(
            lambda x: x / jnp.maximum(sums.weight, 1e-9),
            (sums.total, sums.auxiliary, sums.measures, gradient),
        )
        with jax.named_scope("optimizer"):
            norm = optax.global_norm(gradient)
        rate = learning_rate(self.optimizer_config, self.train_config.steps, step)
        by_source = sums.by_source.total / sums.by_source.weight
        finite = (
            jnp.isfinite(loss) & jnp.isfinite(norm)
            if self.train_config.non_finite == "skip"
            else True
        )
        metrics = StepMetrics(loss, sums.weight, norm, rate, by_source, auxiliary, measures)
        with jax.named_scope("optimizer"):
            updated = self._update(trainable, optimizer_state, gradient, finite, step)
        return *updated, metrics

    def _batch_totals(self, params: LossParams, batch: DeviceBatch) -> dict[str, Any]:
        """Returns what a part's loss needs from the whole batch, by a forward pass over all
        parts."""
        if self.train_config.accumulation == 1 or self.totals is None:
            return {}
        return self._over_parts(functools.partial(self.totals, params), batch)

    def _router_totals(self, params: LossParams, batch: DeviceBatch) -> dict[str, Any]:
        """Like `_batch_totals`, for router losses, which are not sums over parts."""
        if self.train_config.accumulation == 1 or not self.model.config.has_router_losses:
            return {}
        count = functools.partial(self.model.router_totals, params)
        return {ROUTER_TOTALS: self._over_parts(count, batch)}

    def _update(
        self,
        trainable: Params,
        state: Any,
        gradient: Params,
        finite: Bool[Array, ""] | bool,
        step: Int[Array, ""],
    ) -> tuple[Params, Any]:
        """Returns new parameters and optimizer state; the old ones if the step is not finite."""
        if self.memory_config.moments_on_host or self.memory_config.parameters_on_host:
            clipped, _ = clipping(self.optimizer_config).update(gradient, optax.EmptyState())
            without_clipping = dataclasses.replace(self.optimizer_config, clip_norm=0)
            elementwise = self._make_optimizer(without_clipping)
            return streamed_update(elementwise, clipped, state, trainable, finite)
        updates, new_state = self.optimizer.update(gradient, state, trainable)
        return keep_unless_finite(
            finite, (apply_updates(trainable, updates, step), new_state), (trainable, state)
        )

    def _sums_and_gradient(
        self, trainable: Params, frozen: Params, batch: DeviceBatch
    ) -> tuple[LossSums, Params]:
        """Returns the loss sums and the gradient of their `trained`, taken outside `shard_map`."""
        on_host = self.memory_config.parameters_on_host

        def total(variables):
            params = jax.tree.map(OnHost, trainable, variables) if on_host else variables
            sums = self.loss({**params, **frozen}, batch)
            return sums.trained, sums

        # The gradient of a host parameter is taken with respect to its placeholder on the device.
        variables = (
            jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), trainable) if on_host else trainable
        )
        (_, sums), gradient = jax.value_and_grad(total, has_aux=True)(variables)
        return sums, gradient

    def _over_parts(self, fn: Callable[[DeviceBatch], Any], batch: DeviceBatch) -> Any:
        """Returns the sum of fn(part), a tree of float32 arrays, over the parts of a batch."""
        parts = self.train_config.accumulation
        if parts == 1:
            return fn(batch)

        def split(name: str, x: jax.Array) -> jax.Array:
            """Splits [B, ...] into [parts, B / parts, ...] within each device's rows."""
            abstract = self.abstract_batch["index" if name == "dropout" else name]
            rows, *rest = x.shape
            row_axes, *other_axes = tuple(abstract.sharding.spec) or (None,)
            shards = math.prod(self.model.mesh.shape[axis] for axis in mesh_axes_of(row_axes))
            x = (
                x.reshape(shards, parts, -1, *rest)
                .swapaxes(0, 1)
                .reshape(parts, rows // parts, *rest)
            )
            spec = PartitionSpec(None, row_axes, *other_axes)
            return lax.with_sharding_constraint(x, NamedSharding(self.model.mesh, spec))

        def add(sums, part):
            return jax.tree.map(jnp.add, sums, fn(part)), None

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), jax.eval_shape(fn, batch))
        return lax.scan(add, zeros, {name: split(name, x) for name, x in batch.items()})[0]

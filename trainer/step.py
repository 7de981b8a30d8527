"""The training step and the evaluation step, compiled ahead of time from shapes alone."""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from .mesh import batch_sharding
from .optimizer import learning_rate, make_optimizer, optimizer_shardings

LABELS = ("tokens", "targets", "index", "segment_ids", "positions")


@dataclasses.dataclass(frozen=True)
class StepBuilder:
    """Everything that the compiled steps are made from.

    Attributes:
      model: has `parameters`, `shardings` and `mesh`; loss: `(params, batch) -> (mean loss, sum of weights)`, both global.
      trainable: names of the parameters that move.
      abstract_batch: name -> ShapeDtypeStruct with sharding.
    """

    model: object
    loss: Callable
    trainable: tuple[str, ...]
    abstract_batch: dict
    optimizer_config: object
    steps: int

    @functools.cached_property
    def optimizer(self):
        return make_optimizer(self.optimizer_config, self.steps)

    @functools.cached_property
    def abstract_params(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Every parameter, float32 and sharded."""
        return {name: jax.ShapeDtypeStruct(parameter.shape, jnp.float32, sharding=self.model.shardings[name])
                for name, parameter in self.model.parameters.items()}

    @property
    def abstract_trainable(self):
        return {name: self.abstract_params[name] for name in self.trainable}

    @property
    def abstract_frozen(self):
        return {name: x for name, x in self.abstract_params.items() if name not in self.trainable}

    @functools.cached_property
    def abstract_optimizer(self):
        return optimizer_shardings(self.optimizer, self.abstract_trainable, self.model.mesh)

    def init_optimizer(self, trainable):
        """Fresh moments, born sharded."""
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_optimizer)
        return jax.jit(self.optimizer.init, out_shardings=shardings)(trainable)

    def train(self, trainable, frozen, optimizer_state, batch, step):
        """One step: new parameters, new moments, and scalars. The gradient is taken outside `shard_map`."""
        def loss(trainable):
            return self.loss({**trainable, **frozen}, batch)

        (value, weight), gradient = jax.value_and_grad(loss, has_aux=True)(trainable)
        updates, optimizer_state = self.optimizer.update(gradient, optimizer_state, trainable)
        metrics = {"loss_nats_per_target": value, "target_tokens": weight, "grad_norm": optax.global_norm(gradient),
                   "learning_rate": learning_rate(self.optimizer_config, self.steps, step)}
        return optax.apply_updates(trainable, updates), optimizer_state, metrics

    def lower_train(self):
        """The step, lowered; compile it, or read it. Parameters and moments are donated."""
        step = jax.ShapeDtypeStruct((), jnp.int32)
        where = [jax.tree.map(lambda x: x.sharding, tree) for tree in (self.abstract_trainable, self.abstract_optimizer)]
        # Saying where the results lie keeps the compiler from choosing otherwise, which would cost a compile at step 2.
        jitted = jax.jit(self.train, donate_argnums=(0, 2), out_shardings=(*where, None))
        return jitted.lower(self.abstract_trainable, self.abstract_frozen, self.abstract_optimizer, self.abstract_batch, step)

    def lower_evaluate(self):
        """(trainable, frozen, batch) -> mean loss and sum of weights, lowered."""
        def evaluate(trainable, frozen, batch):
            return self.loss({**trainable, **frozen}, batch)

        return jax.jit(evaluate).lower(self.abstract_trainable, self.abstract_frozen, self.abstract_batch)


def text_batch(rows: int, length: int, mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch of text (see ARCHITECTURE.md): [rows, length] on the mesh."""
    where = batch_sharding(mesh)
    shapes = {name: jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=where) for name in LABELS}
    return {**shapes, "loss_weights": jax.ShapeDtypeStruct((rows, length), jnp.float32, sharding=where)}

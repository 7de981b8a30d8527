"""AdamW with warm-up, cosine decay and clipping, and the choice of the parameters that it trains."""
from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from data.errors import UserError

from .config.schema import OptimizerConfig
from .streaming import in_host_memory


def learning_rate(config: OptimizerConfig, steps: int, step: Int[Array, ""]) -> Float[Array, ""]:
    """Returns the learning rate of step `step` (from 0) of `steps`: linear warm-up, which does not begin at 0, then cosine."""
    warmup = jnp.minimum((step + 1) / max(config.warmup_steps, 1), 1.0)
    progress = jnp.clip((step + 1 - config.warmup_steps) / max(steps - config.warmup_steps, 1), 0.0, 1.0)
    cosine = (1 + jnp.cos(math.pi * progress)) / 2
    return config.learning_rate * warmup * (config.final_fraction + (1 - config.final_fraction) * cosine)


def clipping(config: OptimizerConfig) -> optax.GradientTransformation:
    """Returns clipping by the global norm. It has no state, and is the only part of the optimizer that is not elementwise."""
    return optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Returns clipping followed by AdamW; weight decay applies to matrices, not to norms and biases."""
    def is_matrix(params):
        return {name: not name.endswith(("norm.weight", ".bias")) for name in params}

    adamw = optax.adamw(lambda step: learning_rate(config, steps, step), config.beta1, config.beta2, config.epsilon,
                        weight_decay=config.weight_decay, mask=is_matrix)
    return optax.chain(
        clipping(config),
        adamw if config.moment_dtype == "float32" else _with_moments_in(jnp.dtype(config.moment_dtype), adamw))


def _with_moments_in(dtype: jnp.dtype, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Stores the optimizer's moments in `dtype` between steps and computes with them in float32.

    Optax's own `mu_dtype` does so for the first moment alone.
    """
    def cast(state, dtype):
        return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, state)

    def init(params):
        return cast(optimizer.init(params), dtype)

    def update(gradient, state, params=None):
        updates, state = optimizer.update(gradient, cast(state, jnp.float32), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(init, update)


def split_trainable(names: Iterable[str], pattern: str) -> tuple[list[str], list[str]]:
    """Returns the names that `pattern` matches as a whole, and the others.

    Raises:
      UserError: `pattern` is not a regular expression, or matches no name.
    """
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise UserError(f"model.trainable: {pattern!r} is not a regular expression ({error})") from None
    names = list(names)
    trainable = [name for name in names if expression.fullmatch(name)]
    if not trainable:
        raise UserError(f"model.trainable: {pattern!r} matches no parameter; there are {', '.join(names)}")
    return trainable, [name for name in names if name not in trainable]


def abstract_state(optimizer: optax.GradientTransformation, params: dict[str, jax.ShapeDtypeStruct], mesh: Mesh,
                   on_host: bool = False) -> Any:
    """Returns shapes and shardings of the optimizer's state: moments are sharded like their parameters, counters replicated.

    Args:
      params: the trained parameters, with shardings.
      on_host: places the moments in the host's pinned memory.
    """
    def abstract_moment(moment, parameter):
        sharding = in_host_memory(parameter.sharding) if on_host else parameter.sharding
        return jax.ShapeDtypeStruct(moment.shape, moment.dtype, sharding=sharding)

    replicated = NamedSharding(mesh, PartitionSpec())
    return optax.tree_utils.tree_map_params(
        optimizer, abstract_moment, jax.eval_shape(optimizer.init, params), params,
        transform_non_params=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated))

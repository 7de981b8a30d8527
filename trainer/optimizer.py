"""AdamW with warm-up, cosine decay and clipping, and which parameters it moves."""
from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from data.errors import UserError

from .config.schema import OptimizerConfig
from .streaming import in_host_memory


def learning_rate(config: OptimizerConfig, steps: int, count) -> jax.Array:
    """The rate of the step that follows `count` finished ones: linear warm-up (not from 0), then cosine to the end."""
    warm = jnp.minimum((count + 1) / max(config.warmup_steps, 1), 1.0)
    progress = jnp.clip((count + 1 - config.warmup_steps) / max(steps - config.warmup_steps, 1), 0.0, 1.0)
    cosine = (1 + jnp.cos(math.pi * progress)) / 2
    return config.learning_rate * warm * (config.final_fraction + (1 - config.final_fraction) * cosine)


def clipping(config: OptimizerConfig) -> optax.GradientTransformation:
    """The one part of the optimizer that looks at all parameters at once; without state."""
    return optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clipping, then AdamW; weight decay on matrices alone (not on norms and biases)."""
    def matrices(params):
        return {name: not name.endswith(("norm.weight", ".bias")) for name in params}

    adamw = optax.adamw(lambda count: learning_rate(config, steps, count), config.beta1, config.beta2, config.epsilon,
                        weight_decay=config.weight_decay, mask=matrices)
    return optax.chain(
        clipping(config),
        adamw if config.moment_dtype == "float32" else _stored_in(jnp.dtype(config.moment_dtype), adamw))


def _stored_in(dtype, inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner` with its moments kept in `dtype` between steps, and computed with in float32 (optax's own `mu_dtype` serves
    the first moment alone)."""
    def cast(state, to):
        return jax.tree.map(lambda x: x.astype(to) if jnp.issubdtype(x.dtype, jnp.floating) else x, state)

    def update(gradient, state, params):
        updates, state = inner.update(gradient, cast(state, jnp.float32), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(lambda params: cast(inner.init(params), dtype), update)


def split_trainable(names, pattern: str) -> tuple[list[str], list[str]]:
    """Names that `pattern` matches as a whole, and the others.

    Raises:
      UserError: not a regular expression, or one that matches no parameter.
    """
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise UserError(f"model.trainable: {pattern!r} is not a regular expression ({error})") from None
    chosen = [name for name in names if expression.fullmatch(name)]
    if not chosen:
        raise UserError(f"model.trainable: {pattern!r} matches no parameter; there are {', '.join(names)}")
    return chosen, [name for name in names if name not in chosen]


def optimizer_shardings(optimizer, abstract: dict, mesh: Mesh, on_host: bool = False):
    """Moments lie where their parameters lie, counters everywhere: ShapeDtypeStructs with shardings, shaped like the state.

    abstract: name -> ShapeDtypeStruct with a sharding, of the trained parameters. on_host: moments in pinned host memory.
    """
    def place(moment, parameter):
        where = in_host_memory(parameter.sharding) if on_host else parameter.sharding
        return jax.ShapeDtypeStruct(moment.shape, moment.dtype, sharding=where)

    everywhere = NamedSharding(mesh, PartitionSpec())
    return optax.tree_utils.tree_map_params(
        optimizer, place, jax.eval_shape(optimizer.init, abstract), abstract,
        transform_non_params=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere))

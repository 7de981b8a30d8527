"""The optimizer's step where parameters or moments lie in the host's memory: one layer is brought over, moved and sent back at
a time, so that neither is ever whole on the device."""
from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding

HERE = jax.memory.Space.Device


def in_host_memory(sharding: NamedSharding) -> NamedSharding:
    """The same shards in the host's pinned memory."""
    there = sharding.with_memory_kind("pinned_host")
    # A described GPU does not tell its memories, and jax then drops the kind; an abstract mesh keeps it.
    return there if there.memory_kind else NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind="pinned_host")


def chosen(good, new, old):
    """new; where `good` (True, or a scalar bool) does not hold old, but for counters: the learning rate stays the step's."""
    if good is True:
        return new
    return jax.tree.map(lambda x, y: jnp.where(good, x, y) if jnp.issubdtype(x.dtype, jnp.floating) else x, new, old)


def streamed_update(optimizer: optax.GradientTransformation, gradient: dict, state, params: dict, good=True):
    """`optimizer.update` and its application: new parameters and state, each where it was.

    Args:
      optimizer: moves every number by itself (no global norm).
      gradient, params: name -> array; those called `layers.` have the layers on their first axis. state: its dictionaries have
        the same names.
      good: see `chosen`.
    """
    layers = [name for name in params if name.startswith("layers.")]
    ends = [name for name in params if name not in layers]

    def move(names, params, state, take: Callable = lambda x: x, put: Callable = lambda x, new: new):
        def some(x):
            return {name: jax.device_put(take(x[name]), HERE) for name in names} if isinstance(x, dict) else x

        old = _by_name(some, (params, state))
        updates, moved = optimizer.update(some(gradient), old[1], old[0])
        moved = chosen(good, (optax.apply_updates(old[0], updates), moved), old)

        def back(x, new):
            if not isinstance(x, dict):  # a counter: of all the moves of a step the last one counts
                return x if names is layers else new
            return {**x, **{name: put(x[name], jax.device_put(new[name], jax.typeof(x[name]).memory_space)) for name in names}}

        return _by_name(back, (params, state), moved)

    def one_layer(i, carry):
        return move(layers, *carry, lambda x: lax.dynamic_index_in_dim(x, i, 0, keepdims=False),
                    lambda x, new: lax.dynamic_update_index_in_dim(x, new, i, 0))

    if layers:
        params, state = lax.fori_loop(0, params[layers[0]].shape[0], one_layer, (params, state))
    return move(ends, params, state)


def _by_name(fn: Callable, tree, *others):
    """fn of each dictionary name -> array in a tree (optax keeps one for each moment), and of each leaf outside one."""
    return jax.tree.map(fn, tree, *others, is_leaf=lambda x: isinstance(x, dict))

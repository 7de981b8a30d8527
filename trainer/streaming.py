"""Updates parameters or moments in host memory layer by layer, to the device and back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool

DEVICE = jax.memory.Space.Device


def in_host_memory(sharding: NamedSharding) -> NamedSharding:
    """Returns the same sharding in pinned host memory."""
    on_host = sharding.with_memory_kind("pinned_host")
    if on_host.memory_kind:
        return on_host
    # A described GPU lists no memory kinds, so jax drops it. An abstract mesh keeps it.
    return NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind="pinned_host")


def keep_unless_finite(finite: Bool[Array, ""] | bool, new: Any, old: Any) -> Any:
    """Returns `new` if `finite`, otherwise `old` except for counters.

    Counters always advance: the learning rate depends only on the step.

    Args:
      finite: True selects `new` unconditionally.
      new, old: trees of the same structure; single integers are counters.
    """
    if finite is True:
        return new

    def select(new_leaf, old_leaf):
        return (
            jnp.where(finite, new_leaf, old_leaf)
            if new_leaf.ndim or jnp.issubdtype(new_leaf.dtype, jnp.floating)
            else new_leaf
        )

    return jax.tree.map(select, new, old)


def streamed_update(
    optimizer: optax.GradientTransformation,
    gradient: dict[str, jax.Array],
    state: optax.OptState,
    params: dict[str, jax.Array],
    finite: Bool[Array, ""] | bool = True,
) -> tuple[dict[str, jax.Array], Any]:
    """Applies an optimizer step in host memory, with one layer at a time on the device.

    Args:
      optimizer: elementwise, without a global norm.
      gradient: by parameter name, on the device.
      state: the optimizer's state, whose dictionaries have the same names.
      params: by name; those called `layers.*` are stacked layers [N, ...].
      finite: see `keep_unless_finite`.

    Returns:
      The new parameters and state, each in the old one's memory.
    """
    of_layers: dict[int, list[str]] = {}  # by the number of layers that are stacked
    for name in params:
        if name.startswith("layers."):
            of_layers.setdefault(params[name].shape[0], []).append(name)
    other_names = [name for name in params if not name.startswith("layers.")]

    def update(names: Sequence[str], params, state, read: Callable, write: Callable):
        """Updates the named arrays: `read` takes the part to update, `write` stores the new one."""

        def fetch(arrays):
            if not isinstance(arrays, dict):
                return arrays
            return {name: jax.device_put(read(arrays[name]), DEVICE) for name in names}

        old_params, old_state = _map_dicts(fetch, (params, state))
        updates, new_state = optimizer.update(fetch(gradient), old_state, old_params)
        new = keep_unless_finite(
            finite, (optax.apply_updates(old_params, updates), new_state), (old_params, old_state)
        )

        def store(arrays, new_arrays):
            # Counters advance once per step: with the last update, of the other parameters.
            if not isinstance(arrays, dict):
                return new_arrays if names is other_names else arrays
            return {
                **arrays,
                **{
                    name: write(
                        arrays[name], jax.device_put(new_arrays[name], _memory(arrays[name]))
                    )
                    for name in names
                },
            }

        return _map_dicts(store, (params, state), new)

    def update_layer(names, i, carry):
        return update(
            names,
            *carry,
            lambda stacked: lax.dynamic_index_in_dim(stacked, i, 0, keepdims=False),
            lambda stacked, layer: lax.dynamic_update_index_in_dim(stacked, layer, i, 0),
        )

    for layers, names in of_layers.items():
        run = functools.partial(update_layer, names)
        params, state = lax.fori_loop(0, layers, run, (params, state))
    return update(other_names, params, state, lambda array: array, lambda _, new: new)


def _memory(array: jax.Array) -> Any:
    return jax.typeof(array).memory_space


def _map_dicts(fn: Callable, tree: Any, *others: Any) -> Any:
    """Maps `fn` over a tree's dictionaries (optax has one per moment) and its other leaves."""
    return jax.tree.map(fn, tree, *others, is_leaf=lambda node: isinstance(node, dict))

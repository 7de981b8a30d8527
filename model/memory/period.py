"""A scan over layers of several kinds with a period: two in Gemma 2, six in Gemma 3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Each body's results, stacked over the whole periods; and those of the leftover layers.
Results = tuple[tuple[Any, ...], tuple[Any, ...]]


def scan_periods(
    bodies: Sequence[Callable],
    carry: Any,
    layers: Any,
    saved: Results | None = None,
    reverse: bool = False,
    remat: Callable[[Callable], Callable] = lambda run: run,
    start: int | jax.Array = 0,
    count: int | None = None,
) -> tuple[Any, Results]:
    """Like `lax.scan` with bodies[i % P] running layer i, for P bodies: a step of the scan is one
    period, and leftover layers run after it.

    Args:
      bodies: (carry, layer) -> (carry, results); `layer` is a pair with the saved results if
        `saved` is passed.
      layers: a tree of arrays with the layers on the leading axis.
      saved: results of an earlier scan of the same layers.
      reverse: runs the last layer first.
      remat: applied to the function that runs one layer. That function extracts the layer from its
        period: `jax.checkpoint` keeps a second copy of its arguments, unless they are the scan's.
      start, count: the layers to run, if not all. Host arrays then hold all layers, others only
        these.
    """
    period = len(bodies)
    if period == 1 and count is None:
        carry, results = lax.scan(
            remat(bodies[0]),
            carry,
            layers if saved is None else (layers, saved[0][0]),
            reverse=reverse,
        )
        return carry, ((results,), ())
    whole, left = divmod(count or jax.tree.leaves(layers)[0].shape[0], period)
    end = whole * period
    on_device, with_host = split_by_memory(layers)
    periods = [(x[:end] if left else x).reshape(whole, period, *x.shape[1:]) for x in on_device]

    def run(carry, number, on_device, saved, layers_of_period):
        """Runs the first layers of the period `number`, given their device arrays."""
        results = [None] * layers_of_period
        for i in reversed(range(layers_of_period)) if reverse else range(layers_of_period):

            def run_layer(carry, number, on_device, saved, i=i):
                index = start + number * period + i
                layer = jax.tree.map(
                    lambda x: (
                        lax.dynamic_index_in_dim(x, index, keepdims=False)
                        if _is_on_host(x)
                        else x[i]
                    ),
                    with_host(on_device),
                )
                return bodies[i](carry, layer if saved is None else (layer, saved))

            carry, results[i] = remat(run_layer)(carry, number, on_device, saved and saved[i])
        return carry, tuple(results)

    def run_whole(carry):
        return lax.scan(
            lambda carry, xs: run(carry, *xs, period),
            carry,
            (jnp.arange(whole), periods, saved and saved[0]),
            reverse=reverse,
        )

    def run_left(carry):
        return run(carry, whole, [x[end:] for x in on_device], saved and saved[1], left)

    if reverse:
        carry, of_left = run_left(carry)
        carry, of_whole = run_whole(carry)
    else:
        carry, of_whole = run_whole(carry)
        carry, of_left = run_left(carry)
    return carry, (of_whole, of_left)


def split_by_memory(layers: Any) -> tuple[list[jax.Array], Callable[[Sequence[jax.Array]], Any]]:
    """Returns a tree's device arrays, and a function that replaces them and returns the tree.

    A scan passes on parts of the former. Host arrays must be indexed in place: the TPU compiler
    takes nothing out of a reshaped array there.
    """
    leaves, tree = jax.tree.flatten(layers)

    def with_host(on_device):
        replacements = iter(on_device)
        return jax.tree.unflatten(
            tree, [x if _is_on_host(x) else next(replacements) for x in leaves]
        )

    return [x for x in leaves if not _is_on_host(x)], with_host


def _is_on_host(x: jax.Array) -> bool:
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def unzipped(results: Results) -> tuple[Results, Results]:
    """Returns each layer's first results and second results, if bodies return pairs."""
    of_whole, of_left = results
    firsts, seconds = (
        (tuple(pair[i] for pair in of_whole), tuple(pair[i] for pair in of_left)) for i in range(2)
    )
    return firsts, seconds


def stacked(results: Results) -> Any:
    """Returns the layers' results on one leading axis, in the order of the layers."""
    of_whole, of_left = results
    if len(of_whole) == 1:
        return of_whole[0]
    joined = jax.tree.map(lambda *xs: jnp.stack(xs, 1).reshape(-1, *xs[0].shape[1:]), *of_whole)
    return jax.tree.map(
        lambda x, *xs: jnp.concatenate([x, jnp.stack(xs)]) if xs else x, joined, *of_left
    )

"""A scan over layers of several kinds, which repeat in a period: two of Gemma 2, six of Gemma 3."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# The results of each body, stacked over the whole periods; and those of the layers that are left over.
Results = tuple[tuple[Any, ...], tuple[Any, ...]]


def scan_periods(bodies: Sequence[Callable], carry: Any, layers: Any, saved: Results | None = None,
                 reverse: bool = False) -> tuple[Any, Results]:
    """Returns what `lax.scan` returns where bodies[i % P] runs layer i, with P bodies: a step of the scan is one period, and
    the layers that are left over run after it.

    Args:
      bodies: (carry, layer) -> (carry, results); `layer` is a pair with the saved results where `saved` is passed.
      layers: a tree of arrays with the layers on the leading axis.
      saved: results of an earlier scan of the same layers.
      reverse: runs the last layer first.
    """
    period = len(bodies)
    whole, left = divmod(jax.tree.leaves(layers)[0].shape[0], period)
    if period == 1:
        carry, results = lax.scan(bodies[0], carry, layers if saved is None else (layers, saved[0][0]), reverse=reverse)
        return carry, ((results,), ())
    end = whole * period
    periods = jax.tree.map(lambda x: (x[:end] if left else x).reshape(whole, period, *x.shape[1:]), layers)

    def run(carry, layers, saved):
        results = [None] * len(layers)
        for i in reversed(range(len(layers))) if reverse else range(len(layers)):
            carry, results[i] = bodies[i](carry, layers[i] if saved is None else (layers[i], saved[i]))
        return carry, tuple(results)

    def run_period(carry, xs):
        layers, saved = xs
        return run(carry, [jax.tree.map(lambda x: x[i], layers) for i in range(period)], saved)  # noqa: B023

    def run_whole(carry):
        return lax.scan(run_period, carry, (periods, saved and saved[0]), reverse=reverse)

    def run_left(carry):
        return run(carry, [jax.tree.map(lambda x: x[end + i], layers) for i in range(left)], saved and saved[1])  # noqa: B023

    if reverse:
        carry, of_left = run_left(carry)
        carry, of_whole = run_whole(carry)
    else:
        carry, of_whole = run_whole(carry)
        carry, of_left = run_left(carry)
    return carry, (of_whole, of_left)


def stacked(results: Results) -> Any:
    """Returns the layers' results on one leading axis, in the order of the layers."""
    of_whole, of_left = results
    if len(of_whole) == 1:
        return of_whole[0]
    joined = jax.tree.map(lambda *xs: jnp.stack(xs, 1).reshape(-1, *xs[0].shape[1:]), *of_whole)
    return jax.tree.map(lambda x, *xs: jnp.concatenate([x, jnp.stack(xs)]) if xs else x, joined, *of_left)

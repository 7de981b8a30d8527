"""A scan over layers of several kinds with a period: two in Gemma 2, six in Gemma 3."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

# From a carry and a layer's arrays (paired with its saved results, if any) to the next carry and
# the layer's results.
Body = Callable[[Any, Any], tuple[Any, Any]]
# Each body's results, stacked over the whole periods; and those of the leftover layers.
Results = tuple[tuple[PyTree[Array], ...], tuple[PyTree[Array], ...]]


def scan_periods(
    bodies: Sequence[Body],
    carry: PyTree[Array],
    layers: PyTree[Array],
    saved: Results | None = None,
    reverse: bool = False,
    remat: Callable[[Body], Callable] = lambda run: run,
    start: int | jax.Array = 0,
    count: int | None = None,
) -> tuple[PyTree[Array], Results]:
    """Like `lax.scan` with bodies[i % P] running layer i, for P bodies: a step of the scan is one
    period, and leftover layers run after it.

    Args:
      bodies: (carry, layer) -> (carry, results); `layer` is a pair with the saved results if
        `saved` is passed.
      layers: arrays [N, ...], with the layers on the leading axis.
      saved: results of an earlier scan of the same layers.
      reverse: runs the last layer first.
      remat: applied to the function that runs one layer. That function extracts the layer from its
        period: `jax.checkpoint` keeps a second copy of its arguments, unless they are the scan's.
      start, count: the layers to run, if not all. Host arrays then hold all layers, others only
        these.
    """
    if len(bodies) == 1 and count is None:
        xs = layers if saved is None else (layers, saved[0][0])
        carry, results = lax.scan(remat(bodies[0]), carry, xs, reverse=reverse)
        return carry, ((results,), ())
    period = len(bodies)
    whole, left = divmod(count or jax.tree.leaves(layers)[0].shape[0], period)
    end = whole * period
    on_device, with_host = split_by_memory(layers)
    periods = [(x[:end] if left else x).reshape(whole, period, *x.shape[1:]) for x in on_device]
    run = _Periods(bodies, with_host, remat, reverse, start).run

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


@dataclasses.dataclass(frozen=True)
class _Periods:
    """Runs the layers of a period in turn.

    Attributes:
      bodies: of the P layers of a period.
      with_host: as from `split_by_memory`.
      remat, reverse, start: as in `scan_periods`.
    """

    bodies: Sequence[Body]
    with_host: Callable[[Sequence[jax.Array]], PyTree[Array]]
    remat: Callable[[Body], Callable]
    reverse: bool
    start: int | jax.Array

    def run(
        self,
        carry: PyTree[Array],
        number: int | jax.Array,
        on_device: Sequence[jax.Array],
        saved: tuple[PyTree[Array], ...] | None,
        layers: int,
    ) -> tuple[PyTree[Array], tuple[PyTree[Array], ...]]:
        """Runs the first `layers` layers of the period `number`; returns the carry, and each
        layer's results.

        Args:
          on_device: this period's device arrays, [P, ...] each.
          saved: each layer's saved results, if any.
        """
        results: list[Any] = [None] * layers
        for i in reversed(range(layers)) if self.reverse else range(layers):
            run_layer = self.remat(functools.partial(self._run_layer, i))
            carry, results[i] = run_layer(carry, number, on_device, saved and saved[i])
        return carry, tuple(results)

    def _run_layer(self, i: int, carry, number, on_device, saved):
        """Runs layer i of the period `number`."""
        index = self.start + number * len(self.bodies) + i
        layer = jax.tree.map(
            lambda x: (
                lax.dynamic_index_in_dim(x, index, keepdims=False) if _is_on_host(x) else x[i]
            ),
            self.with_host(on_device),
        )
        return self.bodies[i](carry, layer if saved is None else (layer, saved))


def split_by_memory(
    layers: PyTree[Array],
) -> tuple[list[jax.Array], Callable[[Sequence[jax.Array]], PyTree[Array]]]:
    """Returns a tree's device arrays, and a function that replaces them and returns the tree.

    The former are sliced by a scan. Host arrays must be indexed in place: the TPU compiler cannot
    index a reshaped array in host memory.
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


def stacked(results: Results) -> PyTree[Array]:
    """Returns the layers' results on one leading axis, in the order of the layers."""
    of_whole, of_left = results
    if len(of_whole) == 1:
        return of_whole[0]
    joined = jax.tree.map(lambda *xs: jnp.stack(xs, 1).reshape(-1, *xs[0].shape[1:]), *of_whole)
    return jax.tree.map(
        lambda x, *xs: jnp.concatenate([x, jnp.stack(xs)]) if xs else x, joined, *of_left
    )

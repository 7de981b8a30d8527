"""Attention in groups of heads, one group after the other: queries, keys, values, partial results and the gradients of all
these exist for one group at a time.

A group is projected and attends; its output takes its place among those of all heads. Kept for the backward are the layer's
input, that output and its lse: there each group is projected once more, and attends only backward.
"""
from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from model.attention import AttentionOp, AttentionPartial, Keys, Queries, TokenCoords, keep

from .chunked import cast


def attend_in_groups(project: Callable, op: AttentionOp, groups: int, weights: dict, x: jax.Array, positions: jax.Array,
                     coords: TokenCoords, dtype) -> tuple[jax.Array, jax.Array]:
    """x, and attention's output of all heads [B, T, Hq, D] (inside `shard_map`).

    x passes through, so that in the backward each group's share is added to the gradient that comes in, where it lies.

    Args:
      project: (weights, x, positions) -> x, q, k, v of those heads that the weights have; closes over no traced value.
      groups: how many; divides the heads and the key heads of the weights.
      weights: whole, float32 by type, with values of the compute precision `dtype`; those called `proj` have the heads on
        their last axis but one: [E, H, D], [H, D].
      x: the layer's input [B, T, E]; positions: int32 [B, T].
    """
    @jax.custom_vjp
    def run(*arrays):
        return forward(*arrays)[0]

    def forward(weights, x, positions, coords):
        weights = cast(weights, dtype)

        def one(i):
            _, q, k, v = project(group_of(weights, i, groups), x, positions)
            return op.forward(Queries(q, coords), Keys(k, v, coords))

        def add(kept, i):
            out, lse = one(i)
            return (put(kept[0], out, i, 2), put(kept[1], lse, i, 1)), None

        out, lse = jax.eval_shape(one, 0)
        kept = all_heads(out, 2, groups), all_heads(lse, 1, groups)
        out, lse = keep(*lax.scan(add, kept, jnp.arange(groups))[0])
        return (x, out), (weights, x, positions, coords, out, lse)

    def backward(residuals, gradients):
        weights, x, positions, coords, out, lse = residuals
        dx, dout = gradients

        def add(carry, i):
            dx, dw = carry
            (_, q, k, v), pull = jax.vjp(lambda w, x: project(w, x, positions), group_of(weights, i, groups), x)
            result = AttentionPartial(take(out, i, 2, groups), take(lse, i, 1, groups))
            gradients = op.backward(Queries(q, coords), Keys(k, v, coords), result, take(dout, i, 2, groups))
            more, dx = pull((dx, *gradients))
            return (dx, {name: put(dw[name], g, i, g.ndim - 2) if "proj" in name else dw[name] + g
                         for name, g in more.items()}), None

        (dx, dw), _ = lax.scan(add, (dx, {name: jnp.zeros(w.shape, jnp.float32) for name, w in weights.items()}),
                               jnp.arange(groups))
        return dw, dx, None, None

    run.defvjp(forward, backward)
    return run(weights, x, positions, coords)


def group_of(weights: dict, i, groups: int) -> dict:
    """The weights of group i, float32 by type, from those of all heads in the compute precision."""
    return {name: take(w, i, w.ndim - 2, groups) if "proj" in name else w for name, w in cast(weights, jnp.float32).items()}


def all_heads(part, axis: int, groups: int) -> jax.Array:
    """Zeros for all heads, of one group's shape and type."""
    return jnp.zeros([n * groups if i == axis else n for i, n in enumerate(part.shape)], part.dtype)


def take(x: jax.Array, i, axis: int, groups: int) -> jax.Array:
    """Group i of the heads, which lie along `axis`."""
    size = x.shape[axis] // groups
    return lax.dynamic_slice_in_dim(x, i * size, size, axis)


def put(x: jax.Array, part: jax.Array, i, axis: int) -> jax.Array:
    """All heads, with `part` as their group i."""
    return lax.dynamic_update_slice_in_dim(x, part, i * part.shape[axis], axis)

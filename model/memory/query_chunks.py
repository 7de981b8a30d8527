"""A layer in chunks of queries, one after the other, each from its projection to the layer's output: attention and feed-forward
fused, after Blockwise Parallel Transformer and Ring Attention's Algorithm 1.

Keys and values of all of a device's tokens are projected first. A chunk of tokens then meets the keys of all shards and goes on
through the feed-forward, and its output takes the place of its input: queries, attention's output and the gradients of both
never exist for more than a chunk. Kept for the backward is the layer's input alone; there each chunk is projected and attends
once more, and what it leaves for the keys and values is added up in float32. Those sums take 8 bytes for each token and number
of a key head, output and gradient together took 4 for each of a query head: memory is spared where more than two of these share
a key head.

With groups of heads (`head_groups.py`) a chunk attends group by group, and each group's keys and values are projected again.

The price is traffic: keys and values (backward also their gradients) go round once for each chunk. The kernels hide that as
long as a chunk's take longer than its transfers: with long contexts.
"""
from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from model.attention import AttentionOp, AttentionPartial, Keys, Queries, TokenCoords

from .chunked import cast, over_chunks
from .head_groups import all_heads, group_of, put, take


def layer_in_chunks(project: Callable, finish: Callable, op: AttentionOp, chunks: int, groups: int, weights: dict, x: jax.Array,
                    positions: jax.Array, coords: TokenCoords, dtype) -> jax.Array:
    """A layer's output [B, T, E] (inside `shard_map`).

    Args:
      project: (weights, x, positions, which) -> x, and of q, k, v those that `which` names, with the heads of the weights.
      finish: (weights, x, attention's output) -> the layer's output. Both are position-wise and close over no traced value.
      chunks: how many; divides T. groups: as of `attend_in_groups`.
      weights: the layer's, whole, float32 by type, with values of the compute precision `dtype`.
      x: the layer's input [B, T, E]; positions: int32 [B, T].

    Raises:
      ValueError: chunks that do not divide T.
    """
    size, rest = divmod(x.shape[1], chunks)
    if rest:
        raise ValueError(f"memory.query_chunks: {chunks} does not divide the {x.shape[1]} tokens of a device")

    def source(narrow, x, positions, coords):
        """What the chunks take keys, values and coordinates from: with groups x, of which each group's are projected anew."""
        held = project(cast(narrow, jnp.float32), x, positions, "kv")[1:] if groups == 1 else (x, positions)
        return held, coords

    def keys(narrow, held, i):
        return held if groups == 1 else project(group_of(narrow, i, groups), *held, "kv")[1:]

    def attended(narrow, source, q, mine):
        """out and lse of all heads, for a chunk of queries."""
        held, coords = source

        def one(i):
            return op.forward(Queries(take(q, i, 2, groups), mine), Keys(*keys(narrow, held, i), coords))

        def add(found, i):
            out, lse = one(i)
            return (put(found[0], out, i, 2), put(found[1], lse, i, 1)), None

        out, lse = jax.eval_shape(one, 0)
        return lax.scan(add, (all_heads(out, 2, groups), all_heads(lse, 1, groups)), jnp.arange(groups))[0]

    def gradients(dkv, narrow, source, q, mine, out, lse, dout):
        """The chunk's dk and dv added to `dkv`, float32, and its dq, in q's dtype."""
        held, coords = source

        def add(found, i):
            dkv, dq = found
            result, dout_group = AttentionPartial(take(out, i, 2, groups), take(lse, i, 1, groups)), take(dout, i, 2, groups)
            dq_here, *here = op.gradients(Queries(take(q, i, 2, groups), mine), Keys(*keys(narrow, held, i), coords), result,
                                          dout_group)
            dkv = [put(total, take(total, i, 2, groups) + g, i, 2) for total, g in zip(dkv, here, strict=True)]
            return (dkv, put(dq, dq_here.astype(q.dtype), i, 2)), None

        return lax.scan(add, (dkv, jnp.zeros_like(q)), jnp.arange(groups))[0]

    @jax.custom_vjp
    def run(*arrays):
        return forward(*arrays)[0]

    def forward(weights, x, positions, coords):
        narrow = cast(weights, dtype)

        def one(source, part):
            # Behind the barrier, nothing of the keys is the same for all chunks: differentiation would keep what is.
            source, (x, positions, mine) = lax.optimization_barrier((source, part))
            wide = cast(narrow, jnp.float32)
            _, q = project(wide, x, positions, "q")
            return source, finish(wide, x, attended(narrow, source, q, mine)[0])

        residuals = (narrow, x, positions, coords)
        return over_chunks(one, source(*residuals), residuals[1:], size)[1], residuals

    def backward(residuals, dy):
        narrow, x, positions, coords = residuals

        def one(sums, part):
            dw, dkv, source = sums
            source, (x, positions, mine, dy) = lax.optimization_barrier((source, part))
            wide = cast(narrow, jnp.float32)
            (_, q), pull = jax.vjp(lambda w, x: project(w, x, positions, "q"), wide, x)
            out, lse = attended(narrow, source, q, mine)
            finished, dx, dout = jax.vjp(finish, wide, x, out)[1](dy)
            dkv, dq = gradients(dkv, narrow, source, q, mine, out, lse, dout)
            projected, dx = pull((dx, dq))
            return (jax.tree.map(lambda *parts: sum(parts), dw, finished, projected), dkv, source), dx

        (_, *kv), pull = jax.vjp(lambda w, x: project(w, x, positions, "kv"), cast(narrow, jnp.float32), x)
        dw, dkv = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (narrow, kv))
        (dw, dkv, _), dx = over_chunks(one, (dw, dkv, source(*residuals)), (x, positions, coords, dy), size)
        more, dx = pull((dx, *(d.astype(k.dtype) for d, k in zip(dkv, kv, strict=True))))
        return jax.tree.map(jnp.add, dw, more), dx, None, None

    run.defvjp(forward, backward)
    return run(weights, x, positions, coords)

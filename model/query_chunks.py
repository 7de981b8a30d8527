"""A layer in chunks of queries, one after the other, each from its projection to the layer's output: attention and feed-forward
fused, after Blockwise Parallel Transformer and Ring Attention's Algorithm 1.

Keys and values of all of a device's tokens are projected first. A chunk of tokens then meets the keys of all shards and goes on
through the feed-forward, and its output takes the place of its input: queries, attention's output and the gradients of both
never exist for more than a chunk. Kept for the backward is the layer's input alone; there each chunk is projected and attends
once more, and what it leaves for the keys and values is added up in float32.

The price is traffic: keys and values (backward also their gradients) go round once for each chunk. The kernels hide that as
long as a chunk's take longer than its transfers: with long contexts.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .attention import Attending, TokenCoords
from .attention.schedules import SCHEDULES
from .chunked import cast, over_chunks
from .head_groups import all_heads, put, take

POLICIES = ("nothing", "offload", "every_k", "offload_every_k")


def check(chunks: int, remat: str, sequence_parallel: bool, schedule) -> None:
    """ValueError, in one line, for what cannot go with chunks of queries."""
    if chunks == 1:
        return
    field = f"memory.query_chunks: {chunks} chunks"
    if remat not in POLICIES:
        raise ValueError(f"{field} keep nothing of attention, so memory.remat {remat} cannot be; {', '.join(POLICIES)} can")
    if sequence_parallel:
        raise ValueError(f"{field} need all of a rank's tokens, which mesh.sequence_parallel splits; use one of the two")
    while schedule is not None:
        if getattr(schedule, "ordered", False) and isinstance(schedule, SCHEDULES["balanced"]):
            others = ", ".join(name for name in SCHEDULES if name not in ("balanced", "local"))
            raise ValueError(f"{field}: balanced, over a contiguous layout, trades queries for as many keys; other layouts can, "
                             f"and {others}")
        schedule = getattr(schedule, "inner", None)


@dataclasses.dataclass(frozen=True)
class InGroups:
    """Attention of a shard's queries in groups of heads, one after the other: one group's keys and values travel at a time."""

    how: Attending
    groups: int

    def forward(self, q, k, v, *coords):
        """As `Attending.forward`."""
        def one(i):
            return self.how.forward(*(take(x, i, 2, self.groups) for x in (q, k, v)), *coords)

        def add(found, i):
            out, lse = one(i)
            return (put(found[0], out, i, 2), put(found[1], lse, i, 1)), None

        out, lse = jax.eval_shape(one, 0)
        return lax.scan(add, (all_heads(out, 2, self.groups), all_heads(lse, 1, self.groups)), jnp.arange(self.groups))[0]

    def gradients(self, dkv, q, k, v, q_coords, kv_coords, out, lse, dout):
        """(dk, dv) added to `dkv`, float32, and dq in q's dtype."""
        def add(found, i):
            *dkv, dq = found
            *qkv, here, dhere = (take(x, i, 2, self.groups) for x in (q, k, v, out, dout))
            more = self.how.gradients(*qkv, q_coords, kv_coords, here, take(lse, i, 1, self.groups), dhere, 0.0)
            dkv = (put(x, take(x, i, 2, self.groups) + y, i, 2) for x, y in zip(dkv, more[1:], strict=True))
            return (*dkv, put(dq, more[0].astype(dq.dtype), i, 2)), None

        *dkv, dq = lax.scan(add, (*dkv, jnp.zeros_like(q)), jnp.arange(self.groups))[0]
        return tuple(dkv), dq


def layer_in_chunks(project: Callable, finish: Callable, how: InGroups, chunks: int, weights: dict, x: jax.Array,
                    positions: jax.Array, coords: TokenCoords, dtype) -> jax.Array:
    """A layer's output [B, T, E] (inside `shard_map`).

    Args:
      project: (weights, x, positions, which) -> x and those of q, k, v that `which` names.
      finish: (weights, x, attention's output) -> the layer's output. Both are position-wise and close over no traced value.
      chunks: how many; divides T.
      weights: the layer's, whole, float32 by type, with values of the compute precision `dtype`.
      x: the layer's input [B, T, E]; positions: int32 [B, T].

    Raises:
      ValueError: chunks that do not divide T.
    """
    size = chunk_size(x.shape[1], chunks)

    @jax.custom_vjp
    def run(*arrays):
        return forward(*arrays)[0]

    def forward(weights, x, positions, coords):
        narrow = cast(weights, dtype)
        _, *keys = project(cast(narrow, jnp.float32), x, positions, "kv")

        def one(keys, part):
            keys, (x, positions, mine) = lax.optimization_barrier((keys, part))
            wide = cast(narrow, jnp.float32)
            _, q = project(wide, x, positions, "q")
            return keys, finish(wide, x, how.forward(q, *keys, mine, coords)[0])

        # The keys are carried: else what the first chunk sends of each group of them is kept for all others.
        return over_chunks(one, keys, (x, positions, coords), size)[1], (narrow, x, positions, coords)

    def backward(residuals, dy):
        narrow, x, positions, coords = residuals
        (_, *keys), pull_keys = jax.vjp(lambda w, x: project(w, x, positions, "kv"), cast(narrow, jnp.float32), x)

        def one(sums, part):
            dw, dkv, keys = sums
            keys, (x, positions, mine, dy) = lax.optimization_barrier((keys, part))
            wide = cast(narrow, jnp.float32)
            (_, q), pull_queries = jax.vjp(lambda w, x: project(w, x, positions, "q"), wide, x)
            out, lse = how.forward(q, *keys, mine, coords)
            here, dx, dout = jax.vjp(finish, wide, x, out)[1](dy)
            dkv, dq = how.gradients(dkv, q, *keys, mine, coords, out, lse, dout)
            more, dx = pull_queries((dx, dq))
            return (jax.tree.map(lambda *parts: sum(parts), dw, here, more), dkv, keys), dx

        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (narrow, tuple(keys)))
        (dw, dkv, _), dx = over_chunks(one, (*empty, keys), (x, positions, coords, dy), size)
        more, dx = pull_keys((dx, *(d.astype(k.dtype) for d, k in zip(dkv, keys, strict=True))))
        return jax.tree.map(jnp.add, dw, more), dx, None, None

    run.defvjp(forward, backward)
    return run(weights, x, positions, coords)


def chunk_size(tokens: int, chunks: int) -> int:
    """Tokens in each of so many chunks."""
    if tokens % chunks:
        good = [n for n in range(1, min(tokens, 64) + 1) if tokens % n == 0]
        raise ValueError(f"memory.query_chunks: {chunks} does not divide the {tokens} tokens of a device; "
                         f"{', '.join(map(str, good))} do")
    return tokens // chunks

"""Ring self-attention, RSA (Li et al., Sequence Parallelism, 2023): K round the ring, softmax, then
V round the ring.

The baseline before blockwise attention: every rank holds the scores of its queries against all
keys, Hq T P T float32 numbers, growing with the whole sequence. Forward: each rank receives K and
then V of the others, 2 (P - 1) T Hkv D numbers in 2 (P - 1) hops, and the coordinates with K. The
paper keeps the softmax weights for the backward; here they are recomputed from lse: K (with
coordinates), V and K go round, and dV and dK in float32 follow the last two one hop behind
(`ring_pass.py`), P hops each.

The kernel is not used: the scores are plain matrix products in float32, as in the paper.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ..blocks import BackwardInputs, Gradients, Keys, Queries
from ..coords import Mask, TokenCoords, visible
from ..kernels.kernel import Kernel
from ..kernels.reference import group_heads
from ..kernels.softcap import capped, with_slope
from ..partial import AttentionPartial
from . import plan
from .ring_pass import ring_pass
from .schedule import Context, Schedule


@dataclasses.dataclass(frozen=True)
class RingSelfAttention(Schedule):
    """The scores of all keys on each rank."""

    def forward(
        self, kernel: Kernel, queries: Queries, keys: Keys, context: Context
    ) -> AttentionPartial:
        q, k, v, ranks = queries.q, keys.k, keys.v, context.ranks
        scores = _all_scores(
            group_heads(q, k.shape[2]), queries.coords, keys, context, kernel.softcap
        )
        highest = scores.max((0, -1), keepdims=True)
        weights = jnp.exp(scores - jnp.where(jnp.isneginf(highest), 0.0, highest))
        total = weights.sum((0, -1), keepdims=True)
        nonzero = jnp.where(total == 0, 1.0, total)
        weights = weights / nonzero

        def visit(carry, v):
            i, out = carry
            return (i + 1, out + _product("bhgqk,bkhd->bqhgd", weights[i], v)), (), ()

        batch, length, heads, head_dim = q.shape
        empty = jnp.zeros((batch, length, k.shape[2], heads // k.shape[2], head_dim), jnp.float32)
        (_, out), _, _ = ring_pass(v, ranks.size - 1, ranks.shift, ranks.shift, visit, (0, empty))
        lse = jnp.where(total == 0, -jnp.inf, highest + jnp.log(nonzero))[0]
        return AttentionPartial(out.reshape(q.shape), lse.reshape(batch, heads, length))

    def backward(
        self, kernel: Kernel, queries: Queries, keys: Keys, saved: BackwardInputs, context: Context
    ) -> Gradients:
        q, k, v, ranks, scale = queries.q, keys.k, keys.v, context.ranks, context.scale
        batch, length = q.shape[:2]
        grouped, dout = group_heads(q, k.shape[2]), group_heads(saved.dout, k.shape[2])
        lse, delta = (x.reshape(batch, k.shape[2], -1, length, 1) for x in (saved.lse, saved.delta))
        scores = _all_scores(grouped, queries.coords, keys, context, kernel.softcap)
        weights = jnp.exp(scores - jnp.where(jnp.isneginf(lse), 0.0, lse))

        def visit_values(i, v):
            dweights = _product("bhgqd,bkhd->bhgqk", dout, v)
            dv = _product("bhgqk,bhgqd->bkhd", weights[i], dout)
            return (
                i + 1,
                dv,
                with_slope(weights[i] * (dweights - delta), scores[i], kernel.softcap) * scale,
            )

        _, dv, dscores = ring_pass(v, ranks.size - 1, ranks.shift, ranks.shift, visit_values, 0)

        def visit_keys(carry, k):
            i, dq = carry
            dk = _product("bhgqk,bhgqd->bkhd", dscores[i], grouped)
            return (i + 1, dq + _product("bhgqk,bkhd->bqhgd", dscores[i], k)), dk, ()

        zero = jnp.zeros((batch, length, *grouped.shape[1:3], grouped.shape[-1]), jnp.float32)
        (_, dq), dk, _ = ring_pass(
            k, ranks.size - 1, ranks.shift, ranks.shift, visit_keys, (0, zero)
        )
        return Gradients(dq.reshape(q.shape), dk, dv)

    def plan(self, size: int, block: plan.Block, mask: Mask = Mask()) -> plan.Plan:
        """In each ring pass every block of queries is combined with every block of keys, for some
        of the products; no tile is skipped."""
        del mask

        def send(name, nbytes):
            return plan.Send(name, plan.PERMUTE, nbytes, plan.shift(size))

        def rounds(products, sends, follows=(), first=True):
            for i in range(size):
                tasks = tuple(
                    plan.Task(rank, (rank,), ((rank - i) % size,), products=products, dense=True)
                    for rank in range(size)
                )
                passed_on = sends if i < size - 1 and (i or first) else ()
                yield plan.Round(tasks, (*passed_on, *(follows if i else ())))
            yield plan.Round(
                (), tuple(send._replace(arrays=f"{send.arrays} home") for send in follows)
            )

        keys, values = send("K", block.keys // 2), send("V", block.keys // 2)
        dk, dv = send("dK", block.key_gradients // 2), send("dV", block.key_gradients // 2)
        with_keys = [keys, send("coordinates", block.coords)]
        # The first hop of K's second pass is the same transfer as that of its first pass: compilers
        # merge the two.
        return plan.Plan(
            (*rounds((1, 2), with_keys), *rounds((1, 2), [values])),
            (
                *rounds((1, 5), with_keys),
                *rounds((2, 5), [values], [dv]),
                *rounds((2, 5), [keys], [dk], first=False),
            ),
        )


def _all_scores(
    q: Float[Array, "B Hkv G T D"],
    coords: TokenCoords,
    keys: Keys,
    context: Context,
    softcap: float | None,
) -> Float[Array, "P B Hkv G T T"]:
    """Scores of the grouped queries `q` against every rank's keys, in the order in which they
    arrive; hidden ones are -inf."""

    def visit(carry, block):
        k, kv_coords = block
        seen = visible(coords, kv_coords, context.mask)[:, None, None]
        scores = capped(_product("bhgqd,bkhd->bhgqk", q, k) * context.scale, softcap)
        return carry, (), jnp.where(seen, scores, -jnp.inf)

    shift = context.ranks.shift
    return ring_pass((keys.k, keys.coords), context.ranks.size - 1, shift, shift, visit).outputs


def _product(dims: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(dims, a, b.astype(jnp.float32), precision=lax.Precision.HIGHEST)

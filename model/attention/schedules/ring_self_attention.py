"""Ring self-attention, RSA (Li et al., Sequence Parallelism, 2023): K round the ring, softmax, then V round the ring.

The baseline before blockwise attention: every rank holds its queries' scores against all keys, Hq T P T float32 numbers, which
grow with the whole sequence. Forward: each rank receives the K, then the V of the others, 2 (P - 1) T Hkv D numbers in
2 (P - 1) hops, and coordinates with K. The paper keeps the weights for the backward; here they are made again from lse: K
(with coordinates), V, K go round, and the float32 dV and dK follow the last two one hop behind (`ring_pass.py`), P hops each.

No kernel is asked: scores are plain matrix products, as the paper has them, in float32.
"""
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from ..blocks import Gradients, Keys, Queries, Saved
from ..coords import Mask, TokenCoords, visible
from ..kernels.kernel import Kernel
from ..kernels.reference import group_heads
from ..partial import AttentionPartial
from . import plan
from .ring_pass import ring_pass
from .schedule import Context, Schedule


@dataclasses.dataclass(frozen=True)
class RingSelfAttention(Schedule):
    """RSA: scores of the whole row on each rank."""

    def forward(self, kernel: Kernel, queries: Queries, keys: Keys, context: Context) -> AttentionPartial:
        del kernel
        q, k, v, ranks = queries.q, keys.k, keys.v, context.ranks
        scores = _all_scores(group_heads(q, k.shape[2]), queries.coords, keys, context)
        top = scores.max((0, -1), keepdims=True)
        weights = jnp.exp(scores - jnp.where(jnp.isneginf(top), 0.0, top))
        total = weights.sum((0, -1), keepdims=True)
        safe = jnp.where(total == 0, 1.0, total)
        weights = weights / safe

        def visit(found, v):
            stop, out = found
            return (stop + 1, out + _product("bhgqk,bkhd->bqhgd", weights[stop], v)), (), ()

        batch, length, heads, head_dim = q.shape
        empty = jnp.zeros((batch, length, k.shape[2], heads // k.shape[2], head_dim), jnp.float32)
        (_, out), _, _ = ring_pass(v, ranks.size - 1, ranks.shift, ranks.shift, visit, (0, empty))
        lse = jnp.where(total == 0, -jnp.inf, top + jnp.log(safe))[0]
        return AttentionPartial(out.reshape(q.shape), lse.reshape(batch, heads, length))

    def backward(self, kernel: Kernel, queries: Queries, keys: Keys, saved: Saved, context: Context) -> Gradients:
        del kernel
        q, k, v, ranks, scale = queries.q, keys.k, keys.v, context.ranks, context.scale
        batch, length = q.shape[:2]
        grouped, dout = group_heads(q, k.shape[2]), group_heads(saved.dout, k.shape[2])
        lse, delta = (x.reshape(batch, k.shape[2], -1, length, 1) for x in (saved.lse, saved.delta))
        scores = _all_scores(grouped, queries.coords, keys, context)
        weights = jnp.exp(scores - jnp.where(jnp.isneginf(lse), 0.0, lse))

        def visit_values(stop, v):
            dweights = _product("bhgqd,bkhd->bhgqk", dout, v)
            dv = _product("bhgqk,bhgqd->bkhd", weights[stop], dout)
            return stop + 1, dv, weights[stop] * (dweights - delta) * scale

        _, dv, dscores = ring_pass(v, ranks.size - 1, ranks.shift, ranks.shift, visit_values, 0)

        def visit_keys(found, k):
            stop, dq = found
            dk = _product("bhgqk,bhgqd->bkhd", dscores[stop], grouped)
            return (stop + 1, dq + _product("bhgqk,bkhd->bqhgd", dscores[stop], k)), dk, ()

        zero = jnp.zeros((batch, length, *grouped.shape[1:3], grouped.shape[-1]), jnp.float32)
        (_, dq), dk, _ = ring_pass(k, ranks.size - 1, ranks.shift, ranks.shift, visit_keys, (0, zero))
        return Gradients(dq.reshape(q.shape), dk, dv)

    def plan(self, size: int, block: plan.Block, mask: Mask = Mask()) -> plan.Plan:
        """Every query block meets every key block in each tour, for some of the products; no tile is skipped."""
        del mask

        def send(what, nbytes):
            return plan.Send(what, plan.PERMUTE, nbytes, plan.shift(size))

        def rounds(products, sends, follows=(), first=True):
            for stop in range(size):
                tasks = tuple(plan.Task(rank, (rank,), ((rank - stop) % size,), products=products, dense=True)
                              for rank in range(size))
                going = sends if stop < size - 1 and (stop or first) else ()
                yield plan.Round(tasks, (*going, *(follows if stop else ())))
            yield plan.Round((), tuple(one._replace(what=f"{one.what} home") for one in follows))

        keys, values = send("K", block.keys // 2), send("V", block.keys // 2)
        dk, dv = send("dK", block.key_gradients // 2), send("dV", block.key_gradients // 2)
        with_keys = [keys, send("coordinates", block.coords)]
        # K's first hop of its second tour is the first tour's: compilers make one of the two.
        return plan.Plan(
            (*rounds((1, 2), with_keys), *rounds((1, 2), [values])),
            (*rounds((1, 5), with_keys), *rounds((2, 5), [values], [dv]), *rounds((2, 5), [keys], [dk], first=False)))


def _all_scores(q, coords: TokenCoords, keys: Keys, context: Context):
    """Scores against every rank's keys, in the order of their coming: float32 [P, B, Hkv, G, T, T], hidden ones -inf."""
    def visit(carry, block):
        k, kv_coords = block
        seen = visible(coords, kv_coords, context.mask)[:, None, None]
        scores = _product("bhgqd,bkhd->bhgqk", q, k) * context.scale
        return carry, (), jnp.where(seen, scores, -jnp.inf)

    shift = context.ranks.shift
    return ring_pass((keys.k, keys.coords), context.ranks.size - 1, shift, shift, visit).outputs


def _product(dims: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(dims, a, b.astype(jnp.float32), precision=lax.Precision.HIGHEST)

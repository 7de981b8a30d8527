"""Balanced ring (DistFlashAttn, section 3.2): idle ranks help the busy ones; P // 2 rounds instead of P - 1.

With causal attention over contiguous blocks, rank p has p + 1 blocks to do. In round t the ranks p >= t fetch K, V of rank
p - t; the ranks p < t, which have none left, fetch the queries of rank p - t + P instead, meet them with their own K, V, and
send (out, lse) back to be merged. Distances t and P - t are done in one round, so for odd P nobody idles; even P repeats
distance P/2 in its last round, where the owners work alone, or with `split` owner and helper take half of the queries each.
Forward, K and V travel to owners, Q to helpers and a float32 partial back (Appendix C: 3Nd); backward the queries' side is
q, dout, lse, delta, with dQ back to the helped and dK, dV back to where K, V came from.

That is exact only where no query sees keys of a later rank: causal, and shards `ordered`. Elsewhere (striped, zigzag, not
causal) both blocks of a pair of ranks may hold work: every rank fetches both sides and does both, still in P // 2 rounds.

Sliding windows over ordered shards: rounds of ranks out of reach are left out, and helpers where the ranks they would help are.
"""
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ..coords import Mask
from ..partial import AttentionPartial, merge
from . import plan


@dataclasses.dataclass(frozen=True)
class Balanced:
    """DistFlashAttn. split: for even P, owner and helper share the last round; ordered: shards hold runs of tokens."""

    split: bool = False
    ordered: bool = False

    def forward(self, kernel, q, k, v, q_coords, kv_coords, *, ranks, mask, scale):
        def meet(queries, keys):
            (q, q_coords), (k, v, kv_coords) = queries, keys
            return kernel.forward(q, k, v, q_coords, kv_coords, mask=mask, scale=scale), ()

        partial, _ = self._rounds(ranks, mask, (q, q_coords), (k, v, kv_coords), meet, merge)
        return partial

    def backward(self, kernel, q, k, v, dout, lse, delta, q_coords, kv_coords, *, ranks, mask, scale):
        def meet(queries, keys):
            (q, dout, lse, delta, q_coords), (k, v, kv_coords) = queries, keys
            dq, dk, dv = kernel.backward(q, k, v, dout, lse, delta, q_coords, kv_coords, mask=mask, scale=scale)
            return dq, (dk, dv)

        dq, dkv = self._rounds(ranks, mask, (q, dout, lse, delta, q_coords), (k, v, kv_coords), meet, jnp.add)
        return dq, *dkv

    def _rounds(self, ranks, mask, queries, keys, meet, add):
        """meet(queries, keys) of every pair of ranks, added up at home: (for the queries, for the keys)."""
        totals = meet(queries, keys)
        reach = mask.reach(queries[0].shape[1], ranks.size) if self.ordered else ranks.size
        for t in range(1, min(ranks.size // 2, reach) + 1):
            if self.ordered and mask.causal:
                one_round = self._ordered_round(ranks, t, queries, keys, meet, helpers=ranks.size - t <= reach)
            else:
                one_round = self._full_round(ranks, t, queries, keys, meet)
            for found, for_keys in one_round:
                totals = add(totals[0], found), jax.tree.map(jnp.add, totals[1], for_keys)
        return totals

    def _full_round(self, ranks, t, queries, keys, meet):
        last = 2 * t == ranks.size  # distances t and P - t are one
        keys_in = ranks.shift(keys, t)
        queries_in = None if last else ranks.shift(queries, t)
        found, for_keys = meet(queries, keys_in)
        yield found, ranks.shift(for_keys, -t)
        if not last:
            found, for_keys = meet(queries_in, keys)
            yield ranks.shift(found, -t), for_keys

    def _ordered_round(self, ranks, t, queries, keys, meet, helpers):
        size, place = ranks.size, ranks.index()
        helping = place < t
        keys_in = ranks.shift(keys, t, range(size - t))
        last = 2 * t == size
        if not helpers or (last and not (self.split and queries[0].shape[1] % 2 == 0)):
            # The ranks that might help get keys of zeros: padding, of which every tile is skipped.
            found, for_keys = meet(queries, keys_in)
            yield _keep(found, ~helping), ranks.shift(for_keys, -t, range(t, size))
            return
        sent, kept = (_half(queries, 0), _half(queries, 1)) if last else (queries, queries)
        queries_in = ranks.shift(sent, t, range(size - t, size))
        found, for_keys = meet(_choose(helping, queries_in, kept), _choose(helping, keys, keys_in))
        back = ranks.shift(found, -t, range(t))
        for_keys = jax.tree.map(jnp.add, _keep(for_keys, helping), ranks.shift(for_keys, -t, range(t, size)))
        if last:  # an owner's two halves
            yield _keep(_join(back, found), ~helping), for_keys
        else:
            yield _keep(found, ~helping), for_keys
            yield _keep(back, place >= size - t), jax.tree.map(jnp.zeros_like, for_keys)

    def plan(self, size: int, block: plan.Block, mask: Mask = Mask()) -> plan.Plan:
        return plan.Plan(*(tuple(self._plan_rounds(size, block, mask, backward)) for backward in (False, True)))

    def _plan_rounds(self, size: int, block: plan.Block, mask: Mask, backward: bool):
        def send(what, nbytes, by, senders=None):
            return plan.Send(what, plan.PERMUTE, nbytes, plan.shift(size, by, senders))

        yield plan.Round(tuple(plan.Task(rank, (rank,), (rank,)) for rank in range(size)))
        there = 2 * block.queries + 2 * block.statistics if backward else block.queries
        ordered = self.ordered and mask.causal
        if ordered:  # elsewhere the coordinates that come with the keys are the queries' own
            there += block.coords
        there_name = "Q, dout, lse, delta" if backward else "Q"
        back_name, back = ("dQ", block.out) if backward else ("out, lse", block.out + block.statistics)
        reach = mask.reach(block.tokens, size) if self.ordered else size
        for t in range(1, min(size // 2, reach) + 1):
            last = 2 * t == size  # distances t and P - t are one
            helps = not ordered or size - t <= reach
            half = last and ordered and helps and self.split and block.tokens % 2 == 0
            helps = half or (helps and not last)
            owners, helped = (range(t, size), range(size - t, size)) if ordered else (range(size), range(size))
            share, of = (0.5, 2) if half else (1, 1)
            tasks = [plan.Task(rank, (rank,), ((rank - t) % size,), (of - 1, of)) for rank in owners]
            sends = [send("K, V", block.keys + block.coords, t, range(size - t) if ordered else None)]
            if backward:
                sends.append(send("dK, dV", block.key_gradients, -t, owners))
            if helps:
                tasks += [plan.Task((rank + t) % size, (rank,), ((rank + t) % size,), (0, of)) for rank in helped]
                sends += [send(there_name, there * share, t, helped),
                          send(back_name, back * share, -t, [(rank + t) % size for rank in helped])]
            yield plan.Round(tuple(tasks), tuple(sends))


def _choose(condition, first, second):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), first, second)


def _keep(tree, condition):
    """The tree, or what adds nothing where `condition` is false."""
    if isinstance(tree, AttentionPartial):
        return AttentionPartial(tree.out, jnp.where(condition, tree.lse, -jnp.inf))
    return jax.tree.map(lambda x: jnp.where(condition, x, 0), tree)


def _tokens(x) -> int:
    """The dimension of tokens: statistics are [B, H, T], everything else is [B, T, ...]."""
    return 2 if x.ndim == 3 else 1


def _half(tree, which: int):
    return jax.tree.map(lambda x: jnp.split(x, 2, _tokens(x))[which], tree)


def _join(first, second):
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], _tokens(a)), first, second)

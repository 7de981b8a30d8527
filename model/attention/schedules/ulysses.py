"""Ulysses (DeepSpeed-Ulysses; USP): an all-to-all trades sequence shards for head shards, attention, and back.

Forward: each rank sends (P-1)/P of its queries, keys, values and outputs: T (2 Hq + 2 Hkv) D numbers, whatever P is, and
gathers all coordinates; then one round. Backward: the same for dout, q, k, v and back for dq, dk, dv. With a `degree` below
P the neighbours trade heads and any inner schedule joins the groups: Unified Sequence Parallelism (USP).

Key heads fewer than ranks are replicated before they travel, just as often as the ranks' query heads need; query heads
that the degree does not divide are padded with heads of zeros.
"""
from __future__ import annotations

import dataclasses
import itertools
import math

import jax.numpy as jnp
import numpy as np

from ..blocks import Gradients, Keys, Queries, Saved
from ..coords import Mask, TokenCoords
from ..kernels.kernel import Kernel
from ..partial import AttentionPartial
from . import plan
from .local import Local
from .ranks import Ranks
from .ring import Ring
from .schedule import Context, Schedule


@dataclasses.dataclass(frozen=True)
class _Heads:
    """Which heads a rank of a line of `degree` gets: `here` query heads, and of key heads those in `key_heads`."""

    query_heads: int
    here: int
    key_heads: np.ndarray

    @classmethod
    def deal(cls, query_heads: int, kv_heads: int, degree: int) -> _Heads:
        group = query_heads // kv_heads
        here = -(-query_heads // degree)
        # Runs of `shared` query heads, aligned with both the ranks' blocks and the groups, have one key head.
        shared = math.gcd(here, group)
        firsts = np.arange(degree * here // shared) * shared
        return cls(query_heads, here, np.minimum(firsts // group, kv_heads - 1))

    def pad(self, x, degree: int, dimension: int):
        """Query heads of zeros, so that `degree` divides them."""
        widths = [(0, 0)] * x.ndim
        widths[dimension] = (0, degree * self.here - self.query_heads)
        return jnp.pad(x, widths)


@dataclasses.dataclass(frozen=True)
class Ulysses(Schedule):
    """Heads for sequence over `degree` neighbours (0: all ranks); `inner` joins the groups (USP)."""

    degree: int = 0
    inner: Schedule = dataclasses.field(default_factory=Ring)

    def check(self, size: int) -> None:
        self._check_divides("degree", size)
        if 0 < self.degree < size:
            self.inner.check(size // self.degree)

    def _lines(self, ranks: Ranks):
        outer, line = ranks.split(self.degree or ranks.size)
        return line, outer, self.inner if outer.size > 1 else Local()

    def forward(self, kernel: Kernel, queries: Queries, keys: Keys, context: Context) -> AttentionPartial:
        line, outer, inner = self._lines(context.ranks)
        heads = _Heads.deal(queries.q.shape[2], keys.k.shape[2], line.size)
        partial = inner.forward(kernel, *_trade(line, heads, queries, keys), dataclasses.replace(context, ranks=outer))
        # In the queries' dtype: the caller rounds to it in any case.
        out = line.exchange(partial.out.astype(queries.q.dtype), 1, 2)[:, :, : heads.query_heads]
        lse = line.exchange(partial.lse, 2, 1)[:, : heads.query_heads]
        return AttentionPartial(out.astype(jnp.float32), lse)

    def backward(self, kernel: Kernel, queries: Queries, keys: Keys, saved: Saved, context: Context) -> Gradients:
        line, outer, inner = self._lines(context.ranks)
        kv_heads = keys.k.shape[2]
        heads = _Heads.deal(queries.q.shape[2], kv_heads, line.size)
        q, k, v = _to_heads(line, heads, queries.q, keys.k, keys.v)
        dout = line.exchange(heads.pad(saved.dout, line.size, 2), 2, 1)
        lse, delta = (line.exchange(heads.pad(x, line.size, 1), 1, 2) for x in (saved.lse, saved.delta))
        q_coords, kv_coords = _coords(line, queries.coords, keys.coords)
        dq, dk, dv = inner.backward(kernel, Queries(q, q_coords), Keys(k, v, kv_coords), Saved(dout, lse, delta),
                                    dataclasses.replace(context, ranks=outer))
        dq = line.exchange(dq, 1, 2)[:, :, : heads.query_heads]
        dkv = line.exchange(jnp.stack([dk, dv]), 2, 3)
        if heads.key_heads.size != kv_heads:  # not by a scatter, which stays one on TPUs
            ends = np.searchsorted(heads.key_heads, np.arange(kv_heads + 1))
            dkv = jnp.stack([dkv[:, :, :, i:j].sum(3) for i, j in itertools.pairwise(ends)], 3)
        return Gradients(dq, *dkv)

    def plan(self, size: int, block: plan.Block, mask: Mask = Mask()) -> plan.Plan:
        line, outer, inner = self._lines(Ranks("", size))
        degree = line.size
        heads = _Heads.deal(block.query_heads, block.kv_heads, degree)
        wide = dataclasses.replace(block, tokens=block.tokens * degree, query_heads=heads.here,
                                   kv_heads=heads.key_heads.size // degree)
        # What a rank holds of all heads, padded and replicated, is a block of as many bytes as `wide`; of it, each other
        # rank of the line gets one part in `degree`.
        pairs = plan.everyone(plan.lines(size, degree)[1])

        def exchange(what, nbytes):
            return plan.Send(what, plan.EXCHANGE, nbytes / degree, pairs)

        there = (exchange("Q", wide.queries), exchange("K, V", wide.keys),
                 plan.Send("coordinates", plan.GATHER, block.coords, pairs))
        more = (exchange("dout", wide.queries), exchange("lse, delta", 2 * wide.statistics))
        forward_back = (exchange("out", wide.queries), exchange("lse", wide.statistics))
        backward_back = (exchange("dQ", wide.out), exchange("dK, dV", wide.key_gradients))
        within = inner.plan(outer.size, wide, mask)
        return plan.Plan(
            (plan.Round((), there), *plan.side_by_side(within.forward, degree), plan.Round((), forward_back)),
            (plan.Round((), there + more), *plan.side_by_side(within.backward, degree), plan.Round((), backward_back)))


def _trade(line: Ranks, heads: _Heads, queries: Queries, keys: Keys) -> tuple[Queries, Keys]:
    q, k, v = _to_heads(line, heads, queries.q, keys.k, keys.v)
    q_coords, kv_coords = _coords(line, queries.coords, keys.coords)
    return Queries(q, q_coords), Keys(k, v, kv_coords)


def _to_heads(line: Ranks, heads: _Heads, q, k, v):
    q = line.exchange(heads.pad(q, line.size, 2), 2, 1)
    kv = jnp.stack([k, v])
    if heads.key_heads.size != k.shape[2]:
        kv = kv[:, :, :, heads.key_heads]
    return q, *line.exchange(kv, 3, 2)


def _coords(line: Ranks, q_coords, kv_coords):
    gathered = TokenCoords(*line.gather(tuple(q_coords), 1))
    return gathered, gathered if kv_coords is q_coords else TokenCoords(*line.gather(tuple(kv_coords), 1))

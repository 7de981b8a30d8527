"""DeepSpeed-Ulysses and USP: an all-to-all exchanges shards of the sequence for shards of the
heads, and back after attention.

Forward: each rank sends (P - 1) / P of its queries, keys, values and outputs, T (2 Hq + 2 Hkv) D
numbers regardless of P, and all coordinates are gathered; attention is then one round. Backward:
the same for dout, q, k and v, and back for dq, dk and dv. With a `degree` below P, groups of
`degree`
neighbours exchange heads, and any inner schedule spans the groups: Unified Sequence Parallelism
(USP).

If there are fewer key heads than ranks, they are replicated before sending, only as often as the
ranks' query heads need. If the degree does not divide the query heads, they are padded with heads
of zeros.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from ..blocks import BackwardInputs, Gradients, Keys, Queries
from ..coords import Mask, TokenCoords
from ..kernels.kernel import Kernel
from ..partial import AttentionPartial
from . import plan
from .local import Local
from .ranks import Ranks
from .ring import Ring
from .schedule import Context, Schedule


@dataclasses.dataclass(frozen=True)
class _HeadSplit:
    """Which heads each rank of a line gets.

    Attributes:
      query_heads: of the model.
      local_heads: query heads of a rank, padding included.
      key_heads: the key heads sent, in rank order, with repetitions; the same number for each rank.
    """

    query_heads: int
    local_heads: int
    key_heads: np.ndarray

    @classmethod
    def create(cls, query_heads: int, kv_heads: int, degree: int) -> _HeadSplit:
        group = query_heads // kv_heads
        local_heads = -(-query_heads // degree)
        # Runs of `shared` query heads, aligned with both the ranks' blocks and the groups, have one
        # key head.
        shared = math.gcd(local_heads, group)
        first_heads = np.arange(degree * local_heads // shared) * shared
        return cls(query_heads, local_heads, np.minimum(first_heads // group, kv_heads - 1))

    def pad(self, x: jax.Array, degree: int, axis: int) -> jax.Array:
        """x with query heads of zeros added along `axis`, so that `degree` divides them."""
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, degree * self.local_heads - self.query_heads)
        return jnp.pad(x, widths)


@dataclasses.dataclass(frozen=True)
class Ulysses(Schedule):
    """Heads for sequence over groups of neighbours.

    Attributes:
      degree: ranks of a group; 0 for all ranks.
      inner: the schedule that spans the groups (USP).
    """

    degree: int = 0
    inner: Schedule = dataclasses.field(default_factory=Ring)

    def check(self, size: int) -> None:
        self._check_divides("degree", size)
        if 0 < self.degree < size:
            self.inner.check(size // self.degree)

    def _lines(self, ranks: Ranks) -> tuple[Ranks, Ranks, Schedule]:
        """The group that exchanges heads, the line across groups, and the schedule on the
        latter."""
        outer, line = ranks.split(self.degree or ranks.size)
        return line, outer, self.inner if outer.size > 1 else Local()

    def forward(
        self, kernel: Kernel, queries: Queries, keys: Keys, context: Context
    ) -> AttentionPartial:
        line, outer, inner = self._lines(context.ranks)
        heads = _HeadSplit.create(queries.q.shape[2], keys.k.shape[2], line.size)
        blocks = _exchange_heads(line, heads, queries, keys)
        partial = inner.forward(
            kernel.over_shards(line.size, line.size),
            *blocks,
            dataclasses.replace(context, ranks=outer),
        )
        # Sent in the queries' dtype, since the caller rounds to it anyway.
        out = line.exchange(partial.out.astype(queries.q.dtype), 1, 2)[:, :, : heads.query_heads]
        lse = line.exchange(partial.lse, 2, 1)[:, : heads.query_heads]
        return AttentionPartial(out.astype(jnp.float32), lse)

    def backward(
        self, kernel: Kernel, queries: Queries, keys: Keys, saved: BackwardInputs, context: Context
    ) -> Gradients:
        line, outer, inner = self._lines(context.ranks)
        kv_heads = keys.k.shape[2]
        heads = _HeadSplit.create(queries.q.shape[2], kv_heads, line.size)
        q, k, v = _exchange_qkv(line, heads, queries.q, keys.k, keys.v)
        dout = line.exchange(heads.pad(saved.dout, line.size, 2), 2, 1)
        lse, delta = (
            line.exchange(heads.pad(x, line.size, 1), 1, 2) for x in (saved.lse, saved.delta)
        )
        q_coords, kv_coords = _gather_coords(line, queries.coords, keys.coords)
        dq, dk, dv = inner.backward(
            kernel.over_shards(line.size, line.size),
            Queries(q, q_coords),
            Keys(k, v, kv_coords),
            BackwardInputs(dout, lse, delta),
            dataclasses.replace(context, ranks=outer),
        )
        dq = line.exchange(dq, 1, 2)[:, :, : heads.query_heads]
        dkv = line.exchange(jnp.stack([dk, dv]), 2, 3)
        # Sums of slices: a scatter-add would stay a scatter on TPUs.
        if heads.key_heads.size != kv_heads:
            ends = np.searchsorted(heads.key_heads, np.arange(kv_heads + 1))
            dkv = jnp.stack([dkv[:, :, :, i:j].sum(3) for i, j in itertools.pairwise(ends)], 3)
        return Gradients(dq, *dkv)

    def plan(self, size: int, block: plan.Block, mask: Mask = Mask()) -> plan.Plan:
        line, outer, inner = self._lines(Ranks("", size))
        degree = line.size
        heads = _HeadSplit.create(block.query_heads, block.kv_heads, degree)
        exchanged = dataclasses.replace(
            block,
            tokens=block.tokens * degree,
            query_heads=heads.local_heads,
            kv_heads=heads.key_heads.size // degree,
        )
        # Before the exchange, padded and replicated, a rank's block has as many bytes; one part in
        # `degree` goes to each rank.
        pairs = plan.everyone(plan.lines(size, degree)[1])

        def exchange(name, nbytes):
            return plan.Send(name, plan.EXCHANGE, nbytes / degree, pairs)

        inputs = (
            exchange("Q", exchanged.queries),
            exchange("K, V", exchanged.keys),
            plan.Send("coordinates", plan.GATHER, block.coords, pairs),
        )
        saved = (
            exchange("dout", exchanged.queries),
            exchange("lse, delta", 2 * exchanged.statistics),
        )
        outputs = (exchange("out", exchanged.queries), exchange("lse", exchanged.statistics))
        gradients = (exchange("dQ", exchanged.out), exchange("dK, dV", exchanged.key_gradients))
        attention = inner.plan(outer.size, exchanged, mask)
        return plan.Plan(
            (
                plan.Round((), inputs),
                *plan.side_by_side(attention.forward, degree),
                plan.Round((), outputs),
            ),
            (
                plan.Round((), inputs + saved),
                *plan.side_by_side(attention.backward, degree),
                plan.Round((), gradients),
            ),
        )


def _exchange_heads(
    line: Ranks, heads: _HeadSplit, queries: Queries, keys: Keys
) -> tuple[Queries, Keys]:
    """The line's tokens with this rank's share of the heads, from this rank's tokens with all
    heads."""
    q, k, v = _exchange_qkv(line, heads, queries.q, keys.k, keys.v)
    q_coords, kv_coords = _gather_coords(line, queries.coords, keys.coords)
    return Queries(q, q_coords), Keys(k, v, kv_coords)


def _exchange_qkv(line: Ranks, heads: _HeadSplit, q, k, v):
    q = line.exchange(heads.pad(q, line.size, 2), 2, 1)
    kv = jnp.stack([k, v])
    if heads.key_heads.size != k.shape[2]:
        kv = kv[:, :, :, heads.key_heads]
    return q, *line.exchange(kv, 3, 2)


def _gather_coords(
    line: Ranks, q_coords: TokenCoords, kv_coords: TokenCoords
) -> tuple[TokenCoords, TokenCoords]:
    gathered = TokenCoords(*line.gather(tuple(q_coords), 1))
    return gathered, gathered if kv_coords is q_coords else TokenCoords(
        *line.gather(tuple(kv_coords), 1)
    )

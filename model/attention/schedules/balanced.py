"""DistFlashAttn's load-balanced schedule (section 3.2, Algorithm 2): P // 2 rounds after the first
instead of P - 1.

With causal attention over contiguous blocks, worker p (counted from 0) has p + 1 blocks to compute.
After its own block, in round t = 1, 2, ...,

- an owner, p >= t, fetches K and V of worker r = p - t, and computes attn(q_p, k_r, v_r) for itself
  (lines 5 to 7);
- a helper, p < t, has no block of its own left. It fetches the queries of worker r = p - t + P,
  computes attn(q_r, k_p, v_p) and sends (out, lse) back, which r merges by rescale (lines 8 to 18).

So round t covers the distances t and P - t at once, and for odd P no rank idles. For even P the
last round has only the distance P / 2: its owners work alone, as in the paper, or with `split`
owner and helper each take half of an even number of queries.

Traffic (Appendix C: 3 N d): forward, K and V to owners, Q to helpers, and a partial result in
float32 back. Backward, q, dout, lse and delta take the place of Q; dQ goes back to the helped
workers, and dK and dV to where K and V came from.

Algorithm 2 is exact only if no query sees keys of a later worker: with a causal mask and shards
that are runs of tokens in the order of the ranks (`ordered`). Otherwise (striped, zigzag, not
causal) both pairings of two workers may have work: every worker fetches both the queries and the
keys of worker p - t and computes both pairings, still in P // 2 rounds.

Overlap (equation 3): a round's inputs are fetched during the previous round's kernel, and its
results are sent back during the next one's, so no kernel waits for a transfer. A worker holds at
most one round of fetched blocks.

Sliding windows over ordered shards (Appendix D): rounds whose owners are out of reach are skipped,
as are helpers of such workers.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from ..blocks import BackwardInputs, Gradients, Keys, Queries, StackedKeys
from ..coords import Mask
from ..kernels.kernel import Kernel
from ..partial import AttentionPartial
from . import plan
from .plan import Block
from .ranks import Ranks
from .ring_pass import add
from .schedule import Context, Schedule


@dataclasses.dataclass(frozen=True)
class Balanced(Schedule):
    """DistFlashAttn's owners and helpers.

    Attributes:
      split: for even P, `ordered` shards of an even number of tokens and a causal mask, owner and
        helper share the last round. With other layouts and masks both work in it anyway, and this
        has no effect.
      ordered: shards are runs of tokens in rank order, as `get_schedule` derives from the layout.
    """

    split: bool = False
    ordered: bool = False

    def forward(
        self, kernel: Kernel, queries: Queries, keys: Keys, context: Context
    ) -> AttentionPartial:
        def compute(queries, keys):
            return kernel.extend(None, Queries(*queries), keys, **context.scores), None

        return self._all_rounds(context, tuple(queries), keys.stacked(), compute)[0]

    def backward(
        self, kernel: Kernel, queries: Queries, keys: Keys, saved: BackwardInputs, context: Context
    ) -> Gradients:
        def compute(queries, keys):
            q, dout, lse, delta, coords = queries
            return kernel.gradients(
                None, Queries(q, coords), keys, BackwardInputs(dout, lse, delta), **context.scores
            )

        dq, dkv = self._all_rounds(
            context, (queries.q, *saved, queries.coords), keys.stacked(), compute
        )
        return Gradients(dq, *dkv)

    def _all_rounds(self, context: Context, queries: tuple, keys: StackedKeys, compute):
        """The sum of `compute` over all pairs of ranks: (this rank's queries' part, this rank's
        keys' part).

        Args:
          queries: the arrays of the queries' side, coordinates last.
          compute: (queries, keys) -> (result for the queries, result for the keys); a result may be
            None.
        """
        rounds = self._rounds(context.ranks, queries[0].shape[1], context.mask)
        local, for_others = (queries, keys), (None, None)
        fetched = rounds[0].fetch(*local) if rounds else None
        totals = compute(*local)
        for t, current in enumerate(rounds):
            # A round begins when the previous one ends; without the barrier all rounds would fetch
            # at the start.
            local, totals, fetched, for_others = lax.optimization_barrier(
                (local, totals, fetched, for_others)
            )
            fetched_next = rounds[t + 1].fetch(*local) if t + 1 < len(rounds) else None
            returned = rounds[t - 1].send_home(*for_others)
            results, for_others = current.compute(local, fetched, compute)
            totals, fetched = add(add(totals, results), returned), fetched_next
        return add(totals, rounds[-1].send_home(*for_others)) if rounds else totals

    def _rounds(self, ranks: Ranks, tokens: int, mask: Mask) -> list[_Round]:
        """The rounds after the first, in which every rank computes with its own block."""
        size, ordered = ranks.size, self.ordered and mask.causal
        reach = mask.reach(tokens, size) if self.ordered and not mask.global_tokens else size
        rounds = []
        for t in range(1, min(size // 2, reach) + 1):
            single_distance = 2 * t == size  # t = P - t
            helpers_needed = size - t <= reach or not ordered
            halved = (
                single_distance and helpers_needed and ordered and self.split and tokens % 2 == 0
            )
            rounds.append(
                _Round(
                    ranks, t, ordered, halved or (helpers_needed and not single_distance), halved
                )
            )
        return rounds

    def plan(self, size: int, block: plan.Block, mask: Mask = Mask()) -> plan.Plan:
        return plan.Plan(
            *(tuple(self._plan_rounds(size, block, mask, backward)) for backward in (False, True))
        )

    def _plan_rounds(self, size: int, block: Block, mask: Mask, backward: bool):
        to_helpers, returned = ("Q", block.queries), ("out, lse", block.out + block.statistics)
        if backward:
            to_helpers = ("Q, dout, lse, delta", 2 * block.queries + 2 * block.statistics)
            returned = ("dQ", block.out)

        def send(name, nbytes, pairs):
            return plan.Send(name, plan.PERMUTE, nbytes, tuple(pairs))

        yield plan.Round(tuple(plan.Task(rank, (rank,), (rank,)) for rank in range(size)))
        for current in self._rounds(Ranks("", size), block.tokens, mask):
            parts = 2 if current.halved else 1
            owned, helped = (
                [((rank - current.distance) % size, rank) for rank in ranks]
                for ranks in (current.owners, current.helpers)
            )
            tasks = [
                plan.Task(rank, (rank,), (other,), (parts - 1, parts)) for other, rank in owned
            ]
            tasks += [plan.Task(rank, (other,), (rank,), (0, parts)) for other, rank in helped]
            sends = [
                send("K, V", block.keys + block.coords, owned),
                send(to_helpers[0], to_helpers[1] / parts + block.coords, helped),
            ]
            if backward:
                sends.append(send("dK, dV", block.key_gradients, (pair[::-1] for pair in owned)))
            sends.append(send(returned[0], returned[1] / parts, (pair[::-1] for pair in helped)))
            yield plan.Round(tuple(tasks), tuple(sent for sent in sends if sent.pairs))


@dataclasses.dataclass(frozen=True)
class _Round:
    """Round t of Algorithm 2.

    Attributes:
      distance: t; a rank fetches from the rank `distance` before it.
      ordered: whether Algorithm 2 applies; otherwise every rank fetches both sides.
      helps: whether queries are fetched.
      halved: whether only their first half is, and the owner computes the second half.
    """

    ranks: Ranks
    distance: int
    ordered: bool
    helps: bool
    halved: bool

    @property
    def owners(self) -> range:
        """The ranks that fetch K and V."""
        return range(self.distance if self.ordered else 0, self.ranks.size)

    @property
    def helpers(self) -> range:
        """The ranks that fetch queries."""
        return range((self.distance if self.ordered else self.ranks.size) if self.helps else 0)

    def fetch(self, queries: tuple, keys: StackedKeys):
        """(queries, keys) of the rank `distance` before this one, if needed here."""
        if not self.ordered:
            return self.ranks.shift((queries if self.helps else None, keys), self.distance)
        if not self.helps:
            return None, self._fetch(keys, self.owners)
        # A rank receives either queries or keys, so their coordinates share a transfer: only a few
        # can be in flight at a time.
        (*arrays, q_coords), (kv, kv_coords) = queries, keys
        is_helped = self.ranks.index() >= self.ranks.size - self.distance
        coords = self.ranks.shift(_where(is_helped, q_coords, kv_coords), self.distance)
        arrays = self._fetch(self._half(arrays, 0), self.helpers)
        return (*arrays, self._half(coords, 0)), StackedKeys(self._fetch(kv, self.owners), coords)

    def compute(self, local, fetched, compute):
        """Two pairs (for queries, for keys): the results for this rank's own blocks, and those for
        the fetched blocks."""
        (queries, keys), (fetched_queries, fetched_keys) = local, fetched
        if not self.ordered:
            for_queries, for_fetched_keys = compute(queries, fetched_keys)
            for_fetched_queries, for_keys = (
                compute(fetched_queries, keys) if self.helps else (None, None)
            )
            return (for_queries, for_keys), (for_fetched_queries, for_fetched_keys)
        is_helper = self.ranks.index() < self.distance
        if self.helps:
            queries = _where(is_helper, fetched_queries, self._half(queries, 1))
            fetched_keys = _where(is_helper, keys, fetched_keys)
        # If nobody helps, would-be helpers receive zeros for keys. Segment 0 is padding, so every
        # tile is skipped.
        for_queries, for_keys = compute(queries, fetched_keys)
        own_results = (
            self._both_halves(_mask(for_queries, ~is_helper), 1),
            _mask(for_keys, is_helper),
        )
        return own_results, (for_queries if self.helps else None, for_keys)

    def send_home(self, for_queries, for_keys):
        """Other ranks' results for this rank's queries and keys."""
        for_queries = self.ranks.shift(for_queries, -self.distance, self.helpers)
        if self.ordered:  # ranks without a helper receive zeros, and an lse of zero would count
            for_queries = _mask(for_queries, self.ranks.index() >= self.ranks.size - self.distance)
        return self._both_halves(for_queries, 0), self.ranks.shift(
            for_keys, -self.distance, self.owners
        )

    def _fetch(self, tree, receivers):
        return self.ranks.shift(
            tree, self.distance, [(rank - self.distance) % self.ranks.size for rank in receivers]
        )

    def _half(self, tree, half: int):
        """If halved, the first (0) or second (1) half of the tokens."""
        return (
            jax.tree.map(lambda x: jnp.split(x, 2, _token_axis(x))[half], tree)
            if self.halved
            else tree
        )

    def _both_halves(self, result, half: int):
        """If halved, the result of one half of the queries, with nothing for the other half."""
        if not self.halved:
            return result
        halves = (result, _mask(result, False))
        return jax.tree.map(
            lambda *x: jnp.concatenate(x, _token_axis(x[0])), *(halves[::-1] if half else halves)
        )


def _where(condition, first, second):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), first, second)


def _mask(result, condition):
    """The result, or one that adds nothing where `condition` is false."""
    if isinstance(result, AttentionPartial):
        # The output too: a weight of 0 does not hide non-finite values of tokens that nobody here
        # sees.
        return AttentionPartial(
            jnp.where(condition, result.out, 0), jnp.where(condition, result.lse, -jnp.inf)
        )
    return jax.tree.map(lambda x: jnp.where(condition, x, 0), result)


def _token_axis(x) -> int:
    """Statistics are [B, H, T], everything else is [B, T, ...]."""
    return 2 if x.ndim == 3 else 1

"""Balanced ring (DistFlashAttn, section 3.2): idle ranks help the busy ones; P // 2 rounds instead of P - 1.

With causal attention over contiguous blocks, rank p has p + 1 blocks to do. In round t the ranks p >= t fetch K, V of rank
p - t; the ranks p < t, which have none left, fetch the queries of rank p - t + P instead, meet them with their own K, V, and
send (out, lse) back to be merged. Distances t and P - t are done in one round, so for odd P nobody idles; even P repeats
distance P/2 in its last round, where the owners work alone, or with `split` owner and helper take half of the queries each.
Forward, K and V travel to owners, Q to helpers and a float32 partial back (Appendix C: 3Nd); backward the queries' side is
q, dout, lse, delta, with dQ back to the helped and dK, dV back to where K, V came from.

That is exact only where no query sees keys of a later rank: causal, and shards `ordered`. Elsewhere (striped, zigzag, not
causal) both blocks of a pair of ranks may hold work: every rank fetches both sides and does both, still in P // 2 rounds.

What a round needs is fetched while the kernel of the round before runs, and what it leaves goes home while the next one's
does (Algorithm 2): no kernel waits for a transfer. At most one round's blocks are held beside those that are met.

Sliding windows over ordered shards: rounds of ranks out of reach are left out, and helpers where the ranks they would help are.
"""
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from ..blocks import Gradients, Keys, Queries, Saved, StackedKeys
from ..coords import Mask
from ..kernels.kernel import Kernel
from ..partial import AttentionPartial
from . import plan
from .ranks import Ranks
from .ring_pass import add
from .schedule import Context, Schedule


@dataclasses.dataclass(frozen=True)
class Balanced(Schedule):
    """DistFlashAttn. split: for even P, owner and helper share the last round; ordered: shards hold runs of tokens."""

    split: bool = False
    ordered: bool = False

    def forward(self, kernel: Kernel, queries: Queries, keys: Keys, context: Context) -> AttentionPartial:
        def meet(queries, keys):
            return kernel.extend(None, Queries(*queries), keys, **context.scores), None

        return self._meet_all(context, tuple(queries), keys.stacked(), meet)[0]

    def backward(self, kernel: Kernel, queries: Queries, keys: Keys, saved: Saved, context: Context) -> Gradients:
        def meet(queries, keys):
            q, dout, lse, delta, coords = queries
            return kernel.gradients(None, Queries(q, coords), keys, Saved(dout, lse, delta), **context.scores)

        dq, dkv = self._meet_all(context, (queries.q, *saved, queries.coords), keys.stacked(), meet)
        return Gradients(dq, *dkv)

    def _meet_all(self, context: Context, queries: tuple, keys: StackedKeys, meet):
        """meet(queries, keys) of every pair of ranks, added up at home: (for the queries, for the keys)."""
        rounds = self._rounds(context.ranks, queries[0].shape[1], context.mask)
        own, away = (queries, keys), (None, None)
        incoming = rounds[0].fetch(*own) if rounds else None
        totals = meet(*own)
        for t, one in enumerate(rounds):
            # A round begins when the one before has ended: else all of them would fetch at the start.
            own, totals, incoming, away = lax.optimization_barrier((own, totals, incoming, away))
            ahead = rounds[t + 1].fetch(*own) if t + 1 < len(rounds) else None
            arriving = rounds[t - 1].send_home(*away)
            here, away = one.meet(*own, *incoming, meet)
            totals, incoming = add(add(totals, here), arriving), ahead
        return add(totals, rounds[-1].send_home(*away)) if rounds else totals

    def _rounds(self, ranks: Ranks, tokens: int, mask: Mask) -> list[_Round]:
        """The rounds after the one in which every rank meets its own block."""
        size, ordered = ranks.size, self.ordered and mask.causal
        reach = mask.reach(tokens, size) if self.ordered else size
        rounds = []
        for t in range(1, min(size // 2, reach) + 1):
            twice = 2 * t == size  # distances t and P - t are one
            helps = size - t <= reach or not ordered
            halved = twice and helps and ordered and self.split and tokens % 2 == 0
            rounds.append(_Round(ranks, t, ordered, halved or (helps and not twice), halved))
        return rounds

    def plan(self, size: int, block: plan.Block, mask: Mask = Mask()) -> plan.Plan:
        return plan.Plan(*(tuple(self._plan_rounds(size, block, mask, backward)) for backward in (False, True)))

    def _plan_rounds(self, size: int, block: plan.Block, mask: Mask, backward: bool):
        there, back = ("Q", block.queries), ("out, lse", block.out + block.statistics)
        if backward:
            there, back = ("Q, dout, lse, delta", 2 * block.queries + 2 * block.statistics), ("dQ", block.out)

        def send(what, nbytes, pairs):
            return plan.Send(what, plan.PERMUTE, nbytes, tuple(pairs))

        yield plan.Round(tuple(plan.Task(rank, (rank,), (rank,)) for rank in range(size)))
        for one in self._rounds(Ranks("", size), block.tokens, mask):
            of = 2 if one.halved else 1
            owned, helped = ([((rank - one.distance) % size, rank) for rank in ranks] for ranks in (one.owners, one.helpers))
            tasks = [plan.Task(rank, (rank,), (other,), (of - 1, of)) for other, rank in owned]
            tasks += [plan.Task(rank, (other,), (rank,), (0, of)) for other, rank in helped]
            sends = [send("K, V", block.keys + block.coords, owned), send(there[0], there[1] / of + block.coords, helped)]
            if backward:
                sends.append(send("dK, dV", block.key_gradients, (pair[::-1] for pair in owned)))
            sends.append(send(back[0], back[1] / of, (pair[::-1] for pair in helped)))
            yield plan.Round(tuple(tasks), tuple(one for one in sends if one.pairs))


@dataclasses.dataclass(frozen=True)
class _Round:
    """Ranks `distance` places apart meet. helps: queries are fetched too; halved: the first half of them."""

    ranks: Ranks
    distance: int
    ordered: bool
    helps: bool
    halved: bool

    @property
    def owners(self) -> range:
        """Ranks that fetch K, V."""
        return range(self.distance if self.ordered else 0, self.ranks.size)

    @property
    def helpers(self) -> range:
        """Ranks that fetch queries."""
        return range((self.distance if self.ordered else self.ranks.size) if self.helps else 0)

    def fetch(self, queries, keys):
        """(queries, keys) of the rank `distance` places before, as far as this rank is to meet them."""
        if not self.ordered:
            return self.ranks.shift((queries if self.helps else None, keys), self.distance)
        if not self.helps:
            return None, self._fetch(keys, self.owners)
        # A rank gets queries or keys: their coordinates go in one transfer, as only so many can be under way at once.
        (*queries, q_coords), (kv, kv_coords) = queries, keys
        helped = self.ranks.index() >= self.ranks.size - self.distance
        coords = self.ranks.shift(_choose(helped, q_coords, kv_coords), self.distance)
        queries = self._fetch(self._half(queries, 0), self.helpers)
        return (*queries, self._half(coords, 0)), StackedKeys(self._fetch(kv, self.owners), coords)

    def meet(self, queries, keys, queries_in, keys_in, meet):
        """What is found for this rank's queries and keys, and what for those that came in: two pairs."""
        if not self.ordered:
            found, for_keys_in = meet(queries, keys_in)
            found_in, for_keys = meet(queries_in, keys) if self.helps else (None, None)
            return (found, for_keys), (found_in, for_keys_in)
        helping = self.ranks.index() < self.distance
        if self.helps:
            queries = _choose(helping, queries_in, self._half(queries, 1))
            keys_in = _choose(helping, keys, keys_in)
        # Where nobody helps, the ranks that might get keys of zeros: padding, of which every tile is skipped.
        found, for_keys = meet(queries, keys_in)
        return (self._whole(_keep(found, ~helping), 1), _keep(for_keys, helping)), (found if self.helps else None, for_keys)

    def send_home(self, found, for_keys):
        """What others have found for this rank's queries and keys."""
        found = self.ranks.shift(found, -self.distance, self.helpers)
        if self.ordered:  # where nobody sends, zeros arrive, and an lse of zero would count
            found = _keep(found, self.ranks.index() >= self.ranks.size - self.distance)
        return self._whole(found, 0), self.ranks.shift(for_keys, -self.distance, self.owners)

    def _fetch(self, tree, receivers):
        return self.ranks.shift(tree, self.distance, [(rank - self.distance) % self.ranks.size for rank in receivers])

    def _half(self, tree, which: int):
        """Where queries are halved, one half of their tokens."""
        return jax.tree.map(lambda x: jnp.split(x, 2, _tokens(x))[which], tree) if self.halved else tree

    def _whole(self, found, which: int):
        """Where queries are halved, what one half has found, and nothing for the other."""
        if not self.halved:
            return found
        halves = (found, _keep(found, False))
        return jax.tree.map(lambda *x: jnp.concatenate(x, _tokens(x[0])), *(halves[::-1] if which else halves))


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

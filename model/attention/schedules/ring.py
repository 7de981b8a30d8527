"""Ring attention (Ring Attention, section 3): K, V and their coordinates go round, P - 1 hops in P rounds.

Forward: each shard receives 2 T Hkv D numbers and 2 T coordinates a hop, P - 1 times. Backward: the same, and the float32
dK, dV follow one hop behind, P - 1 times, with one more hop home. With the layout `striped` this is Striped Attention.
How transfers and kernels overlap is told in `tour.py`. Other arrays may ride along, hidden by the same kernels: a gather with K
and V (`carry_forward`), a reduce-scatter with dK and dV (`carry_backward`); `model/memory/prefetch.py` sends weights that way.

`bidirectional`: the earlier half of every block's tokens goes one way round and the later half the other, so that both
directions of each link are used at once: as many hops, bytes and kernels, half of the bytes in each direction. A round meets
the two halves that have arrived, of two different ranks, as one block of keys.

Sliding windows: where shards hold runs of tokens in the order of ranks (`ordered`), only ranks within reach of the window are
visited. Causal, blocks go `reach` hops onwards; else `reach` hops each way, whole. dK, dV still take one hop home.
"""
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from ..coords import Mask
from . import plan
from .ranks import Ranks
from .ring_pass import tour
from .schedule import Schedule


@dataclasses.dataclass(frozen=True)
class _Ways:
    """How blocks travel: `hops` hops in each of `directions` (+1, -1) at once; halved, if each way goes but half of a block."""

    ranks: Ranks
    directions: tuple[int, ...]
    hops: int
    halved: bool = False

    @classmethod
    def choose(cls, ranks: Ranks, mask: Mask, tokens: int, bidirectional: bool, ordered: bool) -> _Ways:
        reach = mask.reach(tokens, ranks.size) if ordered else ranks.size - 1
        if mask.causal and reach < ranks.size - 1:
            return cls(ranks, (1,), reach)
        if 2 * reach < ranks.size - 1:
            return cls(ranks, (1, -1), reach)
        if bidirectional and tokens > 1:
            return cls(ranks, (1, -1), ranks.size - 1, halved=True)
        return cls(ranks, (1,), ranks.size - 1)

    def deal(self, tree):
        """What goes each way of this rank's own block: halves, or all of it."""
        return _cut(tree, _length(tree) // 2) if self.halved else (tree,) * len(self.directions)

    def split(self, gradients, own: bool):
        """What follows each part: of the gradients of the joined parts, or of this rank's own block."""
        if len(self.directions) == 1:
            return (gradients,)
        if own and not self.halved:
            return gradients, jnp.zeros_like(gradients)
        return _cut(gradients, _length(gradients) // 2)

    def whole(self, parts):
        """An own block's gradients from those that its parts brought home."""
        return _join(parts) if self.halved else sum(parts)

    def send(self, parts):
        return tuple(self.ranks.shift(part, way) for part, way in zip(parts, self.directions, strict=False))

    def home(self, parts):
        return tuple(self.ranks.shift(part, -way * self.hops) for part, way in zip(parts, self.directions, strict=False))


@dataclasses.dataclass(frozen=True)
class Ring(Schedule):
    """K/V round the ring. bidirectional: half of each block either way; ordered: shards hold runs of tokens, in their order."""

    bidirectional: bool = False
    ordered: bool = False

    def forward(self, kernel, q, k, v, q_coords, kv_coords, *, ranks, mask, scale):
        return self.carry_forward(kernel, q, k, v, q_coords, kv_coords, None, ranks=ranks, mask=mask, scale=scale)[0]

    def backward(self, kernel, q, k, v, dout, lse, delta, q_coords, kv_coords, *, ranks, mask, scale):
        return self.carry_backward(kernel, q, k, v, dout, lse, delta, q_coords, kv_coords, None, None, ranks=ranks, mask=mask,
                                   scale=scale)[0]

    def carry_forward(self, kernel, q, k, v, q_coords, kv_coords, shard, *, ranks, mask, scale):
        """`forward`, and `shard` (a tree of arrays) of all ranks [P, ...]: it rides with K and V, behind the same kernels."""
        ways = _Ways.choose(ranks, mask, k.shape[1], self.bidirectional, self.ordered)
        own = (jnp.stack([k, v]), kv_coords)

        def visit(partial, parts):
            kv, coords = own if partial is None else _join(parts)
            return kernel.extend(partial, q, kv, q_coords, coords, mask=mask, scale=scale), (), ()

        partial, _, gathered, _ = _tour(ways, own, visit, shard)
        return partial, gathered

    def carry_backward(self, kernel, q, k, v, dout, lse, delta, q_coords, kv_coords, shard, shares, *, ranks, mask,
                       scale):
        """`backward`; `shard` of all ranks, as before; and of all ranks' `shares` [P, ...] the sum that is this one's: they
        are added up as they follow the block that goes round, one hop behind with dK and dV, and home."""
        ways = _Ways.choose(ranks, mask, k.shape[1], self.bidirectional, self.ordered)
        own = (jnp.stack([k, v]), kv_coords)

        def visit(dq, parts):
            kv, coords = own if dq is None else _join(parts)
            first = dq is None
            dq, dkv = kernel.gradients(dq, q, kv, dout, lse, delta, q_coords, coords, mask=mask, scale=scale)
            return dq, ways.split(dkv, own=first), ()

        dq, dkv, gathered, share = _tour(ways, own, visit, shard, shares)
        return (dq, *ways.whole(dkv)), gathered, share

    def plan(self, size: int, block: plan.Block, mask: Mask = Mask()) -> plan.Plan:
        ways = _Ways.choose(Ranks("", size), mask, block.tokens, self.bidirectional, self.ordered)
        cut = block.tokens // 2 if ways.halved else block.tokens
        parts = [dataclasses.replace(block, tokens=tokens) for tokens in (cut, block.tokens - cut if ways.halved else cut)]
        travel = list(zip(ways.directions, parts, strict=False))

        def send(what, nbytes, hops=1):
            return tuple(plan.Send(what, plan.PERMUTE, nbytes(part), plan.shift(size, way * hops)) for way, part in travel)

        def tasks(stop):
            for rank in range(size):
                met = [(rank - way * stop) % size for way in ways.directions]
                if stop and ways.halved:
                    yield from (plan.Task(rank, (rank,), (owner,), key_part=(i, 2)) for i, owner in enumerate(met))
                else:
                    yield plan.Task(rank, (rank,), tuple(met if stop else (rank,)))

        keys = send("K, V", lambda part: part.keys) + send("coordinates", lambda part: part.coords)
        gradients = send("dK, dV", lambda part: part.key_gradients)
        stops = range(ways.hops + 1)
        forward = tuple(plan.Round(tuple(tasks(stop)), keys if stop < ways.hops else ()) for stop in stops)
        backward = tuple(one._replace(sends=one.sends + (gradients if stop else ())) for stop, one in enumerate(forward))
        home = plan.Round((), send("dK, dV home", lambda part: part.key_gradients, -ways.hops) if ways.hops else ())
        return plan.Plan(forward, (*backward, home))


def _tour(ways: _Ways, own, visit, shard=None, shares=None):
    """The tour of a block `own`, on which arrays may ride that have nothing to do with attention.

    Args:
      visit: as `tour`'s.
      shard: a tree of arrays, this rank's, to be had of all ranks; shares: a tree of [P, ...], this rank's shares of sums,
        one for each rank. None for nothing.

    Returns:
      what `visit` found; what the block brought home; `shard` of all ranks [P, ...]; the sums that are this rank's.

    Raises:
      ValueError: a tour that does not come to all ranks, as in a window's reach.
    """
    if shard is None and shares is None:
        found, left, _ = tour(ways.deal(own), ways.hops, ways.send, ways.home, visit)
        return found, left, None, None
    ranks, way = ways.ranks, ways.directions[0]
    if ways.hops + 1 < ranks.size:
        raise ValueError(f"ring: what rides must meet all {ranks.size} ranks, and this tour meets {ways.hops + 1}")
    no_rank = jax.tree.map(lambda x: jnp.zeros((ranks.size, *x.shape), x.dtype), shard)

    def stop(found, block):
        parts, shard = block
        found, gathered, owner = (None, no_rank, ranks.index()) if found is None else found
        gathered = jax.tree.map(lambda all, one: lax.dynamic_update_index_in_dim(all, one, owner, 0), gathered, shard)
        share = jax.tree.map(lambda all: lax.dynamic_index_in_dim(all, owner, 0, keepdims=False), shares)
        # Before the kernels: behind them the compilers take these for long enough to hide a transfer.
        parts, gathered, share = lax.optimization_barrier((parts, gathered, share))
        found, left, kept = visit(found, parts)
        return (found, gathered, (owner - way) % ranks.size), (left, share), kept

    def send(block):
        return ways.send(block[0]), ranks.shift(block[1], way)

    def home(left):
        return ways.home(left[0]), ranks.shift(left[1], -way * ways.hops)

    (found, gathered, _), (left, share), _ = tour((ways.deal(own), shard), ways.hops, send, home, stop)
    return found, left, gathered, share


def _tokens(x) -> int:
    """The dimension of tokens: coordinates are [B, T], K and V stacked [2, B, T, Hkv, D]."""
    return 1 if x.ndim == 2 else 2


def _length(tree) -> int:
    x = jax.tree.leaves(tree)[0]
    return x.shape[_tokens(x)]


def _cut(tree, at: int):
    """Two trees: the tokens before `at`, and the others."""
    def part(start, stop):
        return jax.tree.map(lambda x: lax.slice_in_dim(x, start, stop, axis=_tokens(x)), tree)

    return part(0, at), part(at, _length(tree))


def _join(parts):
    """The parts that met here, as one block."""
    return jax.tree.map(lambda *x: jnp.concatenate(x, _tokens(x[0])), *parts) if len(parts) > 1 else parts[0]

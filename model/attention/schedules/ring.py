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
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from ..blocks import Gradients, Keys, Queries, Saved, StackedKeys
from ..coords import Mask
from ..kernels.kernel import Kernel
from ..partial import AttentionPartial
from . import plan
from .ranks import Ranks
from .ring_pass import ring_pass
from .schedule import Context, Payload, Schedule


@dataclasses.dataclass(frozen=True)
class _Routes:
    """How blocks travel: `hops` hops in each of `directions` (+1, -1) at once; halved, if each way goes but half of a block."""

    ranks: Ranks
    directions: tuple[int, ...]
    hops: int
    halved: bool = False

    @classmethod
    def choose(cls, ranks: Ranks, mask: Mask, tokens: int, bidirectional: bool, ordered: bool) -> _Routes:
        reach = mask.reach(tokens, ranks.size) if ordered else ranks.size - 1
        if mask.causal and reach < ranks.size - 1:
            return cls(ranks, (1,), reach)
        if 2 * reach < ranks.size - 1:
            return cls(ranks, (1, -1), reach)
        if bidirectional and tokens > 1:
            return cls(ranks, (1, -1), ranks.size - 1, halved=True)
        return cls(ranks, (1,), ranks.size - 1)

    def divide(self, tree):
        """What goes each way of this rank's own block: halves, or all of it."""
        return _cut(tree, _length(tree) // 2) if self.halved else (tree,) * len(self.directions)

    def split(self, gradients, own: bool):
        """What follows each part: of the gradients of the joined parts, or of this rank's own block."""
        if len(self.directions) == 1:
            return (gradients,)
        if own and not self.halved:
            return gradients, jnp.zeros_like(gradients)
        return _cut(gradients, _length(gradients) // 2)

    def join(self, parts):
        """An own block's gradients from those that its parts brought home."""
        return _join(parts) if self.halved else sum(parts)

    def send(self, parts):
        return tuple(self.ranks.shift(part, way) for part, way in zip(parts, self.directions, strict=False))

    def send_home(self, parts):
        return tuple(self.ranks.shift(part, -way * self.hops) for part, way in zip(parts, self.directions, strict=False))


@dataclasses.dataclass(frozen=True)
class Ring(Schedule):
    """Passes K and V round the ring.

    Attributes:
      bidirectional: half of each block travels in either direction.
      ordered: shards are runs of tokens in the order of the ranks, as `get_schedule` finds out from the layout.
    """

    bidirectional: bool = False
    ordered: bool = False
    carries: ClassVar[bool] = True

    def forward(self, kernel: Kernel, queries: Queries, keys: Keys, context: Context) -> AttentionPartial:
        return self.carry_forward(kernel, queries, keys, None, context)[0]

    def backward(self, kernel: Kernel, queries: Queries, keys: Keys, saved: Saved, context: Context) -> Gradients:
        return self.carry_backward(kernel, queries, keys, saved, Payload(), context)[0]

    def carry_forward(self, kernel: Kernel, queries: Queries, keys: Keys, shard, context: Context):
        """As of Schedule: `shard` travels with K and V."""
        routes = self._routes(context.ranks, context.mask, keys.k.shape[1])
        own = keys.stacked()

        def visit(partial, parts):
            block = own if partial is None else _join(parts)
            return kernel.extend(partial, queries, block, **context.scores), (), ()

        partial, _, gathered, _ = _ring_pass(routes, own, visit, Payload(shard))
        return partial, gathered

    def carry_backward(self, kernel: Kernel, queries: Queries, keys: Keys, saved: Saved, payload: Payload, context: Context):
        """As of Schedule: the shares are summed on their way one hop behind the block, with dK and dV."""
        routes = self._routes(context.ranks, context.mask, keys.k.shape[1])
        own = keys.stacked()

        def visit(dq, parts):
            first = dq is None
            block = own if first else _join(parts)
            dq, dkv = kernel.gradients(dq, queries, block, saved, **context.scores)
            return dq, routes.split(dkv, own=first), ()

        dq, dkv, gathered, share = _ring_pass(routes, own, visit, payload)
        return Gradients(dq, *routes.join(dkv)), gathered, share

    def _routes(self, ranks: Ranks, mask: Mask, tokens: int) -> _Routes:
        return _Routes.choose(ranks, mask, tokens, self.bidirectional, self.ordered)

    def plan(self, size: int, block: plan.Block, mask: Mask = Mask()) -> plan.Plan:
        ways = self._routes(Ranks("", size), mask, block.tokens)
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


def _ring_pass(routes: _Routes, own: StackedKeys, visit, payload: Payload):
    """The ring pass of this rank's block `own`, with other arrays riding along.

    Args:
      visit: as of `ring_pass`.

    Returns:
      The last carry; what all ranks contributed for `own`; the shards of all ranks [P, ...]; the sum of this rank's shares.

    Raises:
      ValueError: arrays ride along, but the blocks do not visit all ranks, because of a window.
    """
    shard, shares = payload
    if shard is None and shares is None:
        carry, returned, _ = ring_pass(routes.divide(own), routes.hops, routes.send, routes.send_home, visit)
        return carry, returned, None, None
    ranks, direction = routes.ranks, routes.directions[0]
    if routes.hops + 1 < ranks.size:
        raise ValueError(f"ring: what rides along must visit all {ranks.size} ranks, and these blocks visit {routes.hops + 1}")
    empty = jax.tree.map(lambda x: jnp.zeros((ranks.size, *x.shape), x.dtype), shard)

    def visit_with_payload(carry, block):
        parts, shard = block
        carry, gathered, owner = (None, empty, ranks.index()) if carry is None else carry
        gathered = jax.tree.map(lambda all, row: lax.dynamic_update_index_in_dim(all, row, owner, 0), gathered, shard)
        share = jax.tree.map(lambda all: lax.dynamic_index_in_dim(all, owner, 0, keepdims=False), shares)
        # Before the kernels: behind them the compilers think that these take long enough to hide a transfer.
        parts, gathered, share = lax.optimization_barrier((parts, gathered, share))
        carry, contribution, output = visit(carry, parts)
        return (carry, gathered, (owner - direction) % ranks.size), (contribution, share), output

    def send(block):
        return routes.send(block[0]), ranks.shift(block[1], direction)

    def send_home(contribution):
        return routes.send_home(contribution[0]), ranks.shift(contribution[1], -direction * routes.hops)

    (carry, gathered, _), (returned, share), _ = ring_pass(
        (routes.divide(own), shard), routes.hops, send, send_home, visit_with_payload)
    return carry, returned, gathered, share


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

"""Ring Attention (Algorithm 1) and Striped Attention: K and V of every rank go round the ring, in P
rounds and P - 1 hops.

Both papers have one algorithm (Striped Attention, Algorithm 1, with N devices). In round i, device
j

1. lets k = (j - i) mod N, the owner of the block of keys it currently has,
2. takes GetMask(j, k), here `coords.visible` of the coordinates sent with the block,
3. accumulates attention of its queries over that block (AccumulateAttentionFragment, here
   `kernel.extend`), and
4. sends the block to device j + 1 and receives the next one from device j - 1 (`ring_pass.py`,
   which overlaps it with 3).

Ring Attention and Striped Attention differ only in GetMask, since devices hold different tokens:
the layout `contiguous` gives the former, `striped` the latter.

Traffic: each rank receives 2 T Hkv D numbers and 2 T coordinates per hop. The backward sends the
same, plus dK and dV in float32 one hop behind, with one more hop to return home. Other arrays can
ride along behind the same kernels: an all-gather with K and V (`forward_and_gather`), a
reduce-scatter with dK and dV (`backward_and_exchange`); `model/runners/prefetch.py` sends weights
that way.

Option `bidirectional`: the first half of each block's tokens travels one way round and the second
half the other, so that both directions of each link are used at once. Hops, bytes and kernel calls
stay the same; each direction carries half the bytes. In a round a rank has halves from two
different ranks as one block of keys.

Sliding windows (DistFlashAttn, Appendix D): if the shards are runs of tokens in the order of the
ranks (`ordered`), a block visits only the ranks within the window's reach: `reach` hops onwards if
causal, otherwise `reach` hops either way. Global tokens beyond it are replicated (`replica.py`). If
other arrays ride along, all blocks visit all ranks, because those arrays must.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from ..blocks import BackwardInputs, Gradients, Keys, Queries, StackedKeys
from ..coords import Mask
from ..kernels.kernel import Kernel
from ..partial import AttentionPartial
from . import plan
from .ranks import Ranks
from .replica import Replica
from .ring_pass import ring_pass
from .schedule import Context, Payload, Schedule


@dataclasses.dataclass(frozen=True)
class _Routes:
    """How blocks travel.

    Attributes:
      directions: of the ring, +1 or -1; a part of each block travels in each.
      hops: in each direction.
      halved: whether a part is half of a block's tokens; otherwise it is the whole block.
    """

    ranks: Ranks
    directions: tuple[int, ...]
    hops: int
    halved: bool = False

    @classmethod
    def choose(
        cls, ranks: Ranks, mask: Mask, tokens: int, bidirectional: bool, ordered: bool
    ) -> _Routes:
        reach = mask.reach(tokens, ranks.size) if ordered else ranks.size - 1
        if mask.causal and reach < ranks.size - 1:
            return cls(ranks, (1,), reach)
        if 2 * reach < ranks.size - 1:
            return cls(ranks, (1, -1), reach)
        if bidirectional and tokens > 1:
            return cls(ranks, (1, -1), ranks.size - 1, halved=True)
        return cls(ranks, (1,), ranks.size - 1)

    def divide(self, block: StackedKeys) -> tuple[StackedKeys, ...]:
        """The part of this rank's own block for each direction."""
        return (
            _split(block, _length(block) // 2) if self.halved else (block,) * len(self.directions)
        )

    def split(
        self, gradients: Float[Array, "2 B T Hkv D"], local: bool
    ) -> tuple[Float[Array, "2 B t Hkv D"], ...]:
        """The gradients that follow each part: of the joined parts, or (local) of this rank's
        block."""
        if len(self.directions) == 1:
            return (gradients,)
        if local and not self.halved:
            return gradients, jnp.zeros_like(gradients)
        return _split(gradients, _length(gradients) // 2)

    def join(self, parts: tuple[Float[Array, "2 B t Hkv D"], ...]) -> Float[Array, "2 B T Hkv D"]:
        """The gradients of this rank's block, from those returned for its parts."""
        return _concatenate(parts) if self.halved else sum(parts)  # type: ignore[return-value]

    def send(self, parts: tuple[PyTree[Array], ...]) -> tuple[PyTree[Array], ...]:
        """Each part, one hop in its direction."""
        return tuple(
            self.ranks.shift(part, step) for part, step in zip(parts, self.directions, strict=False)
        )

    def send_home(self, parts: tuple[PyTree[Array], ...]) -> tuple[PyTree[Array], ...]:
        """Each part sent from its last rank to its owner."""
        return tuple(
            self.ranks.shift(part, -step * self.hops)
            for part, step in zip(parts, self.directions, strict=False)
        )


@dataclasses.dataclass(frozen=True)
class Ring(Schedule):
    """Passes K and V round the ring.

    Attributes:
      bidirectional: half of each block travels in either direction; no effect if a window cuts the
        hops of `ordered` shards.
      ordered: shards are runs of tokens in rank order, as `get_schedule` derives from the layout.
    """

    bidirectional: bool = False
    ordered: bool = False
    can_gather_along: ClassVar[bool] = True

    def forward(
        self, kernel: Kernel, queries: Queries, keys: Keys, context: Context
    ) -> AttentionPartial:
        return self.forward_and_gather(kernel, queries, keys, None, context)[0]

    def backward(
        self, kernel: Kernel, queries: Queries, keys: Keys, saved: BackwardInputs, context: Context
    ) -> Gradients:
        return self.backward_and_exchange(kernel, queries, keys, saved, Payload(), context)[0]

    def forward_and_gather(
        self, kernel: Kernel, queries: Queries, keys: Keys, shard: PyTree[Array], context: Context
    ) -> tuple[AttentionPartial, PyTree[Array]]:
        """As in Schedule: `shard` travels with K and V."""
        routes, replica = self._routes(
            context.ranks, context.mask, keys.k.shape[1], rides=shard is not None
        )
        local = keys.stacked()
        replicated = replica.gather(local) if replica else None

        def visit(partial, parts):
            if partial is None:
                return kernel.extend(None, queries, local, **context.scores), (), ()
            return (
                self._joined(kernel, parts).extend(
                    partial, queries, _concatenate(parts), **context.scores
                ),
                (),
                (),
            )

        partial, _, gathered, _ = _ring_pass(routes, local, visit, Payload(shard))
        if replicated:
            partial = kernel.extend(partial, queries, replicated, **context.scores)
        return partial, gathered

    def backward_and_exchange(
        self,
        kernel: Kernel,
        queries: Queries,
        keys: Keys,
        saved: BackwardInputs,
        payload: Payload,
        context: Context,
    ) -> tuple[Gradients, PyTree[Array] | None, PyTree[Array] | None]:
        """As in Schedule: shares are summed on the way, one hop behind the block, with dK and
        dV."""
        rides = payload.shard is not None or payload.shares is not None
        routes, replica = self._routes(context.ranks, context.mask, keys.k.shape[1], rides)
        local = keys.stacked()
        replicated = replica.gather(local) if replica else None

        def visit(dq, parts):
            if dq is None:
                dq, dkv = kernel.gradients(None, queries, local, saved, **context.scores)
                return dq, routes.split(dkv, local=True), ()
            dq, dkv = self._joined(kernel, parts).gradients(
                dq, queries, _concatenate(parts), saved, **context.scores
            )
            return dq, routes.split(dkv, local=False), ()

        dq, dkv, gathered, share = _ring_pass(routes, local, visit, payload)
        dkv = routes.join(dkv)
        if replica and replicated:
            dq, of_replicas = kernel.gradients(dq, queries, replicated, saved, **context.scores)
            dkv = replica.add_gradients(dkv, of_replicas, keys.coords)
        return Gradients(dq, *dkv), gathered, share

    def _joined(self, kernel: Kernel, parts: tuple[StackedKeys, ...]) -> Kernel:
        """The kernel for a block with several ranks' parts: only with ordered shards may the first
        be the later tokens."""
        return kernel.over_shards(1, len(parts)) if self.ordered else kernel

    def _routes(
        self, ranks: Ranks, mask: Mask, tokens: int, rides: bool = False
    ) -> tuple[_Routes, Replica | None]:
        """The routes of blocks, and of global tokens if blocks do not visit all ranks."""
        routes = _Routes.choose(ranks, mask, tokens, self.bidirectional, self.ordered)
        if not (rides or mask.global_tokens):
            return routes, None
        replica = (
            None if rides else Replica.choose(ranks, mask, tokens, routes.hops, routes.directions)
        )
        return (
            (routes, replica)
            if replica
            else (_Routes.choose(ranks, mask, tokens, self.bidirectional, False), None)
        )

    def plan(self, size: int, block: plan.Block, mask: Mask = Mask()) -> plan.Plan:
        routes, replica = self._routes(Ranks("", size), mask, block.tokens)
        first_half = block.tokens // 2 if routes.halved else block.tokens
        second_half = block.tokens - first_half if routes.halved else first_half
        parts = [dataclasses.replace(block, tokens=tokens) for tokens in (first_half, second_half)]
        travel = list(zip(routes.directions, parts, strict=False))

        def send(name, nbytes, hops=1):
            return tuple(
                plan.Send(name, plan.PERMUTE, nbytes(part), plan.shift(size, step * hops))
                for step, part in travel
            )

        def tasks(i):
            for rank in range(size):
                owners = [(rank - step * i) % size for step in routes.directions]
                if i and routes.halved:
                    yield from (
                        plan.Task(rank, (rank,), (owner,), key_part=(half, 2))
                        for half, owner in enumerate(owners)
                    )
                else:
                    yield plan.Task(rank, (rank,), tuple(owners if i else (rank,)))

        keys = send("K, V", lambda part: part.keys) + send("coordinates", lambda part: part.coords)
        gradients = send("dK, dV", lambda part: part.key_gradients)
        rounds = range(routes.hops + 1)
        forward = tuple(
            plan.Round(tuple(tasks(i)), keys if i < routes.hops else ()) for i in rounds
        )
        backward = tuple(
            each._replace(sends=each.sends + (gradients if i else ()))
            for i, each in enumerate(forward)
        )
        home = (
            send("dK, dV home", lambda part: part.key_gradients, -routes.hops)
            if routes.hops
            else ()
        )
        backward = (*backward, plan.Round((), home))
        if replica:
            gather, calls, scatter = replica.plan(block)
            forward, backward = (gather, *forward, calls), (gather, *backward, calls, scatter)
        return plan.Plan(forward, backward)


def _ring_pass(
    routes: _Routes,
    local: StackedKeys,
    visit: Callable[[Any, tuple[StackedKeys, ...]], tuple[Any, Any, Any]],
    payload: Payload,
) -> tuple[Any, Any, PyTree[Array] | None, PyTree[Array] | None]:
    """The ring pass of this rank's block; if other arrays ride along, the routes visit all ranks.

    Args:
      visit: as in `ring_pass`.

    Returns:
      The last carry; what all ranks contributed for this block; the shards of all ranks [P, ...];
      the sum of this rank's shares.
    """
    shard, shares = payload
    if shard is None and shares is None:
        carry, returned, _ = ring_pass(
            routes.divide(local), routes.hops, routes.send, routes.send_home, visit
        )
        return carry, returned, None, None
    ranks, direction = routes.ranks, routes.directions[0]
    empty = jax.tree.map(lambda x: jnp.zeros((ranks.size, *x.shape), x.dtype), shard)

    def visit_with_payload(carry, block):
        parts, shard = block
        carry, gathered, owner = (None, empty, ranks.index()) if carry is None else carry
        gathered = jax.tree.map(
            lambda rows, row: lax.dynamic_update_index_in_dim(rows, row, owner, 0), gathered, shard
        )
        share = jax.tree.map(
            lambda rows: lax.dynamic_index_in_dim(rows, owner, 0, keepdims=False), shares
        )
        # Before the kernels: after them compilers would assume that these take long enough to hide
        # a transfer.
        parts, gathered, share = lax.optimization_barrier((parts, gathered, share))
        carry, contribution, output = visit(carry, parts)
        return (carry, gathered, (owner - direction) % ranks.size), (contribution, share), output

    def send(block):
        return routes.send(block[0]), ranks.shift(block[1], direction)

    def send_home(contribution):
        return routes.send_home(contribution[0]), ranks.shift(
            contribution[1], -direction * routes.hops
        )

    (carry, gathered, _), (returned, share), _ = ring_pass(
        (routes.divide(local), shard), routes.hops, send, send_home, visit_with_payload
    )
    return carry, returned, gathered, share


def _token_axis(x: jax.Array) -> int:
    """Coordinates are [B, T], stacked K and V, and their gradients, [2, B, T, Hkv, D]."""
    return 1 if x.ndim == 2 else 2


def _length(tree: PyTree[Array]) -> int:
    x = jax.tree.leaves(tree)[0]
    return x.shape[_token_axis(x)]


def _split(tree: PyTree[Array], length: int) -> tuple[PyTree[Array], PyTree[Array]]:
    """Two trees: the first `length` tokens, and the others."""

    def tokens(start, stop):
        return jax.tree.map(lambda x: lax.slice_in_dim(x, start, stop, axis=_token_axis(x)), tree)

    return tokens(0, length), tokens(length, _length(tree))


def _concatenate(parts: tuple[PyTree[Array], ...]) -> PyTree[Array]:
    """The parts on a rank at a time, as one block of keys."""
    return (
        jax.tree.map(lambda *x: jnp.concatenate(x, _token_axis(x[0])), *parts)
        if len(parts) > 1
        else parts[0]
    )

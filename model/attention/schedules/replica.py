"""Replicas of the global tokens on every rank, next to a windowed ring (DistFlashAttn, Appendix D,
"Global attention").

With a window, each block of a contiguous ring visits only the nearest ranks (`ring.py`). A rank's
queries also see the first tokens of their documents, however far away. Only a rank's first document
can have begun on a rank that no block comes from, since a document is a run of tokens. So each rank
provides its global tokens of its *last* document, the only one that can continue beyond it: at most
`slots` tokens per row. All ranks gather these and attend to them in an extra kernel call, which
hides those of ranks the ring visits. The backward gathers them again, and returns their gradients
by a reduce-scatter in float32.

Traffic: (P - 1) x slots tokens of K and V per rank, instead of a whole ring's extra (P - 1 - reach)
T.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ..blocks import StackedKeys
from ..coords import Mask, TokenCoords, check_starts
from . import plan
from .ranks import Ranks


@dataclasses.dataclass(frozen=True)
class Replica:
    """How global tokens are replicated.

    Attributes:
      ranks: the shards of the sequence, in the order of its tokens.
      mask: which keys a query sees; it has a window and global tokens.
      slots: tokens per row that each rank provides.
      reach: ranks that a block visits in each direction.
      directions: of the ring.
    """

    ranks: Ranks
    mask: Mask
    slots: int
    reach: int
    directions: tuple[int, ...]

    @classmethod
    def choose(
        cls, ranks: Ranks, mask: Mask, tokens: int, reach: int, directions: tuple[int, ...]
    ) -> Replica | None:
        """The replica for shards of `tokens` tokens; None if sending whole blocks to all ranks
        moves fewer tokens."""
        slots = min(mask.global_tokens, tokens)
        if (
            not slots
            or (ranks.size - 1) * slots >= (ranks.size - 1 - reach * len(directions)) * tokens
        ):
            return None
        return cls(ranks, mask, slots, reach, directions)

    def gather(self, local: StackedKeys) -> StackedKeys:
        """The global tokens of all ranks, P x slots of each row; those the ring brings here are
        hidden as padding.

        Raises:
          ValueError: the documents' starts are missing.
        """
        first = self._first_slot(local.coords)
        index, segments, starts, _ = self._cut(local.coords, first, 0)
        last = local.coords.segment_ids[:, -1:]
        is_global = (segments == last) & (
            index - check_starts(starts, self.mask) < self.mask.global_tokens
        )
        coords = TokenCoords(index, jnp.where(is_global, segments, 0), starts)
        kv = self.ranks.gather(self._cut(local.kv, first, 1), 2)
        coords = self.ranks.gather(coords, 1)
        owners = jnp.repeat(jnp.arange(self.ranks.size), self.slots)
        hops = jnp.stack(
            [(self.ranks.index() - owners) * step % self.ranks.size for step in self.directions]
        ).min(0)
        return StackedKeys(
            kv, coords._replace(segment_ids=jnp.where(hops > self.reach, coords.segment_ids, 0))
        )

    def add_gradients(
        self,
        dkv: Float[Array, "2 B T Hkv D"],
        replica: Float[Array, "2 B S Hkv D"],
        coords: TokenCoords,
    ) -> Float[Array, "2 B T Hkv D"]:
        """The gradients of this rank's K and V, including those through all ranks' replicas.

        Args:
          dkv: from the ring; replica: of what `gather` returned; coords: of this rank's keys.
        """
        returned = jnp.stack(self.ranks.reduce_scatter(tuple(replica), 1))

        def add(row, part, first):
            return lax.dynamic_update_slice_in_dim(
                row, lax.dynamic_slice_in_dim(row, first, self.slots, 1) + part, first, 1
            )

        return jax.vmap(add, (1, 1, 0), 1)(dkv, returned, self._first_slot(coords))

    def _first_slot(self, coords: TokenCoords) -> Int[Array, " B"]:
        """The position of the first token that each row provides: where its last document begins
        here, or as near as slots fit."""
        begins = jnp.argmax(coords.segment_ids == coords.segment_ids[:, -1:], axis=1)
        return jnp.minimum(begins, coords.index.shape[1] - self.slots)

    def _cut(self, tree, first: Int[Array, " B"], batch_axis: int):
        """`slots` tokens of each row, from `first` on, of arrays whose token axis follows the batch
        axis."""

        def cut(x):
            rows = jax.vmap(
                lambda row, start: lax.dynamic_slice_in_dim(row, start, self.slots, batch_axis),
                (batch_axis, 0),
                batch_axis,
            )
            return rows(x, first)

        return jax.tree.map(cut, tree)

    def plan(self, block: plan.Block) -> tuple[plan.Round, plan.Round, plan.Round]:
        """The gather before the ring's rounds; the kernel calls after them; the return of
        gradients."""
        size, global_tokens = self.ranks.size, dataclasses.replace(block, tokens=self.slots)
        pairs = plan.everyone([range(size)])
        gather = plan.Round(
            (),
            (
                plan.Send("K, V of global tokens", plan.GATHER, global_tokens.keys, pairs),
                plan.Send("their coordinates", plan.GATHER, global_tokens.coords, pairs),
            ),
        )
        share = (0, max(1, block.tokens // self.slots))
        tasks = plan.Round(
            tuple(
                plan.Task(rank, (rank,), tuple(range(size)), key_part=share) for rank in range(size)
            )
        )
        scatter = plan.Send(
            "dK, dV of global tokens", plan.SCATTER, global_tokens.key_gradients, pairs
        )
        return gather, tasks, plan.Round((), (scatter,))

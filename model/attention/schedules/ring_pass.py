"""A tour: a block goes round a line of ranks, and what each stop adds to it follows one hop behind.

Every stop sends the block on *before* it is visited, so the transfer overlaps the kernel, and the last stop sends nothing.
What a visit leaves for the block's owner (dK/dV, or a partial output) goes on while the next stop's kernel runs, and is
added to that stop's own afterwards: no transfer waits for the kernel that has just started. The first and the last stop are
peeled, the others are a scan, so that the compiled text does not grow with the number of ranks.
"""
from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from ..partial import AttentionPartial, merge


def add(a, b):
    """Two trees, leaf by leaf: partial attention is merged, arrays are added, None adds nothing."""
    def one(a, b):
        if b is None:
            return a
        return merge(a, b) if isinstance(a, AttentionPartial) else a + b

    return jax.tree.map(one, a, b, is_leaf=lambda x: isinstance(x, AttentionPartial))


def tour(block, hops: int, send: Callable, home: Callable, visit: Callable, found=None, last: Callable | None = None):
    """`hops` hops of a block, `hops` + 1 visits, of which the first is paid where the block is now.

    Args:
      block: a tree of arrays, here at first.
      send: a tree -> the tree of the rank before; home: the same from the end of the tour back to the block's owner.
      visit: (found, block) -> (found, left, kept): what stays here and is handed on from visit to visit (None or the argument
        `found` at first), what follows the block (a tree that may be empty; added up), and what is kept of each visit.
      last: the last visit, where it differs.

    Returns:
      found after the last visit; what this rank's own block brought home; kept, stacked on a new leading axis, own block first.
    """
    last = last or visit
    if not hops:
        found, left, kept = last(found, block)
        return found, home(left), jax.tree.map(lambda x: x[None], kept)
    # The barriers keep the stops apart where the compiler unrolls a short scan: else it starts all the sends at once, of which
    # the first kernel hides but one.
    incoming = send(block)
    found, left, first_kept = visit(found, block)
    carry = lax.optimization_barrier((found, left, incoming))

    def stop(carry, _):
        found, left, block = carry
        incoming, arriving = send(block), send(left)
        found, left, kept = visit(found, block)
        # Before the sum: the compilers take it for long enough to hide a transfer, which they then start after the kernels.
        found, left, arriving, incoming = lax.optimization_barrier((found, left, arriving, incoming))
        return (found, add(arriving, left), incoming), kept

    (found, left, block), kept = lax.scan(stop, carry, None, length=hops - 1)
    arriving = send(left)
    found, left, last_kept = last(found, block)
    found, left, arriving = lax.optimization_barrier((found, left, arriving))
    kept = jax.tree.map(lambda a, b, c: jnp.concatenate([a[None], b, c[None]]), first_kept, kept, last_kept)
    return found, home(add(arriving, left)), kept

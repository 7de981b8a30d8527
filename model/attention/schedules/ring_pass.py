"""A ring pass: every rank's block visits all ranks of a ring, and the visits' contributions for its
owner follow one hop behind.

Each round sends the block on *before* using it, so that the transfer overlaps the kernel; the last
round sends nothing. The contribution to the block's owner (dK and dV, or a partial output) travels
while the next round's kernel runs, and that round's contribution is added afterwards, so that no
transfer waits for the kernel just started. The first and the last round are peeled and the others
are a scan, so the compiled text does not grow with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..partial import AttentionPartial, merge


class RingPass(NamedTuple):
    """The results of a ring pass on one rank.

    Attributes:
      carry: the carry of `visit` after the last round.
      returned: all ranks' contributions for this rank's block, a tree.
      outputs: each round's output, stacked on a new leading axis, this rank's block first.
    """

    carry: Any
    returned: Any
    outputs: Any


def ring_pass(
    block,
    hops: int,
    send: Callable,
    send_home: Callable,
    visit: Callable,
    carry=None,
    last_visit: Callable | None = None,
) -> RingPass:
    """Passes a block on `hops` times, in `hops` + 1 rounds; the first uses this rank's block.

    Args:
      block: a tree of arrays, this rank's block.
      hops: how often the block is passed on.
      send: a tree -> the same tree of the previous rank.
      send_home: a tree on the rank where a block ends -> the tree on the rank that owns the block.
      visit: (carry, block) -> (carry, contribution, output): what stays on this rank between
        rounds, what goes to the block's owner (a tree, perhaps empty, summed over the rounds), and
        what is stacked over the rounds.
      carry: the carry of the first round.
      last_visit: the last round's `visit`, if different.
    """
    last_visit = last_visit or visit
    if not hops:
        carry, contribution, output = last_visit(carry, block)
        return RingPass(carry, send_home(contribution), jax.tree.map(lambda x: x[None], output))
    # The barriers separate the rounds if the compiler unrolls a short scan. Without them it starts
    # all sends at once, and the first kernel hides only one.
    incoming = send(block)
    carry, contribution, first_output = visit(carry, block)
    state = lax.optimization_barrier((carry, contribution, incoming))

    def one_round(state, _):
        carry, contribution, block = state
        incoming, arriving = send(block), send(contribution)
        carry, contribution, output = visit(carry, block)
        # Before the sum: compilers assume that it takes long enough to hide a transfer, and would
        # start one only then.
        carry, contribution, arriving, incoming = lax.optimization_barrier(
            (carry, contribution, arriving, incoming)
        )
        return (carry, add(arriving, contribution), incoming), output

    (carry, contribution, block), outputs = lax.scan(one_round, state, None, length=hops - 1)
    arriving = send(contribution)
    carry, contribution, last_output = last_visit(carry, block)
    carry, contribution, arriving = lax.optimization_barrier((carry, contribution, arriving))
    outputs = jax.tree.map(
        lambda a, b, c: jnp.concatenate([a[None], b, c[None]]), first_output, outputs, last_output
    )
    return RingPass(carry, send_home(add(arriving, contribution)), outputs)


def add(a, b):
    """The sum of two trees, leaf by leaf: merges partial results of attention, adds arrays; None
    adds nothing."""

    def add_leaf(a, b):
        if b is None:
            return a
        return merge(a, b) if isinstance(a, AttentionPartial) else a + b

    return jax.tree.map(add_leaf, a, b, is_leaf=lambda x: isinstance(x, AttentionPartial))

"""The interval of keys that each query sees, or of queries that see each key, by binary search
instead of comparing all pairs.

In every layout a rank holds its tokens in row order. So a document is one contiguous run of a
block, along which `index` increases, and causality and windows bound `index` on both sides: without
global tokens the keys of a query are one interval of the block, and so are the queries of a key. A
kernel with these intervals needs no key coordinates: from two integers per token it knows which
tiles to load and which of them need no mask.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from ..coords import Mask, TokenCoords


class Intervals(NamedTuple):
    """For each token, the interval [first, last) of the tokens that it sees, or that see it, in the
    other block.

    Attributes:
      first, last: int32; equal for padding and for tokens that see nothing.
    """

    first: Int[Array, "B T"]
    last: Int[Array, "B T"]


def row_order(coords: TokenCoords) -> Int[Array, "B T"]:
    """Returns the permutation that sorts tokens into row order, padding last: for blocks that
    concatenate several shards."""
    documents = jnp.where(coords.segment_ids > 0, coords.segment_ids, jnp.iinfo(jnp.int32).max)
    return jnp.lexsort((coords.index, documents), axis=-1).astype(jnp.int32)


def in_row_order(coords: TokenCoords) -> Bool[Array, ""]:
    """Returns whether all rows are in order: document numbers ascend, `index` ascends within each
    document, and padding is only between documents."""
    numbers = _numbers(coords)
    step = numbers[:, 1:] - numbers[:, :-1]
    is_padding, rises = coords.segment_ids[:, 1:] == 0, coords.index[:, 1:] > coords.index[:, :-1]
    return jnp.all((step > 0) | ((step == 0) & (is_padding | rises)))


def _numbers(coords: TokenCoords) -> Int[Array, "B T"]:
    """Numbers documents evenly, and padding with the odd number after the preceding document."""
    segments = coords.segment_ids
    return jnp.where(segments > 0, 2 * segments, 2 * lax.cummax(segments, axis=1) + 1)


def intervals(
    tokens: TokenCoords, others: TokenCoords, mask: Mask, transpose: bool = False
) -> Intervals:
    """Returns for each query the interval of the keys that it sees.

    Args:
      tokens: the queries; with `transpose`, the keys.
      others: the other block's tokens, in row order (`in_row_order`).
      transpose: return for each key the interval of the queries that see it.

    Raises:
      ValueError: the mask has global tokens, so that a query sees two intervals.
    """
    if mask.global_tokens:
        raise ValueError(
            f"intervals: found Mask.global_tokens = {mask.global_tokens}; a query then sees two "
            "intervals of keys"
        )
    limits = jnp.iinfo(jnp.int32)
    index, documents = tokens.index, tokens.segment_ids
    # How far the other token's index may be below and above.
    below = above = None if mask.window is None else mask.window - 1
    if mask.causal:
        below, above = (0, above) if transpose else (below, 0)
    lowest = jnp.full_like(index, limits.min) if below is None else index - below
    # One past the last; does not overflow int32, whatever the window.
    highest = (
        jnp.full_like(index, limits.max)
        if above is None
        else index + jnp.minimum(above, limits.max - 1 - index) + 1
    )
    first, last = (_count_before(others, documents, bound) for bound in (lowest, highest))
    return Intervals(
        jnp.where(documents > 0, first, 0), jnp.where(documents > 0, jnp.maximum(first, last), 0)
    )


def _count_before(
    others: TokenCoords, documents: Int[Array, "B T"], bounds: Int[Array, "B T"]
) -> Int[Array, "B T"]:
    """Returns how many of `others` precede the index `bounds` of each document, by binary
    search."""
    numbers, length = _numbers(others), others.index.shape[1]

    def halve(_, ends):
        low, high = ends
        middle = (low + high) // 2
        number, index = (
            jnp.take_along_axis(x, jnp.minimum(middle, length - 1), 1)
            for x in (numbers, others.index)
        )
        before = (low < high) & (
            (number < 2 * documents) | ((number == 2 * documents) & (index < bounds))
        )
        return jnp.where(before, middle + 1, low), jnp.where(before, high, middle)

    start = jnp.zeros_like(documents), jnp.full_like(documents, length)
    # Unrolled, the whole search is one GPU kernel; a loop would launch several per step.
    return lax.fori_loop(0, length.bit_length(), halve, start, unroll=True)[0]


def tile_edges(visible: Intervals, tile: int, other_tile: int) -> Int[Array, "B n 4"]:
    """Returns for each tile the range of the other block's tiles: the first needed, the first that
    needs no mask, one past the last of these, one past the last needed.

    Args:
      visible: the intervals of the tokens, whose number is a multiple of `tile`.
      tile, other_tile: tokens per tile of this block and of the other.
    """
    first, last = (x.reshape(x.shape[0], -1, tile) for x in visible)
    nonempty = first < last
    begin = jnp.where(nonempty, first, jnp.iinfo(jnp.int32).max).min(-1) // other_tile
    end = -(-jnp.where(nonempty, last, 0).max(-1) // other_tile)
    begin = jnp.minimum(begin, end)
    # A tile needs no mask if every token sees all of it; there is none if any token sees nothing.
    begin_full = jnp.clip(-(-first.max(-1) // other_tile), begin, end)
    end_full = jnp.where(
        nonempty.all(-1), jnp.clip(last.min(-1) // other_tile, begin_full, end), begin_full
    )
    return jnp.stack([begin, begin_full, end_full, end], -1).astype(jnp.int32)

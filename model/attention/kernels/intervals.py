"""Intervals: which run of the other side's tokens a token sees, or is seen by, found by search
instead of comparing all pairs.

In every layout a rank holds its tokens in the order of the row. A document is then one run of a
block, along which `index` rises, and causality and windows bound `index` from both sides: without
global tokens the keys of a query are one interval of the block, and so are the queries of a key. A
kernel that is given these intervals needs no coordinates of keys, and finds by two integers of a
tile which tiles it must load and which of them need no mask.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from ..coords import Mask, TokenCoords


class Intervals(NamedTuple):
    """Of each token the tokens of the other side that belong to it: numbers first to last - 1 of
    the block, none if equal.

    Attributes:
      first, last: int32; `last` is one past the end. They are equal for padding and for tokens that
        see nothing.
    """

    first: Int[Array, "B T"]
    last: Int[Array, "B T"]


def row_order(coords: TokenCoords) -> Int[Array, "B T"]:
    """The permutation that brings tokens into the order of their row, padding last: for blocks of
    several shards in a row."""
    documents = jnp.where(coords.segment_ids > 0, coords.segment_ids, jnp.iinfo(jnp.int32).max)
    return jnp.lexsort((coords.index, documents), axis=-1).astype(jnp.int32)


def in_row_order(coords: TokenCoords) -> Bool[Array, ""]:
    """Whether all rows are in order: documents by rising number, rising `index` in each, and
    padding only between documents."""
    numbers = _numbers(coords)
    step = numbers[:, 1:] - numbers[:, :-1]
    is_padding, rises = coords.segment_ids[:, 1:] == 0, coords.index[:, 1:] > coords.index[:, :-1]
    return jnp.all((step > 0) | ((step == 0) & (is_padding | rises)))


def _numbers(coords: TokenCoords) -> Int[Array, "B T"]:
    """Even numbers of documents, and for padding the odd one after the document that it follows."""
    segments = coords.segment_ids
    return jnp.where(segments > 0, 2 * segments, 2 * lax.cummax(segments, axis=1) + 1)


def intervals(
    tokens: TokenCoords, others: TokenCoords, mask: Mask, transpose: bool = False
) -> Intervals:
    """For each query the interval of the keys that it sees.

    Args:
      tokens: the queries; with `transpose`, the keys.
      others: the other side, in the order of the row (`in_row_order`).
      transpose: for each key the interval of the queries that see it.

    Raises:
      ValueError: the mask has global tokens, with which a query sees two intervals.
    """
    if mask.global_tokens:
        raise ValueError(
            f"intervals: found Mask.global_tokens = {mask.global_tokens}; a query then sees two "
            "intervals of keys"
        )
    limits = jnp.iinfo(jnp.int32)
    index, documents = tokens.index, tokens.segment_ids
    # How far away the other side's index may be.
    below = above = None if mask.window is None else mask.window - 1
    if mask.causal:
        below, above = (0, above) if transpose else (below, 0)
    lowest = jnp.full_like(index, limits.min) if below is None else index - below
    # One past the last, and within int32 whatever the window is.
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
    """How many of `others` come before the given `index` of the given document, by binary
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
    # Unrolled, all steps of the search are one program of a GPU; a loop would start several for
    # each of them.
    return lax.fori_loop(0, length.bit_length(), halve, start, unroll=True)[0]


def tile_edges(of_tokens: Intervals, tile: int, other_tile: int) -> Int[Array, "B n 4"]:
    """For each tile of tokens the range of the other side's tiles: the first needed, the first that
    needs no mask, one past the last of these, one past the last needed.

    Args:
      of_tokens: the tokens' intervals; their number is a multiple of `tile`.
      tile, other_tile: tokens in a tile of theirs and of the other side.
    """
    first, last = (x.reshape(x.shape[0], -1, tile) for x in of_tokens)
    some = first < last
    begin = jnp.where(some, first, jnp.iinfo(jnp.int32).max).min(-1) // other_tile
    end = -(-jnp.where(some, last, 0).max(-1) // other_tile)
    begin = jnp.minimum(begin, end)
    # A tile without a mask is seen whole by every token; one that sees nothing leaves none.
    begin_full = jnp.clip(-(-first.max(-1) // other_tile), begin, end)
    end_full = jnp.where(
        some.all(-1), jnp.clip(last.min(-1) // other_tile, begin_full, end), begin_full
    )
    return jnp.stack([begin, begin_full, end_full, end], -1).astype(jnp.int32)

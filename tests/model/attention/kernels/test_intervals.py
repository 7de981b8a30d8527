"""Intervals against the dense mask and the tile rule: random rows, all layouts and pairs of ranks,
as the rows of one batch."""

import itertools

import jax
import numpy as np
import pytest

from model.attention import Mask, TokenCoords
from model.attention.coords import FULL, SKIP, tile_bounds, tile_kind, visible
from model.attention.kernels.intervals import in_row_order, intervals, row_order, tile_edges
from model.attention.layout import permutation
from model.attention.names import LAYOUTS

from .test_tpu import MASKS

SHARDS, TOKENS, ROWS = 3, 48, 24  # TOKENS per block; ROWS random packed rows
TILE, OTHER_TILE = 8, 4
LIMITS = [*MASKS, Mask(window=1), Mask(window=2**31 - 1), Mask(causal=False, window=2**31 - 1)]


def random_row(rng):
    """Returns coordinates [L] of a packed row: documents, padding after some of them, an index that
    counts in the row or in the document."""
    length, restarts = SHARDS * TOKENS, rng.random() < 0.5
    ends = np.sort(rng.choice(np.arange(1, length), rng.integers(0, 6), replace=False))
    segments = np.searchsorted(ends, np.arange(length), side="right") + 1
    index = np.arange(length) - (np.concatenate([[0], ends])[segments - 1] if restarts else 0)
    padded = np.isin(segments, rng.integers(1, 8, rng.integers(0, 3))) & (rng.random() < 0.7)
    return index.astype(np.int32), np.where(padded, 0, segments).astype(np.int32)


def blocks(layout):
    """Returns coordinates [B, T] of queries and keys: every pair of ranks of every random row."""
    rng = np.random.default_rng(LAYOUTS.index(layout))
    order = permutation(SHARDS * TOKENS, SHARDS, layout).reshape(SHARDS, -1)
    rows = [random_row(rng) for _ in range(ROWS)]
    pairs = list(itertools.product(rows, range(SHARDS), range(SHARDS)))
    return tuple(
        TokenCoords(
            *(np.stack([row[i][order[pair[side]]] for row, *pair in pairs]) for i in range(2))
        )
        for side in range(2)
    )


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("mask", LIMITS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_intervals_match_the_dense_mask_and_their_tiles_the_tile_rule(layout, mask, transpose):
    """In either direction, what a query sees and what sees a key is one interval. Its tiles contain
    every needed tile, go without a mask only if everything in them is visible, and are no more than
    a kernel walks by the tile rule."""
    queries, keys = blocks(layout)
    assert in_row_order(queries) and in_row_order(keys)
    tokens, others = (keys, queries) if transpose else (queries, keys)
    ranges = jax.jit(lambda *coords: intervals(*coords, mask, transpose))(tokens, others)
    edges = np.asarray(tile_edges(ranges, TILE, OTHER_TILE))
    seen = np.asarray(visible(queries, keys, mask))
    seen = seen.swapaxes(1, 2) if transpose else seen
    first, last = (np.asarray(x)[..., None] for x in ranges)
    number = np.arange(TOKENS)
    assert ((number >= first) & (number < last) == seen).all()
    assert ((first < last)[..., 0] == seen.any(-1)).all()

    tiles = seen.reshape(len(seen), TOKENS // TILE, TILE, TOKENS // OTHER_TILE, OTHER_TILE)
    first, first_full, last_full, last = (edges[..., [i]] for i in range(4))
    number = np.arange(TOKENS // OTHER_TILE)
    assert (
        (edges[..., 1:] >= edges[..., :-1]).all()
        and edges.min() >= 0
        and edges.max() <= len(number)
    )
    visited = (number >= first) & (number < last)
    full = (number >= first_full) & (number < last_full)
    assert (visited | ~tiles.any((2, 4))).all()
    assert (tiles.all((2, 4)) | ~full).all()

    bounds = [
        jax.tree.map(lambda x, axis=axis: np.expand_dims(x, axis), tile_bounds(*side))
        for side, axis in (((tokens, TILE), 2), ((others, OTHER_TILE), 1))
    ]
    kinds = np.asarray(tile_kind(*(bounds[::-1] if transpose else bounds), mask))
    assert (full | (kinds != FULL)).all(), "a tile that the rule calls full is masked"
    needed = kinds != SKIP
    walked = len(number) - needed.argmax(-1) - needed[..., ::-1].argmax(-1)
    assert ((last - first)[..., 0] <= np.where(needed.any(-1), walked, 0)).all()


def test_row_order_sorts_gathered_shards_into_their_row():
    index = np.arange(48, dtype=np.int32)[None]
    segments = np.repeat([1, 2, 0], (20, 17, 11))[None].astype(np.int32)
    order = permutation(48, 4, "striped")
    back = np.asarray(row_order(TokenCoords(index[:, order], segments[:, order])))
    assert (np.take_along_axis(index[:, order], back, 1) == index).all()


@pytest.mark.parametrize(
    ("index", "segments"),
    [
        ([0, 1, 2, 3], [1, 1, 0, 1]),
        ([0, 1, 2, 3], [2, 2, 1, 1]),
        ([0, 2, 1, 3], [1, 1, 1, 1]),
        ([0, 1, 1, 2], [1, 1, 1, 1]),
        ([0, 1, 2, 3], [1, 0, 1, 2]),
    ],
    ids=["padding inside", "documents back", "index back", "index twice", "a document in two"],
)
def test_a_row_out_of_order_is_detected(index, segments):
    """In one row of two; the other one is in order."""
    rows = TokenCoords(
        *(np.array(x, np.int32) for x in ([[0, 1, 2, 3], index], [[1, 1, 2, 0], segments]))
    )
    assert in_row_order(jax.tree.map(lambda x: x[:1], rows)) and not in_row_order(rows)


def test_global_tokens_have_no_interval():
    coords = TokenCoords(*np.ones((2, 1, 8), np.int32))
    with pytest.raises(ValueError, match="sees two intervals"):
        intervals(coords, coords, Mask(window=4, global_tokens=1))

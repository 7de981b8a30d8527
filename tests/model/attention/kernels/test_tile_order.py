"""How well a GPU's cores are filled by tiles in the order in which the Mosaic kernels start them."""

import functools
import heapq

import jax
import numpy as np
import pytest

from model.attention import Mask, TokenCoords
from model.attention.kernels.intervals import intervals, tile_edges

CORES = 132  # of an H100 or H200; each runs one block at a time
TILE, OTHER_TILE = 128, 64
LENGTH, DOCUMENTS = 32_768, 16
MOST = 1.02  # of the time in which all cores would be busy to the end


def busiest_core(times):
    """Returns when the last block ends: each starts on the first core that is free."""
    cores = [0.0] * CORES
    for time in times:
        heapq.heapreplace(cores, cores[0] + time)
    return max(cores)


def packed_row(documents, rng):
    """Coordinates of one row of this many documents, of random lengths."""
    ends = np.sort(rng.choice(np.arange(1, LENGTH), documents - 1, replace=False))
    segments = np.searchsorted(ends, np.arange(LENGTH), side="right") + 1
    return TokenCoords(np.arange(LENGTH, dtype=np.int32)[None], segments.astype(np.int32)[None])


@functools.cache
def edges_of_tiles(documents, keys_kernel):
    """Returns the ranges [n, 4] of the other side's tiles."""
    coords = packed_row(documents, np.random.default_rng(documents))

    @jax.jit
    def edges(coords):
        return tile_edges(intervals(coords, coords, Mask(), keys_kernel), TILE, OTHER_TILE)

    return np.asarray(edges(coords))[0]


@pytest.mark.parametrize("heads", [8, 32])
@pytest.mark.parametrize("documents", [1, DOCUMENTS])
@pytest.mark.parametrize("keys_kernel", [False, True])
def test_no_other_order_would_gain_two_percent(keys_kernel, documents, heads):
    """Tiles start in the order of the row: the last first where they belong to queries, the first
    first where they belong to keys. A tile costs one unit to begin and end, and one for each tile
    of the other side."""
    edges = edges_of_tiles(documents, keys_kernel)
    times = 1.0 + edges[:, 3] - edges[:, 0]
    times = np.repeat(times if keys_kernel else times[::-1], heads)
    assert busiest_core(times) < MOST * times.sum() / CORES

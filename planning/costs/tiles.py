"""Counts the tiles that a kernel cannot skip, for each pair of ranks."""

from __future__ import annotations

import functools
import math

import numpy as np

from model.attention.layout import permutation


@functools.lru_cache(maxsize=64)
def tile_counts(
    ranks: int, query_tiles: int, key_tiles: int, layout: str, causal: bool = True
) -> np.ndarray:
    """The tiles computed for the queries of rank p and the keys of rank k: int array [p, k].

    The rule is that of `model.attention.coords`: a tile is skipped if its last query comes before
    its first key. The count depends on the number of tiles in a block, not their length (two tokens
    or more), so a short sequence of one document can represent the real one.

    Args:
      query_tiles, key_tiles: tiles of a block.
    """
    if not causal:
        return np.full((ranks, ranks), query_tiles * key_tiles)
    tokens = 2 * math.lcm(query_tiles, key_tiles)
    rank_tokens = permutation(ranks * tokens, ranks, layout).reshape(ranks, tokens)
    last_query = rank_tokens.reshape(ranks, query_tiles, -1).max(2)
    first_key = np.sort(rank_tokens.reshape(ranks, key_tiles, -1).min(2), 1)
    counts = np.empty((ranks, ranks), int)
    for rank, keys in enumerate(first_key):
        counts[:, rank] = np.searchsorted(keys, last_query, side="right").sum(1)
    counts.flags.writeable = False
    return counts

"""How many tiles of scores the tile rule leaves to compute, for each pair of ranks' blocks."""
from __future__ import annotations

import functools
import math

import numpy as np

from model.attention.layout import permutation


@functools.lru_cache(maxsize=64)
def tile_counts(ranks: int, query_tiles: int, key_tiles: int, layout: str, causal: bool = True) -> np.ndarray:
    """Tiles that are not skipped when the queries of rank p meet the keys of rank k: int array [p, k].

    The rule is `model.attention.coords`': a tile is skipped where its last query comes before its first key. Only how many
    tiles a block has matters, not how long a tile is (two tokens or more), so a small sequence stands for the real one.
    Blocks of `query_tiles` x `key_tiles` tiles; one document.
    """
    if not causal:
        return np.full((ranks, ranks), query_tiles * key_tiles)
    tokens = 2 * math.lcm(query_tiles, key_tiles)
    held = permutation(ranks * tokens, ranks, layout).reshape(ranks, tokens)
    last_query = held.reshape(ranks, query_tiles, -1).max(2)
    first_key = np.sort(held.reshape(ranks, key_tiles, -1).min(2), 1)
    counts = np.empty((ranks, ranks), int)
    for rank, keys in enumerate(first_key):
        counts[:, rank] = np.searchsorted(keys, last_query, side="right").sum(1)
    counts.flags.writeable = False
    return counts

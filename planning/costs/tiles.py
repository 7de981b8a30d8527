"""Counts the tiles that a kernel cannot skip, for each pair of ranks."""

from __future__ import annotations

import functools
import math

import numpy as np
from jaxtyping import Int

from model.attention.coords import Mask
from model.attention.layout import LAYOUTS


@functools.lru_cache(maxsize=64)
def tile_counts(
    ranks: int,
    query_tiles: int,
    key_tiles: int,
    layout: str,
    mask: Mask = Mask(),
    tokens: int | None = None,
) -> np.ndarray:
    """The tiles computed for the queries of rank p and the keys of rank k: int array [p, k].

    The rule is that of `model.attention.coords`, for one document: a causal mask skips a tile whose
    last query comes before its first key, a window one whose first query is that far from its last
    key.

    Args:
      query_tiles, key_tiles: tiles of a block.
      layout: one of LAYOUTS.
      tokens: of a block. Only a window needs them: otherwise the count depends on the number of
        tiles alone.

    Raises:
      ValueError: an unknown layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: found {layout!r}; {', '.join(LAYOUTS)} would work")
    if not mask.causal:
        return np.full((ranks, ranks), query_tiles * key_tiles)
    block = 2 * math.lcm(query_tiles, key_tiles) if tokens is None else tokens
    first_query, last_query = _tile_ends(ranks, query_tiles, layout, block)
    first_key, last_key = _tile_ends(ranks, key_tiles, layout, block)
    counts = np.empty((ranks, ranks), int)
    for rank, (first, last) in enumerate(zip(first_key, last_key, strict=True)):
        computed = np.searchsorted(first, last_query, side="right")
        if mask.window is not None:
            beyond = np.searchsorted(last, first_query - mask.window, side="right")
            of_global_tokens = np.searchsorted(first, mask.global_tokens)
            computed -= np.maximum(beyond - of_global_tokens, 0)
        counts[:, rank] = computed.sum(1)
    counts.flags.writeable = False
    return counts


def _tile_ends(
    ranks: int, tiles: int, layout: str, tokens: int
) -> tuple[Int[np.ndarray, "ranks tiles"], Int[np.ndarray, "ranks tiles"]]:
    """The indices in the row of the first and the last token of each tile, which rise along a rank
    in every layout. Without `permutation`, whose array of a row of a million tokens takes long."""
    starts = np.arange(tiles + 1) * tokens // tiles
    rank = np.arange(ranks)[:, None]

    def index(local):
        if layout == "contiguous":
            return rank * tokens + local
        if layout == "striped":
            return rank + local * ranks
        half = tokens // 2
        return np.where(local < half, rank, 2 * ranks - 2 - rank) * half + local

    return index(starts[:-1]), index(starts[1:] - 1)

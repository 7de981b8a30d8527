"""The blockwise kernel that tells of every tile it computes while the program runs: for measuring balance."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
from jax import lax

from . import Kernel
from .xla import Tiles


@dataclasses.dataclass(frozen=True)
class CountedTiles(Tiles):
    """`tell(rank, query, key)` is called on the host for each tile that is computed, in either pass.

    rank is the place on the mesh axis `axis`; query and key are the `index` of the tile's first query and first key in the
    first row of the batch. Skipped tiles are never told of: the call stands where the scores are made.
    """

    tell: Callable | None = None
    axis: str = "sequence"

    def _scores(self, q, k, q_coords, kv_coords, *rest):
        jax.debug.callback(self.tell, lax.axis_index(self.axis), q_coords.index[0, 0], kv_coords.index[0, 0])
        return super()._scores(q, k, q_coords, kv_coords, *rest)


def counted_kernel(tell: Callable, query_tile: int, key_tile: int) -> Kernel:
    """A kernel on the contract of the package that calls `tell` (see CountedTiles)."""
    tiles = CountedTiles(query_tile, key_tile, tell)
    return Kernel("counted", tiles.forward, tiles.backward)

"""Tile sizes for a length, and the padding that makes it whole tiles."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..coords import TokenCoords


def tile_size(length: int, limit: int, unit: int = 1) -> int:
    """The tile for `length` tokens: a multiple of `unit`, at most `limit`, with as little padding
    as possible."""
    most = max(limit // unit, 1)
    blocks = -(-length // unit)
    # A divisor needs no padding, but one below half of the limit costs more time than padding does.
    divisor = next(
        (size for size in range(min(most, blocks), most // 2, -1) if blocks % size == 0), 0
    )
    return unit * (divisor or -(-blocks // -(-blocks // most)))


def pad(x: jax.Array, tile: int, axis: int, value=0) -> jax.Array:
    """x with `axis` padded at its end to a multiple of the tile; x itself if it is one already."""
    missing = -x.shape[axis] % tile
    if not missing:
        return x
    widths = [(0, missing if i == axis % x.ndim else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value)


def padded(coords: TokenCoords, tile: int) -> TokenCoords:
    """Coordinates padded to whole tiles with tokens of segment 0, which see nothing and are seen by
    nothing."""
    return jax.tree.map(lambda x: pad(x, tile, 1), coords)

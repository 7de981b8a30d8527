"""Tile sizes for a length, and padding to whole tiles."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..coords import TokenCoords


def tile_size(length: int, limit: int, unit: int = 1) -> int:
    """Returns the tile size for `length` tokens: a multiple of `unit`, at most `limit`, with as
    little padding as possible."""
    max_units = max(limit // unit, 1)
    units = -(-length // unit)
    # A divisor needs no padding, but one below half of the limit costs more time than padding does.
    divisor = next(
        (size for size in range(min(max_units, units), max_units // 2, -1) if units % size == 0), 0
    )
    return unit * (divisor or -(-units // -(-units // max_units)))


def pad(x: jax.Array, tile: int, axis: int, value=0) -> jax.Array:
    """Pads the end of `axis` to a multiple of the tile; returns x itself if it is one already."""
    missing = -x.shape[axis] % tile
    if not missing:
        return x
    widths = [(0, missing if i == axis % x.ndim else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value)


def padded(coords: TokenCoords, tile: int) -> TokenCoords:
    """Pads coordinates to whole tiles with tokens of segment 0, which neither see nor are
    seen."""
    return jax.tree.map(lambda x: pad(x, tile, 1), coords)

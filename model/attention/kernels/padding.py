"""How a length becomes whole tiles: of which size, and filled up with what nobody sees."""
from __future__ import annotations

import jax
import jax.numpy as jnp

from ..coords import TokenCoords


def tile_size(length: int, at_most: int, unit: int = 1) -> int:
    """The tile for `length` tokens: a multiple of `unit`, at most `at_most`, with as little padding as possible."""
    most = max(at_most // unit, 1)
    blocks = -(-length // unit)
    # A divisor costs no padding; one below half of what was asked for costs more time than padding does.
    whole = next((size for size in range(min(most, blocks), most // 2, -1) if blocks % size == 0), 0)
    return unit * (whole or -(-blocks // -(-blocks // most)))


def pad(x: jax.Array, tile: int, axis: int, value=0) -> jax.Array:
    """x, of any shape and dtype, with `axis` filled up to a multiple of the tile; x itself where it is one already."""
    missing = -x.shape[axis] % tile
    if not missing:
        return x
    widths = [(0, missing if i == axis % x.ndim else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value)


def padded(coords: TokenCoords, tile: int) -> TokenCoords:
    """Coordinates [B, T], int32, filled up to whole tiles with padding: segment 0 sees nothing and is seen by nothing."""
    return jax.tree.map(lambda x: pad(x, tile, 1), coords)

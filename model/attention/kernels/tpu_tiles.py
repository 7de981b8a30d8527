"""What the TPU kernels share: how large tiles are, which of them are met, and the mask of one tile."""
from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..coords import SKIP, Mask, TileBounds, TokenCoords, tile_bounds, tile_kind

LANES = 128
# Finite, so that a row that has seen nothing does not make NaN of -inf - -inf; hidden scores themselves are -inf.
LOWEST = -1e30
# Of the 16 MiB that the compiler gives a kernel on every generation; the rest is for coordinates.
VMEM = 15 * 2**20


def fitting(query_tile: int, key_tile: int, head_dim: int, itemsize: int) -> tuple[int, int]:
    """These tiles, or smaller ones that fit into VMEM.

    Counted as the hungriest of the three kernels needs it: q, dout, k and v and two float32 results or carries, each twice (one
    is moved while the other is used), the query tile's statistics, and two tiles of scores.
    """
    head_dim = -(-head_dim // LANES) * LANES

    def footprint():
        operands = 4 * itemsize * head_dim * (query_tile + key_tile)
        return operands + 16 * head_dim * max(query_tile, key_tile) + 16 * LANES * query_tile + 8 * query_tile * key_tile

    while footprint() > VMEM and max(query_tile, key_tile) > LANES:
        if key_tile > query_tile:
            key_tile //= 2
        else:
            query_tile //= 2
    return query_tile, key_tile


class Meetings(NamedTuple):
    """Which tiles a tile meets, int32, prefetched into scalar memory. "Own" tiles are the ones a program writes (queries in
    the forward and dq kernels, keys in dkv), the "other" ones those that it runs through.

    Two flat tables, because scalar memory is small (16 KiB on v3) and pads rows to pairs.

    Attributes:
      own: [7 B, n], rows by field and batch: the bounds of `TileBounds`, then the first of the other tiles that an own tile
        needs and the length of the range up to the last one, 0 where it needs none.
      other: [5 B, m], the bounds alone.
    """

    own: jax.Array
    other: jax.Array

    @classmethod
    def of(cls, own: TokenCoords, other: TokenCoords, own_tile: int, other_tile: int, mask: Mask, own_are_keys: bool):
        """The meetings, and the longest range of any own tile (at least 1): how far the grid has to go."""
        own, other = tile_bounds(own, own_tile), tile_bounds(other, other_tile)
        pair = [jax.tree.map(lambda x: x[:, :, None], own), jax.tree.map(lambda x: x[:, None, :], other)]
        needed = tile_kind(*(pair[::-1] if own_are_keys else pair), mask) != SKIP
        first = jnp.argmax(needed, -1).astype(jnp.int32)
        last = needed.shape[-1] - 1 - jnp.argmax(needed[..., ::-1], -1).astype(jnp.int32)
        count = jnp.where(needed.any(-1), last - first + 1, 0)
        own, other = [*jax.tree.leaves(own), first, count], jax.tree.leaves(other)
        return cls(jnp.concatenate(own), jnp.concatenate(other)), jnp.maximum(count.max(), 1)

    def _range(self, row, own):
        fields, batch = self.other.shape[0], (self.own.shape[0] - self.other.shape[0]) // 2
        return self.own[fields + row, own], self.own[fields + batch + row, own]

    def tile(self, row, own, step):
        """The other tile of a step: steps past the range stay on its last tile, so that nothing more is fetched."""
        first, count = self._range(row, own)
        return first + jnp.minimum(step, jnp.maximum(count - 1, 0))

    def kind(self, row, own, step, mask: Mask, own_are_keys: bool):
        """SKIP, FULL or MASKED, and SKIP past the range: int32 scalar."""
        batch = (self.own.shape[0] - self.other.shape[0]) // 2
        here, there = (TileBounds(*(bounds[first + row, tile] for first in range(0, self.other.shape[0], batch)))
                       for bounds, tile in ((self.own, own), (self.other, self.tile(row, own, step))))
        kind = tile_kind(*((there, here) if own_are_keys else (here, there)), mask)
        return jnp.where(step < self._range(row, own)[1], kind, SKIP)


def coordinate_rows(coords: TokenCoords) -> jax.Array:
    """Coordinates as a kernel reads them, tokens along the lanes: int32 [B, 2, T]."""
    return jnp.stack([coords.index, coords.segment_ids], 1)


def key_operands(kv, tile: int, at) -> tuple[list[jax.Array], list[pl.BlockSpec]]:
    """K and V as a kernel's operands, tiles [tile, D] at the index map `at` of [B, Hkv, T, D].

    kv: a pair, or both stacked [2, B, Hkv, T, D] as they travel: passed twice, never sliced (a copy).
    """
    if isinstance(kv, tuple):
        return list(kv), [pl.BlockSpec((None, None, tile, kv[0].shape[-1]), at)] * 2

    def of(place):
        return pl.BlockSpec((None, None, None, tile, kv.shape[-1]), lambda *step: (place, *at(*step)))

    return [kv, kv], [of(0), of(1)]


class ByQueryTile(NamedTuple):
    """The grid and the blocks of a kernel that writes query tiles and runs through the key tiles that each of them meets.

    Attributes:
      meetings, steps: see `Meetings.of`; grid: (B, Hq, query tiles, steps).
      queries, statistics, query_rows, key_rows: blocks of [B, Hq, Tq, D], [B, Hq, 1, Tq] and of coordinates [B, 2, T].
      keys, key_specs: see `key_operands`; a query head finds its key head by their index map.
      scratch: two float32 and two int32 columns for the rows of a query tile.
    """

    meetings: Meetings
    grid: tuple
    queries: pl.BlockSpec
    statistics: pl.BlockSpec
    query_rows: pl.BlockSpec
    key_rows: pl.BlockSpec
    keys: list
    key_specs: list
    scratch: list

    @classmethod
    def of(cls, q, kv, q_coords: TokenCoords, kv_coords: TokenCoords, query_tile: int, key_tile: int, mask: Mask):
        """q [B, Hq, Tq, D]; kv two of [B, Hkv, Tk, D] or their stack; lengths are multiples of the tiles."""
        batch, heads, length, head_dim = q.shape
        group = heads // kv[0].shape[1]
        meetings, steps = Meetings.of(q_coords, kv_coords, query_tile, key_tile, mask, False)

        def key_at(b, h, i, step, *refs):
            return b, lax.div(h, jnp.int32(group)), Meetings(*refs).tile(b, i, step), 0

        def key_row_at(b, h, i, step, *refs):
            return b, 0, Meetings(*refs).tile(b, i, step)

        def columns(dtype):
            return [pltpu.VMEM((query_tile, LANES), dtype)] * 2

        return cls(
            meetings, (batch, heads, length // query_tile, steps),
            pl.BlockSpec((None, None, query_tile, head_dim), lambda b, h, i, step, *_: (b, h, i, 0)),
            pl.BlockSpec((None, None, 1, query_tile), lambda b, h, i, step, *_: (b, h, 0, i)),
            pl.BlockSpec((None, 2, query_tile), lambda b, h, i, step, *_: (b, 0, i)),
            pl.BlockSpec((None, 2, key_tile), key_row_at),
            *key_operands(kv, key_tile, key_at), columns(jnp.float32) + columns(jnp.int32))


def column(row: jax.Array) -> jax.Array:
    """[1, n] along the lanes -> [n, 128]: the same values along the sublanes, repeated over all lanes."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def spread(statistics: jax.Array, width: int) -> jax.Array:
    """[n, 128], each row one value -> [n, width] or what broadcasts to it."""
    repeats, rest = divmod(width, LANES)
    return statistics[:, :1] if rest else jnp.tile(statistics, (1, repeats))


def seen(q: tuple, kv: tuple, mask: Mask) -> jax.Array:
    """`coords.visible` for one tile, from (index, segment) of queries and keys that broadcast against each other."""
    (q_index, q_segment), (kv_index, kv_segment) = q, kv
    visible = (q_segment == kv_segment) & (q_segment > 0)
    if mask.causal:
        visible &= q_index >= kv_index
    if mask.window is not None:
        visible &= jnp.abs(q_index - kv_index) < mask.window
    return visible


def product(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int, wide: bool) -> jax.Array:
    """Matrix product over these axes of two matrices, accumulated in float32; wide: from float32 operands."""
    a, b = (x.astype(jnp.float32) for x in (a, b)) if wide else (a, b)
    return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())), preferred_element_type=jnp.float32)


def cost(products: int, q_shape, kv_length: int, mask: Mask, bytes_accessed: int):
    """What the compiler's scheduler is told, so that it hides transfers behind the kernel: causal work counts half."""
    batch, heads, length, head_dim = q_shape
    pairs = batch * heads * length * kv_length // (2 if mask.causal else 1)
    return pl.CostEstimate(flops=2 * products * pairs * head_dim, transcendentals=pairs, bytes_accessed=bytes_accessed)


def nbytes(*arrays) -> int:
    """Bytes of these arrays (or shapes)."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)

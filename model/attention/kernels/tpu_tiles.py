"""Common parts of the TPU kernels: which ranges of tiles are computed, how they are fetched, and
the mask of a tile.

A kernel's grid has one program per batch row, head, tile that it writes, and step through the tiles
that it reads. Which tile a step reads is in tables prefetched into scalar memory (scalar prefetch),
where they are available to the index maps, which tell the hardware what to fetch before a program
runs. So a tile outside a range is neither fetched nor computed.

Parts of a masked tile that are entirely hidden are skipped: on the causal diagonal one of four.
Documents are compared only where a part has tokens of several.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from ..coords import (
    FULL,
    MASKED,
    SKIP,
    Mask,
    TileBounds,
    TokenCoords,
    one_document,
    tile_bounds,
    tile_kind,
)
from .tpu_options import LANES, Scores, TileOptions

# A kind of part in addition to those of `tile_kind`: all its tokens are of one document.
ONE_DOCUMENT = 3
# The largest score of a row that has seen no key, instead of -inf: -inf - -inf is NaN. Masked
# scores themselves are -inf.
LOWEST = -1e30


class TileRanges(NamedTuple):
    """The scalar prefetch tables, int32: for each tile that a kernel writes ("own": queries in the
    forward and dq kernels, keys in dkv) the range of tiles that it reads ("other"), and the bounds
    of all tiles.

    There are two flat tables, because scalar memory is small (16 KiB on v3) and pads rows to pairs.
    Their columns are the tiles and, after them, the parts of all tiles if a tile has more than one.

    Attributes:
      own: [7 B, n], rows by field and batch row: the five bounds of `TileBounds`, then the first
        other tile of the range and the length of the range, 0 if no other tile is needed.
      other: [5 B, m], only the bounds.
    """

    own: Int[Array, "7*B n"]
    other: Int[Array, "5*B m"]

    @classmethod
    def create(
        cls,
        own: TokenCoords,
        other: TokenCoords,
        own_tile: int,
        other_tile: int,
        compute: Scores,
        own_are_keys: bool,
    ) -> tuple[TileRanges, jax.Array]:
        """Returns the ranges, and the length of the longest (at least 1), which is the number of
        steps of the grid."""
        own_bounds, other_bounds = tile_bounds(own, own_tile), tile_bounds(other, other_tile)
        pair = [
            jax.tree.map(lambda x: x[:, :, None], own_bounds),
            jax.tree.map(lambda x: x[:, None, :], other_bounds),
        ]
        queries, keys = pair[::-1] if own_are_keys else pair
        needed = tile_kind(queries, keys, compute.mask) != SKIP
        first = jnp.argmax(needed, -1).astype(jnp.int32)
        last = needed.shape[-1] - 1 - jnp.argmax(needed[..., ::-1], -1).astype(jnp.int32)
        count = jnp.where(needed.any(-1), last - first + 1, 0)
        tables = _bounds_table(own, own_tile, compute), _bounds_table(other, other_tile, compute)
        range_rows = jnp.concatenate([first, count])
        range_rows = jnp.pad(range_rows, ((0, 0), (0, tables[0].shape[1] - range_rows.shape[1])))
        return cls(jnp.concatenate([tables[0], range_rows]), tables[1]), jnp.maximum(count.max(), 1)

    def _range(self, row, own):
        fields, batch = self.other.shape[0], (self.own.shape[0] - self.other.shape[0]) // 2
        return self.own[fields + row, own], self.own[fields + batch + row, own]

    def tile(self, row, own, step):
        """Returns the other tile of a step. Steps past the range stay on its last tile, so that
        nothing more is fetched."""
        first, count = self._range(row, own)
        return first + jnp.minimum(step, jnp.maximum(count - 1, 0))

    def kind(self, row, own, step, mask: Mask, own_are_keys: bool):
        """Returns the kind of the step's pair of tiles, an int32 scalar; SKIP past the range."""
        kind = tile_kind(*self._bounds(row, own, self.tile(row, own, step), own_are_keys), mask)
        return jnp.where(step < self._range(row, own)[1], kind, SKIP)

    def for_each_part(
        self,
        row,
        own,
        step,
        tiles: tuple[int, int],
        compute: Scores,
        own_are_keys: bool,
        columns: Columns,
        body: Callable[[pl.Slice, pl.Slice, int], None],
    ) -> None:
        """Computes the parts of the step's pair of tiles that are not entirely hidden.

        Args:
          tiles: tokens per own tile and per other tile.
          columns: those of the own tile; created when a part needs them.
          body: called with a part's tokens in the own and the other tile, and ONE_DOCUMENT or
            MASKED.
        """
        sizes = [compute.part(tile) for tile in tiles]
        own_parts, other_parts = (tile // size for tile, size in zip(tiles, sizes, strict=True))

        def visit(number, _):
            parts = lax.div(number, jnp.int32(other_parts)), lax.rem(number, jnp.int32(other_parts))
            bounds = self._bounds(
                row,
                _part_column(self.own, own, own_parts, parts[0]),
                _part_column(self.other, self.tile(row, own, step), other_parts, parts[1]),
                own_are_keys,
            )
            needed, single = tile_kind(*bounds, compute.mask) != SKIP, one_document(*bounds)
            tokens = [
                pl.ds(pl.multiple_of(part * size, size), size)
                for part, size in zip(parts, sizes, strict=True)
            ]
            for kind, condition in ((ONE_DOCUMENT, needed & single), (MASKED, needed & ~single)):
                pl.when(condition)(functools.partial(columns.make, kind))
                pl.when(condition)(functools.partial(body, *tokens, kind))

        lax.fori_loop(0, own_parts * other_parts, visit, None)

    def _bounds(
        self, row, own_column, other_column, own_are_keys: bool
    ) -> tuple[TileBounds, TileBounds]:
        """Returns the bounds of queries and of keys in these columns of the tables."""
        batch = (self.own.shape[0] - self.other.shape[0]) // 2
        own_bounds, other_bounds = (
            TileBounds(
                *(table[first + row, column] for first in range(0, self.other.shape[0], batch))
            )
            for table, column in ((self.own, own_column), (self.other, other_column))
        )
        return (other_bounds, own_bounds) if own_are_keys else (own_bounds, other_bounds)


class Columns(NamedTuple):
    """Index and segment of an own tile's tokens along the sublanes, as in `column` and
    `document_column`.

    Transposing them takes as long as a quarter of a masked tile, so they are created only when the
    first part needs them.

    Attributes:
      rows: [2, tile], from `coordinate_rows`.
      index, segment: scratch memory [tile, 128].
      made: for each of the two whether it has been created, in scalar memory.
    """

    rows: Any
    index: Any
    segment: Any
    made: Any

    @staticmethod
    def scratch(tile: int) -> list:
        """Returns the shapes of index, segment and made."""
        return [pltpu.VMEM((tile, LANES), jnp.int32)] * 2 + [pltpu.SMEM((2,), jnp.int32)]

    def reset(self) -> None:
        """Resets the state, before the first step of an own tile."""
        self.made[0] = self.made[1] = 0

    def make(self, kind: int) -> None:
        """Creates the columns that a part of this kind compares."""

        @pl.when(self.made[0] == 0)
        def _index():
            self.index[...] = column(self.rows[0:1])
            self.made[0] = 1

        @pl.when((self.made[1] == 0) & (kind == MASKED))
        def _segment():
            self.segment[...] = document_column(self.rows[1:2])
            self.made[1] = 1

    def spread(self, tokens, width: int) -> tuple[jax.Array, jax.Array]:
        """Returns (index, segment) of some tokens, each [n, width]."""
        return spread(self.index[tokens], width), spread(self.segment[tokens], width)


def _bounds_table(coords: TokenCoords, tile: int, compute: Scores) -> Int[Array, "5*B n"]:
    """Returns the bounds of all tiles and, after them, of their parts if these are smaller."""
    sizes = dict.fromkeys((tile, compute.part(tile)))
    return jnp.concatenate(
        [jnp.concatenate(jax.tree.leaves(tile_bounds(coords, size))) for size in sizes], 1
    )


def _part_column(table, tile, parts: int, part):
    """Returns the column of a tile's part in a table of `_bounds_table`."""
    return tile if parts == 1 else table.shape[1] // (1 + parts) + tile * parts + part


def coordinate_rows(coords: TokenCoords) -> Int[Array, "B 2 T"]:
    """Returns index and segment of each token as a kernel reads them, tokens along the lanes."""
    return jnp.stack([coords.index, coords.segment_ids], 1)


def key_operands(kv, tile: int, index_map) -> tuple[list[jax.Array], list[pl.BlockSpec]]:
    """Returns K and V as operands of a kernel, in tiles [tile, D].

    Args:
      kv: a pair of [B, Hkv, T, D], or both stacked [2, B, Hkv, T, D] as schedules send them. The
        stack is passed twice and each operand reads its half, because slicing it would copy.
      index_map: grid indices -> the tile of [B, Hkv, T, D].
    """
    if isinstance(kv, tuple):
        return list(kv), [pl.BlockSpec((None, None, tile, kv[0].shape[-1]), index_map)] * 2

    def half(number):
        return pl.BlockSpec(
            (None, None, None, tile, kv.shape[-1]), lambda *step: (number, *index_map(*step))
        )

    return [kv, kv], [half(0), half(1)]


class QueryTileGrid(NamedTuple):
    """The grid and the blocks of a kernel that writes tiles of queries and steps through the tiles
    of keys that they see.

    Attributes:
      ranges: the scalar prefetch.
      grid: (B, Hq, query tiles, steps).
      queries, statistics: blocks of [B, Hq, Tq, D] and of [B, Hq, 1, Tq].
      query_rows, key_rows: blocks of the coordinates [B, 2, T].
      keys, key_specs: from `key_operands`; the index map takes each query head to its key head.
      scratch: two float32 columns for the rows of a query tile, and the scratch of `Columns`.
    """

    ranges: TileRanges
    grid: tuple
    queries: pl.BlockSpec
    statistics: pl.BlockSpec
    query_rows: pl.BlockSpec
    key_rows: pl.BlockSpec
    keys: list
    key_specs: list
    scratch: list

    @classmethod
    def create(
        cls, q, kv, q_coords: TokenCoords, kv_coords: TokenCoords, options: TileOptions
    ) -> QueryTileGrid:
        """Creates the grid for q [B, Hq, Tq, D] and kv: two of [B, Hkv, Tk, D], or their stack. The
        tiles divide the lengths."""
        batch, heads, length, head_dim = q.shape
        group, query_tile, key_tile = heads // kv[0].shape[1], options.query_tile, options.key_tile
        ranges, steps = TileRanges.create(
            q_coords, kv_coords, query_tile, key_tile, options.scores, False
        )

        def key_index(b, h, i, step, *refs):
            return b, lax.div(h, jnp.int32(group)), TileRanges(*refs).tile(b, i, step), 0

        def key_row_index(b, h, i, step, *refs):
            return b, 0, TileRanges(*refs).tile(b, i, step)

        return cls(
            ranges,
            (batch, heads, length // query_tile, steps),
            pl.BlockSpec(
                (None, None, query_tile, head_dim), lambda b, h, i, step, *_: (b, h, i, 0)
            ),
            pl.BlockSpec((None, None, 1, query_tile), lambda b, h, i, step, *_: (b, h, 0, i)),
            pl.BlockSpec((None, 2, query_tile), lambda b, h, i, step, *_: (b, 0, i)),
            pl.BlockSpec((None, 2, key_tile), key_row_index),
            *key_operands(kv, key_tile, key_index),
            [pltpu.VMEM((query_tile, LANES), jnp.float32)] * 2 + Columns.scratch(query_tile),
        )


class KeyTileGrid(NamedTuple):
    """The grid and the blocks of a kernel that writes tiles of keys and, for each query head of the
    group, steps through the tiles of queries that see them.

    Attributes:
      ranges: the scalar prefetch.
      grid: (B, Hkv, key tiles, query heads of the group, steps).
      queries, statistics: blocks of [B, Hq, Tq, D] and of [B, Hq, 1, Tq].
      query_rows, key_rows: blocks of the coordinates [B, 2, T].
      keys, key_specs: from `key_operands`.
      scratch: the scratch of `Columns`.
    """

    ranges: TileRanges
    grid: tuple
    queries: pl.BlockSpec
    statistics: pl.BlockSpec
    query_rows: pl.BlockSpec
    key_rows: pl.BlockSpec
    keys: list
    key_specs: list
    scratch: list

    @classmethod
    def create(
        cls, q, kv, q_coords: TokenCoords, kv_coords: TokenCoords, options: TileOptions
    ) -> KeyTileGrid:
        """Creates the grid for q [B, Hq, Tq, D] and kv: two of [B, Hkv, Tk, D], or their stack. The
        tiles divide the lengths."""
        batch, kv_heads, kv_length, head_dim = kv[0].shape
        group, query_tile, key_tile = q.shape[1] // kv_heads, options.query_tile, options.key_tile
        ranges, steps = TileRanges.create(
            kv_coords, q_coords, key_tile, query_tile, options.scores, True
        )

        def query_index(b, h, j, member, step, *refs):
            return b, h * group + member, TileRanges(*refs).tile(b, j, step), 0

        def statistic_index(b, h, j, member, step, *refs):
            return b, h * group + member, 0, TileRanges(*refs).tile(b, j, step)

        def query_row_index(b, h, j, member, step, *refs):
            return b, 0, TileRanges(*refs).tile(b, j, step)

        return cls(
            ranges,
            (batch, kv_heads, kv_length // key_tile, group, steps),
            pl.BlockSpec((None, None, query_tile, head_dim), query_index),
            pl.BlockSpec((None, None, 1, query_tile), statistic_index),
            pl.BlockSpec((None, 2, query_tile), query_row_index),
            pl.BlockSpec((None, 2, key_tile), lambda b, h, j, *_: (b, 0, j)),
            *key_operands(kv, key_tile, lambda b, h, j, *_: (b, h, j, 0)),
            Columns.scratch(key_tile),
        )


def column(row: jax.Array) -> jax.Array:
    """Transposes a row [1, n] to [n, 128]: values along the sublanes, repeated over all lanes."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def document_column(row: jax.Array) -> jax.Array:
    """Returns the `column` of segments, with -1 for padding, so that it differs from padding in the
    other block, which is 0."""
    return column(jnp.where(row == 0, -1, row))


def spread(statistics: jax.Array, width: int) -> jax.Array:
    """Returns a `column` [n, 128] as [n, width], or as [n, 1], which broadcasts to it."""
    repeats, rest = divmod(width, LANES)
    return statistics[:, :1] if rest else jnp.tile(statistics, (1, repeats))


def hide(scores: jax.Array, q: tuple, kv: tuple, mask: Mask, kind: int) -> jax.Array:
    """Masks the scores of a part of a tile: -inf for keys that are not `coords.visible`.

    Each comparison has its own select: the conjunction of two would need more mask registers than a
    TPU has.

    Args:
      q, kv: (index, segment) of queries and of keys, which broadcast against each other; one side's
        segments come from `document_column`.
      kind: the part's kind. Documents are compared if it is MASKED, nothing if it is FULL.
    """
    if kind == FULL:
        return scores
    (q_index, q_segment), (kv_index, kv_segment) = q, kv
    if mask.causal:
        scores = jnp.where(q_index >= kv_index, scores, -jnp.inf)
    if mask.window is not None:
        distance = q_index - kv_index
        scores = jnp.where(
            (distance if mask.causal else jnp.abs(distance)) < mask.window, scores, -jnp.inf
        )
    return scores if kind == ONE_DOCUMENT else jnp.where(q_segment == kv_segment, scores, -jnp.inf)

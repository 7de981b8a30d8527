"""The TPU forward kernel: each tile of queries against the tiles of keys that it sees, with a
running softmax.

The grid is (batch row, query head, query tile, step); only the steps of one query tile depend on
each other. Between steps, scratch memory holds the largest score and the sum of the weights of each
row, and the output block holds the output.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..coords import FULL, MASKED, TokenCoords
from ..partial import AttentionPartial
from .kernel import LOG2E
from .tpu_options import Scores, TileOptions, compiler_params, cost, nbytes, sub_tiles
from .tpu_tiles import (
    LOWEST,
    Columns,
    QueryTileGrid,
    TileRanges,
    column,
    coordinate_rows,
    hide,
    spread,
)


def _kernel(*refs, compute: Scores, carried: bool):
    ranges = TileRanges(*refs[:2])
    q_ref, k_ref, v_ref, q_rows, kv_rows, *rest = refs[2:]
    carry, (out_ref, lse_ref, highest_ref, total_ref, *scratch) = (
        rest[: 2 * carried],
        rest[2 * carried :],
    )
    columns = Columns(q_rows, *scratch)
    row, tile, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(step == 0)
    def _start():
        columns.reset()
        if carried:
            lse = column(carry[1][...])
            empty = jnp.isneginf(lse)
            highest_ref[...] = jnp.where(empty, LOWEST, lse * LOG2E)
            total_ref[...] = jnp.where(empty, 0.0, 1.0)
            out_ref[...] = carry[0][...]
        else:
            highest_ref[...] = jnp.full_like(highest_ref, LOWEST)
            total_ref[...] = jnp.zeros_like(total_ref)
            out_ref[...] = jnp.zeros_like(out_ref)

    def attend(queries, keys, kind: int):
        scores = compute.exponents(q_ref[queries], k_ref[keys])
        tokens, kv_coords = scores.shape[1], (kv_rows[0:1, keys], kv_rows[1:2, keys])
        scores = hide(scores, columns.spread(queries, tokens), kv_coords, compute.mask, kind)
        highest = jnp.maximum(highest_ref[queries], scores.max(1, keepdims=True))
        weights = jnp.exp2(scores - spread(highest, tokens))
        shrink = jnp.exp2(highest_ref[queries] - highest)
        highest_ref[queries] = highest
        total_ref[queries] = total_ref[queries] * shrink + weights.sum(1, keepdims=True)
        weighted_values = compute.product(weights.astype(v_ref.dtype), v_ref[keys], 1, 0)
        out_ref[queries] = out_ref[queries] * spread(shrink, out_ref.shape[1]) + weighted_values

    kind = ranges.kind(row, tile, step, compute.mask, False)

    @pl.when(kind == FULL)
    def _whole():
        for keys in sub_tiles(k_ref.shape[0]):
            attend(slice(None), keys, FULL)

    @pl.when(kind == MASKED)
    def _parts():
        tiles = q_ref.shape[0], k_ref.shape[0]
        ranges.for_each_part(row, tile, step, tiles, compute, False, columns, attend)

    @pl.when(step == pl.num_programs(3) - 1)
    def _finish():
        total = total_ref[...]
        nonzero = jnp.where(total == 0, 1.0, total)
        out_ref[...] = out_ref[...] / spread(nonzero, out_ref.shape[1])
        lse = jnp.where(total == 0, -jnp.inf, highest_ref[...] / LOG2E + jnp.log(nonzero))
        lse_ref[...] = lse.T[0:1]


def forward(
    carry: AttentionPartial | None,
    q,
    kv,
    q_coords: TokenCoords,
    kv_coords: TokenCoords,
    options: TileOptions,
) -> AttentionPartial:
    """Returns attention of a block of queries over a block of keys, with heads before tokens.

    Args:
      carry: out [B, Hq, Tq, D] and lse [B, Hq, Tq] over earlier keys, from which the running
        softmax continues; the result reuses its memory.
      q: [B, Hq, Tq, D]; kv: two of [B, Hkv, Tk, D], or their stack. The tiles divide the lengths.
    """
    batch, heads, length, _ = q.shape
    tiles = QueryTileGrid.create(q, kv, q_coords, kv_coords, options)
    before = () if carry is None else (carry.out, carry.lse[:, :, None])
    results = (
        jax.ShapeDtypeStruct(q.shape, jnp.float32),
        jax.ShapeDtypeStruct((batch, heads, 1, length), jnp.float32),
    )
    inputs = (
        *tiles.ranges,
        q,
        *tiles.keys,
        coordinate_rows(q_coords),
        coordinate_rows(kv_coords),
        *before,
    )
    out, lse = pl.pallas_call(
        functools.partial(_kernel, carried=carry is not None, compute=options.scores),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tiles.ranges),
            grid=tiles.grid,
            in_specs=[
                tiles.queries,
                *tiles.key_specs,
                tiles.query_rows,
                tiles.key_rows,
                *(tiles.queries, tiles.statistics)[: len(before)],
            ],
            out_specs=[tiles.queries, tiles.statistics],
            scratch_shapes=tiles.scratch,
        ),
        out_shape=results,
        input_output_aliases={len(inputs) - 2: 0, len(inputs) - 1: 1} if before else {},
        compiler_params=compiler_params(options, "pppa"),
        cost_estimate=cost(
            2, q.shape, kv[0].shape[2], options.mask, nbytes(q, *kv, *before, *results)
        ),
        interpret=options.interpret,
        name="attention_forward",
    )(*inputs)
    return AttentionPartial(out, lse[:, :, 0])

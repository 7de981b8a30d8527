"""The TPU backward kernels, one for dq and one for dk and dv: each writes its own tiles alone, and a ring's transfers have two
kernels to hide behind. Both compute the weights again from the merged lse (FlashAttention-2, Algorithm 2)."""
from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..blocks import Saved
from ..coords import FULL, MASKED, Mask, TokenCoords
from .tpu_tiles import (
    LANES,
    QueryTileGrid,
    TileOptions,
    TileRanges,
    column,
    coordinate_rows,
    cost,
    key_operands,
    nbytes,
    product,
    seen,
    spread,
)


def _finite(lse):
    """lse with 0 for rows that see nothing: any finite value gives their hidden scores the weight 0, -inf gives NaN."""
    return jnp.where(jnp.isneginf(lse), 0.0, lse)


def _dq_kernel(*refs, mask: Mask, scale: float, carried: bool, float32_operands: bool):
    ranges = TileRanges(*refs[:2])
    q_ref, k_ref, v_ref, dout_ref, lse_row, delta_row, q_rows, kv_rows, *rest = refs[2:]
    carry, (dq_ref, lse_ref, delta_ref, q_index, q_segment) = rest[:carried], rest[carried:]
    row, tile, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(step == 0)
    def _start():
        q_index[...], q_segment[...] = column(q_rows[0:1]), column(q_rows[1:2])
        lse_ref[...], delta_ref[...] = column(_finite(lse_row[...])), column(delta_row[...])
        dq_ref[...] = jnp.zeros_like(dq_ref)

    def differentiate(masked: bool):
        scores = product(q_ref[...], k_ref[...], 1, 1, float32_operands) * scale
        tokens = scores.shape[1]
        if masked:
            q_tile_coords = spread(q_index[...], tokens), spread(q_segment[...], tokens)
            scores = jnp.where(seen(q_tile_coords, (kv_rows[0:1], kv_rows[1:2]), mask), scores, -jnp.inf)
        weights = jnp.exp(scores - spread(lse_ref[...], tokens))
        dweights = product(dout_ref[...], v_ref[...], 1, 1, float32_operands)
        dscores = weights * (dweights - spread(delta_ref[...], tokens))
        dq_ref[...] += product(dscores.astype(k_ref.dtype), k_ref[...], 1, 0, float32_operands)

    kind = ranges.kind(row, tile, step, mask, False)
    pl.when(kind == FULL)(lambda: differentiate(False))
    pl.when(kind == MASKED)(lambda: differentiate(True))

    @pl.when(step == pl.num_programs(3) - 1)
    def _finish():
        dq_ref[...] = dq_ref[...] * scale + (carry[0][...] if carried else 0.0)


def _dkv_kernel(*refs, mask: Mask, scale: float, float32_operands: bool):
    """Scores are transposed, with keys along the sublanes, so that lse and delta are used as the rows that they are."""
    ranges = TileRanges(*refs[:2])
    (q_ref, k_ref, v_ref, dout_ref, lse_row, delta_row, q_rows, kv_rows,
     dkv_ref, kv_index, kv_segment) = refs[2:]
    row, tile, member, step = pl.program_id(0), pl.program_id(2), pl.program_id(3), pl.program_id(4)

    @pl.when((member == 0) & (step == 0))
    def _start():
        kv_index[...], kv_segment[...] = column(kv_rows[0:1]), column(kv_rows[1:2])
        dkv_ref[...] = jnp.zeros_like(dkv_ref)

    def differentiate(masked: bool):
        scores = product(k_ref[...], q_ref[...], 1, 1, float32_operands) * scale
        if masked:
            tokens = scores.shape[1]
            kv_tile_coords = spread(kv_index[...], tokens), spread(kv_segment[...], tokens)
            scores = jnp.where(seen((q_rows[0:1], q_rows[1:2]), kv_tile_coords, mask), scores, -jnp.inf)
        weights = jnp.exp(scores - _finite(lse_row[...]))
        dkv_ref[1] += product(weights.astype(dout_ref.dtype), dout_ref[...], 1, 0, float32_operands)
        dweights = product(v_ref[...], dout_ref[...], 1, 1, float32_operands)
        dscores = weights * (dweights - delta_row[...])
        dkv_ref[0] += product(dscores.astype(q_ref.dtype), q_ref[...], 1, 0, float32_operands)

    kind = ranges.kind(row, tile, step, mask, True)
    pl.when(kind == FULL)(lambda: differentiate(False))
    pl.when(kind == MASKED)(lambda: differentiate(True))

    @pl.when((member == pl.num_programs(3) - 1) & (step == pl.num_programs(4) - 1))
    def _finish():
        dkv_ref[0] *= scale


def dq(carry, q, kv, saved: Saved, q_coords: TokenCoords, kv_coords: TokenCoords, options: TileOptions) -> jax.Array:
    """The gradient of q in float32, [B, Hq, Tq, D], added to `carry`, whose memory it takes.

    Args:
      q: [B, Hq, Tq, D]; kv: two of [B, Hkv, Tk, D], or their stack. The tiles divide the lengths.
      saved: dout [B, Hq, Tq, D], lse and delta [B, Hq, Tq].
    """
    dout, lse, delta = saved
    tiles = QueryTileGrid.create(q, kv, q_coords, kv_coords, options)
    before = () if carry is None else (carry,)
    inputs = (*tiles.ranges, q, *tiles.keys, dout, lse[:, :, None], delta[:, :, None], coordinate_rows(q_coords),
              coordinate_rows(kv_coords), *before)
    result = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    return pl.pallas_call(
        functools.partial(_dq_kernel, carried=carry is not None, **options.scores),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tiles.ranges),
            grid=tiles.grid,
            in_specs=[tiles.queries, *tiles.key_specs, tiles.queries, tiles.statistics, tiles.statistics,
                      tiles.query_rows, tiles.key_rows, *[tiles.queries] * len(before)],
            out_specs=tiles.queries,
            scratch_shapes=tiles.scratch,
        ),
        out_shape=result,
        input_output_aliases={len(inputs) - 1: 0} if before else {},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        cost_estimate=cost(3, q.shape, kv[0].shape[2], options.mask, nbytes(q, *kv, dout, lse, delta, *before, result)),
        interpret=options.interpret,
        name="attention_dq",
    )(*inputs)


def dkv(q, kv, saved: Saved, q_coords: TokenCoords, kv_coords: TokenCoords, options: TileOptions) -> jax.Array:
    """The gradients of k and v in float32, stacked, [2, B, Hkv, Tk, D], summed over the query heads that share a key head.

    The grid is (batch row, key head, key tile, query head of the group, step). Arguments as of `dq`.
    """
    (dout, lse, delta), query_tile, key_tile = saved, options.query_tile, options.key_tile
    batch, kv_heads, kv_length, head_dim = kv[0].shape
    group = q.shape[1] // kv_heads
    ranges, steps = TileRanges.create(kv_coords, q_coords, key_tile, query_tile, options.mask, True)

    def query_index(b, h, j, member, step, *refs):
        return b, h * group + member, TileRanges(*refs).tile(b, j, step), 0

    def statistic_index(b, h, j, member, step, *refs):
        return b, h * group + member, 0, TileRanges(*refs).tile(b, j, step)

    def query_row_index(b, h, j, member, step, *refs):
        return b, 0, TileRanges(*refs).tile(b, j, step)

    queries = pl.BlockSpec((None, None, query_tile, head_dim), query_index)
    statistics = pl.BlockSpec((None, None, 1, query_tile), statistic_index)
    keys, key_specs = key_operands(kv, key_tile, lambda b, h, j, *_: (b, h, j, 0))
    result = jax.ShapeDtypeStruct((2, *kv[0].shape), jnp.float32)
    return pl.pallas_call(
        functools.partial(_dkv_kernel, **options.scores),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(ranges),
            grid=(batch, kv_heads, kv_length // key_tile, group, steps),
            in_specs=[queries, *key_specs, queries, statistics, statistics,
                      pl.BlockSpec((None, 2, query_tile), query_row_index),
                      pl.BlockSpec((None, 2, key_tile), lambda b, h, j, *_: (b, 0, j))],
            out_specs=pl.BlockSpec((2, None, None, key_tile, head_dim), lambda b, h, j, *_: (0, b, h, j, 0)),
            scratch_shapes=[pltpu.VMEM((key_tile, LANES), jnp.int32), pltpu.VMEM((key_tile, LANES), jnp.int32)],
        ),
        out_shape=result,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary", "arbitrary")),
        cost_estimate=cost(4, q.shape, kv_length, options.mask, nbytes(q, *kv, dout, lse, delta, result)),
        interpret=options.interpret,
        name="attention_dkv",
    )(*ranges, q, *keys, dout, lse[:, :, None], delta[:, :, None], coordinate_rows(q_coords), coordinate_rows(kv_coords))

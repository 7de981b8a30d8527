"""The TPU backward kernels, one for dq and one for dk and dv: apart, each owns what it writes, and the ring's transfers have
two kernels to hide behind. Both compute the scores again from the merged lse (FlashAttention-2, algorithm 2)."""
from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..coords import FULL, MASKED, Mask, TokenCoords
from .tpu_tiles import (
    LANES,
    ByQueryTile,
    Meetings,
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
    """A row that sees nothing has no weight under any lse; a finite one keeps NaN out of its hidden scores."""
    return jnp.where(jnp.isneginf(lse), 0.0, lse)


def _dq_kernel(*refs, mask: Mask, scale: float, carried: bool, wide: bool):
    meetings, refs = Meetings(*refs[:2]), refs[2:]
    q_ref, k_ref, v_ref, dout_ref, lse_row, delta_row, q_rows, kv_rows, *refs = refs
    before, (dq_ref, lse_ref, delta_ref, q_index, q_segment) = refs[:carried], refs[carried:]
    row, tile, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(step == 0)
    def _start():
        q_index[...], q_segment[...] = column(q_rows[0:1]), column(q_rows[1:2])
        lse_ref[...], delta_ref[...] = column(_finite(lse_row[...])), column(delta_row[...])
        dq_ref[...] = jnp.zeros_like(dq_ref)

    def differentiate(masked: bool):
        scores = product(q_ref[...], k_ref[...], 1, 1, wide) * scale
        tokens = scores.shape[1]
        if masked:
            q_at = spread(q_index[...], tokens), spread(q_segment[...], tokens)
            scores = jnp.where(seen(q_at, (kv_rows[0:1], kv_rows[1:2]), mask), scores, -jnp.inf)
        weights = jnp.exp(scores - spread(lse_ref[...], tokens))
        dweights = product(dout_ref[...], v_ref[...], 1, 1, wide)
        dscores = weights * (dweights - spread(delta_ref[...], tokens))
        dq_ref[...] += product(dscores.astype(k_ref.dtype), k_ref[...], 1, 0, wide)

    kind = meetings.kind(row, tile, step, mask, False)
    pl.when(kind == FULL)(lambda: differentiate(False))
    pl.when(kind == MASKED)(lambda: differentiate(True))

    @pl.when(step == pl.num_programs(3) - 1)
    def _finish():
        dq_ref[...] = dq_ref[...] * scale + (before[0][...] if carried else 0.0)


def _dkv_kernel(*refs, mask: Mask, scale: float, wide: bool):
    """Scores stand on their side, keys along the sublanes: the queries' statistics are rows as they come."""
    meetings = Meetings(*refs[:2])
    (q_ref, k_ref, v_ref, dout_ref, lse_row, delta_row, q_rows, kv_rows,
     dkv_ref, kv_index, kv_segment) = refs[2:]
    row, tile, member, step = pl.program_id(0), pl.program_id(2), pl.program_id(3), pl.program_id(4)

    @pl.when((member == 0) & (step == 0))
    def _start():
        kv_index[...], kv_segment[...] = column(kv_rows[0:1]), column(kv_rows[1:2])
        dkv_ref[...] = jnp.zeros_like(dkv_ref)

    def differentiate(masked: bool):
        scores = product(k_ref[...], q_ref[...], 1, 1, wide) * scale
        if masked:
            tokens = scores.shape[1]
            kv_at = spread(kv_index[...], tokens), spread(kv_segment[...], tokens)
            scores = jnp.where(seen((q_rows[0:1], q_rows[1:2]), kv_at, mask), scores, -jnp.inf)
        weights = jnp.exp(scores - _finite(lse_row[...]))
        dkv_ref[1] += product(weights.astype(dout_ref.dtype), dout_ref[...], 1, 0, wide)
        dweights = product(v_ref[...], dout_ref[...], 1, 1, wide)
        dscores = weights * (dweights - delta_row[...])
        dkv_ref[0] += product(dscores.astype(q_ref.dtype), q_ref[...], 1, 0, wide)

    kind = meetings.kind(row, tile, step, mask, True)
    pl.when(kind == FULL)(lambda: differentiate(False))
    pl.when(kind == MASKED)(lambda: differentiate(True))

    @pl.when((member == pl.num_programs(3) - 1) & (step == pl.num_programs(4) - 1))
    def _finish():
        dkv_ref[0] *= scale


def dq(carry, q, kv, dout, lse, delta, q_coords: TokenCoords, kv_coords: TokenCoords, *, mask: Mask, scale: float,
       query_tile: int, key_tile: int, wide=False, interpret=False) -> jax.Array:
    """The queries' gradient, heads before length: float32 [B, Hq, Tq, D], added to `carry`, whose memory is written over.

    q, dout [B, Hq, Tq, D]; kv two of [B, Hkv, Tk, D] or their stack; lse, delta [B, Hq, Tq].
    """
    of = ByQueryTile.of(q, kv, q_coords, kv_coords, query_tile, key_tile, mask)
    before = () if carry is None else (carry,)
    inputs = (*of.meetings, q, *of.keys, dout, lse[:, :, None], delta[:, :, None], coordinate_rows(q_coords),
              coordinate_rows(kv_coords), *before)
    result = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    return pl.pallas_call(
        functools.partial(_dq_kernel, mask=mask, scale=scale, carried=carry is not None, wide=wide),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(of.meetings),
            grid=of.grid,
            in_specs=[of.queries, *of.key_specs, of.queries, of.statistics, of.statistics, of.query_rows, of.key_rows,
                      *[of.queries] * len(before)],
            out_specs=of.queries,
            scratch_shapes=of.scratch,
        ),
        out_shape=result,
        input_output_aliases={len(inputs) - 1: 0} if before else {},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        cost_estimate=cost(3, q.shape, kv[0].shape[2], mask, nbytes(q, *kv, dout, lse, delta, *before, result)),
        interpret=interpret,
        name="attention_dq",
    )(*inputs)


def dkv(q, kv, dout, lse, delta, q_coords: TokenCoords, kv_coords: TokenCoords, *, mask: Mask, scale: float,
        query_tile: int, key_tile: int, wide=False, interpret=False) -> jax.Array:
    """The keys' and values' gradients, stacked, heads before length: float32 [2, B, Hkv, Tk, D], summed over the query heads
    that share a key head. Arguments as of `dq`."""
    batch, kv_heads, kv_length, head_dim = kv[0].shape
    group = q.shape[1] // kv_heads
    meetings, steps = Meetings.of(kv_coords, q_coords, key_tile, query_tile, mask, True)

    def query_at(b, h, j, member, step, *refs):
        return b, h * group + member, Meetings(*refs).tile(b, j, step), 0

    def statistic_at(b, h, j, member, step, *refs):
        return b, h * group + member, 0, Meetings(*refs).tile(b, j, step)

    def query_row_at(b, h, j, member, step, *refs):
        return b, 0, Meetings(*refs).tile(b, j, step)

    queries = pl.BlockSpec((None, None, query_tile, head_dim), query_at)
    statistics = pl.BlockSpec((None, None, 1, query_tile), statistic_at)
    keys, key_specs = key_operands(kv, key_tile, lambda b, h, j, *_: (b, h, j, 0))
    result = jax.ShapeDtypeStruct((2, *kv[0].shape), jnp.float32)
    return pl.pallas_call(
        functools.partial(_dkv_kernel, mask=mask, scale=scale, wide=wide),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(meetings),
            grid=(batch, kv_heads, kv_length // key_tile, group, steps),
            in_specs=[queries, *key_specs, queries, statistics, statistics, pl.BlockSpec((None, 2, query_tile), query_row_at),
                      pl.BlockSpec((None, 2, key_tile), lambda b, h, j, *_: (b, 0, j))],
            out_specs=pl.BlockSpec((2, None, None, key_tile, head_dim), lambda b, h, j, *_: (0, b, h, j, 0)),
            scratch_shapes=[pltpu.VMEM((key_tile, LANES), jnp.int32), pltpu.VMEM((key_tile, LANES), jnp.int32)],
        ),
        out_shape=result,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary", "arbitrary")),
        cost_estimate=cost(4, q.shape, kv_length, mask, nbytes(q, *kv, dout, lse, delta, result)),
        interpret=interpret,
        name="attention_dkv",
    )(*meetings, q, *keys, dout, lse[:, :, None], delta[:, :, None], coordinate_rows(q_coords), coordinate_rows(kv_coords))

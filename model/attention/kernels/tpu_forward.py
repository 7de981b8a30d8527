"""The TPU forward kernel: one query tile at a time against the key tiles that it needs, with a running softmax."""
from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..coords import FULL, MASKED, Mask, TokenCoords
from ..partial import AttentionPartial
from .tpu_tiles import LOWEST, ByQueryTile, Meetings, column, coordinate_rows, cost, nbytes, product, seen, spread


def _kernel(*refs, mask: Mask, scale: float, carried: bool, wide: bool):
    meetings, refs = Meetings(*refs[:2]), refs[2:]
    q_ref, k_ref, v_ref, q_rows, kv_rows, *refs = refs
    before, (out_ref, lse_ref, top_ref, total_ref, q_index, q_segment) = refs[:2 * carried], refs[2 * carried:]
    row, tile, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(step == 0)
    def _start():
        q_index[...], q_segment[...] = column(q_rows[0:1]), column(q_rows[1:2])
        if carried:
            lse = column(before[1][...])
            empty = jnp.isneginf(lse)
            top_ref[...] = jnp.where(empty, LOWEST, lse)
            total_ref[...] = jnp.where(empty, 0.0, 1.0)
            out_ref[...] = before[0][...]
        else:
            top_ref[...] = jnp.full_like(top_ref, LOWEST)
            total_ref[...] = jnp.zeros_like(total_ref)
            out_ref[...] = jnp.zeros_like(out_ref)

    def attend(masked: bool):
        scores = product(q_ref[...], k_ref[...], 1, 1, wide) * scale
        tokens = scores.shape[1]
        if masked:
            q_at = spread(q_index[...], tokens), spread(q_segment[...], tokens)
            scores = jnp.where(seen(q_at, (kv_rows[0:1], kv_rows[1:2]), mask), scores, -jnp.inf)
        top = jnp.maximum(top_ref[...], scores.max(1, keepdims=True))
        weights = jnp.exp(scores - spread(top, tokens))
        shrink = jnp.exp(top_ref[...] - top)
        top_ref[...] = top
        total_ref[...] = total_ref[...] * shrink + weights.sum(1, keepdims=True)
        seen_here = product(weights.astype(v_ref.dtype), v_ref[...], 1, 0, wide)
        out_ref[...] = out_ref[...] * spread(shrink, out_ref.shape[1]) + seen_here

    kind = meetings.kind(row, tile, step, mask, False)
    pl.when(kind == FULL)(lambda: attend(False))
    pl.when(kind == MASKED)(lambda: attend(True))

    @pl.when(step == pl.num_programs(3) - 1)
    def _finish():
        total = total_ref[...]
        safe = jnp.where(total == 0, 1.0, total)
        out_ref[...] = out_ref[...] / spread(safe, out_ref.shape[1])
        lse = jnp.where(total == 0, -jnp.inf, top_ref[...] + jnp.log(safe))
        lse_ref[...] = lse.T[0:1]


def forward(carry: AttentionPartial | None, q, kv, q_coords: TokenCoords, kv_coords: TokenCoords, *, mask: Mask, scale: float,
            query_tile: int, key_tile: int, wide=False, interpret=False) -> AttentionPartial:
    """Attention of one block over one block, heads before length: q [B, Hq, Tq, D], kv two of [B, Hkv, Tk, D] or their stack.

    Lengths are multiples of the tiles. `carry` (out [B, Hq, Tq, D], lse [B, Hq, Tq]) is what the queries have seen before:
    it is where the softmax goes on from, and its memory is written over with the result.
    """
    batch, heads, length, _ = q.shape
    of = ByQueryTile.of(q, kv, q_coords, kv_coords, query_tile, key_tile, mask)
    before = () if carry is None else (carry.out, carry.lse[:, :, None])
    results = (jax.ShapeDtypeStruct(q.shape, jnp.float32), jax.ShapeDtypeStruct((batch, heads, 1, length), jnp.float32))
    inputs = (*of.meetings, q, *of.keys, coordinate_rows(q_coords), coordinate_rows(kv_coords), *before)
    out, lse = pl.pallas_call(
        functools.partial(_kernel, mask=mask, scale=scale, carried=carry is not None, wide=wide),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(of.meetings),
            grid=of.grid,
            in_specs=[of.queries, *of.key_specs, of.query_rows, of.key_rows, *(of.queries, of.statistics)[:len(before)]],
            out_specs=[of.queries, of.statistics],
            scratch_shapes=of.scratch,
        ),
        out_shape=results,
        input_output_aliases={len(inputs) - 2: 0, len(inputs) - 1: 1} if before else {},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        cost_estimate=cost(2, q.shape, kv[0].shape[2], mask, nbytes(q, *kv, *before, *results)),
        interpret=interpret,
        name="attention_forward",
    )(*inputs)
    return AttentionPartial(out, lse[:, :, 0])

"""The TPU backward kernels: one for dq, dk and dv together and, where that one does not serve, one for dq and one for dk and
dv. All compute the weights again from the merged lse (FlashAttention-2, Algorithm 2)."""
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..blocks import Saved
from ..coords import FULL, MASKED, TokenCoords
from .tpu_tiles import (
    LANES,
    LOG2_E,
    QueryTileGrid,
    Scores,
    TileOptions,
    TileRanges,
    column,
    coordinate_rows,
    cost,
    document_column,
    key_operands,
    nbytes,
    seen,
    spread,
    sub_tiles,
)


def _finite(lse):
    """lse with 0 for rows that see nothing: any finite value gives their hidden scores the weight 0, -inf gives NaN."""
    return jnp.where(jnp.isneginf(lse), 0.0, lse)


def _dq_kernel(*refs, compute: Scores, carried: bool):
    ranges = TileRanges(*refs[:2])
    q_ref, k_ref, v_ref, dout_ref, lse_row, delta_row, q_rows, kv_rows, *rest = refs[2:]
    carry, (dq_ref, lse_ref, delta_ref, q_index, q_segment) = rest[:carried], rest[carried:]
    row, tile, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(step == 0)
    def _start():
        q_index[...], q_segment[...] = column(q_rows[0:1]), document_column(q_rows[1:2])
        lse_ref[...], delta_ref[...] = column(_finite(lse_row[...]) * LOG2_E), column(delta_row[...])
        dq_ref[...] = jnp.zeros_like(dq_ref)

    def differentiate(masked: bool):
        for keys in sub_tiles(k_ref.shape[0]):
            scores = exponents = compute.exponents(q_ref[...], k_ref[keys])
            tokens = scores.shape[1]
            if masked:
                q_tile_coords = spread(q_index[...], tokens), spread(q_segment[...], tokens)
                visible = seen(q_tile_coords, (kv_rows[0:1, keys], kv_rows[1:2, keys]), compute.mask)
                scores = jnp.where(visible, scores, -jnp.inf)
            weights = jnp.exp2(scores - spread(lse_ref[...], tokens))
            dweights = compute.product(dout_ref[...], v_ref[keys], 1, 1)
            dscores = compute.before_cap(weights * (dweights - spread(delta_ref[...], tokens)), exponents)
            dq_ref[...] += compute.product(dscores.astype(k_ref.dtype), k_ref[keys], 1, 0)

    kind = ranges.kind(row, tile, step, compute.mask, False)
    pl.when(kind == FULL)(lambda: differentiate(False))
    pl.when(kind == MASKED)(lambda: differentiate(True))

    @pl.when(step == pl.num_programs(3) - 1)
    def _finish():
        dq_ref[...] = dq_ref[...] * compute.scale + (carry[0][...] if carried else 0.0)


class _DqTiles(NamedTuple):
    """The gradient of q while tiles of keys add to its tiles: it stays in the device's memory (HBM).

    A tile passes through one of two buffers, so that it is read while its share is computed, and written while the next tile's
    share is. It is not read before the write that went before has ended.

    Attributes:
      dq: [B, Hq, query tiles, query_tile, D].
      buffers: [2, query_tile, D].
      reads, writes: a semaphore for each buffer.
      state: whether each of the two buffers is being written; the buffer in use; the head and the tile that it was used for.
    """

    dq: Any
    buffers: Any
    reads: Any
    writes: Any
    state: Any

    def reset(self) -> None:
        """Before the first tile of a batch row and key head."""
        for i, value in enumerate((0, 0, 0, -1, -1)):
            self.state[i] = value

    def start_read(self, row, head, tile) -> None:
        """Starts to read a tile into the buffer that was not used last."""
        buffer = 1 - self.state[2]
        self._finish_write(buffer)
        pl.when((self.state[3] == head) & (self.state[4] == tile))(lambda: self._finish_write(1 - buffer))
        for i, value in enumerate((buffer, head, tile), 2):
            self.state[i] = value
        pltpu.make_async_copy(self.dq.at[row, head, tile], self.buffers.at[buffer], self.reads.at[buffer]).start()

    def add(self, row, share) -> None:
        """Adds to the tile that was read last, and starts to write it."""
        buffer, head, tile = (self.state[i] for i in (2, 3, 4))
        memory = self.dq.at[row, head, tile]
        pltpu.make_async_copy(memory, self.buffers.at[buffer], self.reads.at[buffer]).wait()
        self.buffers[buffer] += share
        pltpu.make_async_copy(self.buffers.at[buffer], memory, self.writes.at[buffer]).start()
        self.state[buffer] = 1

    def finish(self) -> None:
        """After the last tile: waits until all is written."""
        for buffer in range(2):
            self._finish_write(buffer)

    def _finish_write(self, buffer) -> None:
        @pl.when(self.state[buffer] == 1)
        def _wait():
            pltpu.make_async_copy(self.buffers.at[buffer], self.dq.at[0, 0, 0], self.writes.at[buffer]).wait()
            self.state[buffer] = 0


def _key_tile_kernel(*refs, compute: Scores, fused: bool):
    """Scores are transposed, with keys along the sublanes, so that lse and delta are used as the rows that they are."""
    ranges = TileRanges(*refs[:2])
    q_ref, k_ref, v_ref, dout_ref, lse_row, delta_row, q_rows, kv_rows, *rest = refs[2:]
    if fused:
        _, dkv_ref, dq_ref, kv_index, kv_segment, *scratch = rest
        dq_tiles = _DqTiles(dq_ref, *scratch)
    else:
        dkv_ref, kv_index, kv_segment = rest
    row, kv_head, tile, member, step = (pl.program_id(axis) for axis in range(5))
    last = (member == pl.num_programs(3) - 1) & (step == pl.num_programs(4) - 1)

    @pl.when((member == 0) & (step == 0))
    def _start():
        kv_index[...], kv_segment[...] = column(kv_rows[0:1]), document_column(kv_rows[1:2])
        dkv_ref[...] = jnp.zeros_like(dkv_ref)

    def differentiate(masked: bool):
        if fused:
            dq_tiles.start_read(row, kv_head * pl.num_programs(3) + member, ranges.tile(row, tile, step))
        dq_share: jax.Array | float = 0.0
        for keys in sub_tiles(k_ref.shape[0]):
            scores = exponents = compute.exponents(k_ref[keys], q_ref[...])
            if masked:
                tokens = scores.shape[1]
                kv_tile_coords = spread(kv_index[keys], tokens), spread(kv_segment[keys], tokens)
                scores = jnp.where(seen((q_rows[0:1], q_rows[1:2]), kv_tile_coords, compute.mask), scores, -jnp.inf)
            weights = jnp.exp2(scores - _finite(lse_row[...]) * LOG2_E)
            dkv_ref[1, keys] += compute.product(weights.astype(dout_ref.dtype), dout_ref[...], 1, 0)
            dweights = compute.product(v_ref[keys], dout_ref[...], 1, 1)
            dscores = compute.before_cap(weights * (dweights - delta_row[...]), exponents).astype(q_ref.dtype)
            dkv_ref[0, keys] += compute.product(dscores, q_ref[...], 1, 0)
            if fused:
                dq_share += compute.product(dscores, k_ref[keys], 0, 0)
        if fused:
            dq_tiles.add(row, dq_share * compute.scale)

    if fused:
        pl.when((tile == 0) & (member == 0) & (step == 0))(dq_tiles.reset)
    kind = ranges.kind(row, tile, step, compute.mask, True)
    pl.when(kind == FULL)(lambda: differentiate(False))
    pl.when(kind == MASKED)(lambda: differentiate(True))

    @pl.when(last)
    def _finish():
        dkv_ref[0] *= compute.scale

    if fused:
        pl.when(last & (tile == pl.num_programs(2) - 1))(dq_tiles.finish)


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
        functools.partial(_dq_kernel, carried=carry is not None, compute=options.scores),
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

    Arguments as of `dq`.
    """
    return _by_key_tiles(None, q, kv, saved, q_coords, kv_coords, options)[0]


def dq_dkv(carry, q, kv, saved: Saved, q_coords: TokenCoords, kv_coords: TokenCoords,
          options: TileOptions) -> tuple[jax.Array, jax.Array]:
    """The results of `dq` and `dkv` by one kernel: scores and weights are computed once for both.

    Tiles of keys are visited one after the other, because each adds to dq.
    """
    dkv, dq = _by_key_tiles(jnp.zeros(q.shape, jnp.float32) if carry is None else carry, q, kv, saved, q_coords, kv_coords,
                            options)
    return dq.reshape(q.shape), dkv


def _by_key_tiles(carry, q, kv, saved: Saved, q_coords: TokenCoords, kv_coords: TokenCoords, options: TileOptions) -> list:
    """[dkv], or with a carry [dkv, dq], whose tiles have a dimension of their own.

    The grid is (batch row, key head, key tile, query head of the group, step).
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
    results = [jax.ShapeDtypeStruct((2, *kv[0].shape), jnp.float32)]
    result_specs = [pl.BlockSpec((2, None, None, key_tile, head_dim), lambda b, h, j, *_: (0, b, h, j, 0))]
    scratch: list[Any] = [pltpu.VMEM((key_tile, LANES), jnp.int32), pltpu.VMEM((key_tile, LANES), jnp.int32)]
    before = []
    if carry is not None:
        before = [carry.reshape(*q.shape[:2], -1, query_tile, head_dim)]
        results.append(jax.ShapeDtypeStruct(before[0].shape, jnp.float32))
        result_specs.append(pl.BlockSpec(memory_space=pl.ANY))
        scratch += [pltpu.VMEM((2, query_tile, head_dim), jnp.float32), pltpu.SemaphoreType.DMA((2,)),
                    pltpu.SemaphoreType.DMA((2,)), pltpu.SMEM((5,), jnp.int32)]
    inputs = (*ranges, q, *keys, dout, lse[:, :, None], delta[:, :, None], coordinate_rows(q_coords),
              coordinate_rows(kv_coords), *before)
    return pl.pallas_call(
        functools.partial(_key_tile_kernel, fused=carry is not None, compute=options.scores),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(ranges),
            grid=(batch, kv_heads, kv_length // key_tile, group, steps),
            in_specs=[queries, *key_specs, queries, statistics, statistics,
                      pl.BlockSpec((None, 2, query_tile), query_row_index),
                      pl.BlockSpec((None, 2, key_tile), lambda b, h, j, *_: (b, 0, j)),
                      *[pl.BlockSpec(memory_space=pl.ANY)] * len(before)],
            out_specs=result_specs,
            scratch_shapes=scratch,
        ),
        out_shape=results,
        input_output_aliases={len(inputs) - 1: 1} if before else {},
        compiler_params=pltpu.CompilerParams(dimension_semantics=(
            "parallel", "parallel", "arbitrary" if before else "parallel", "arbitrary", "arbitrary")),
        cost_estimate=cost(5 if before else 4, q.shape, kv_length, options.mask,
                           nbytes(q, *kv, dout, lse, delta, *before, *results)),
        interpret=options.interpret,
        name="attention_backward" if before else "attention_dkv",
    )(*inputs)

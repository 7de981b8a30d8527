"""The TPU backward kernels: a fused one for dq, dk and dv and, where that is not supported, one for
dq and one for dk and dv. All recompute the weights from the merged lse (FlashAttention-2, Algorithm
2)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..blocks import BackwardInputs
from ..coords import FULL, MASKED, SKIP, TokenCoords
from .kernel import LOG2E
from .tpu_options import Scores, TileOptions, compiler_params, cost, nbytes, sub_tiles
from .tpu_tiles import (
    Columns,
    KeyTileGrid,
    QueryTileGrid,
    TileRanges,
    column,
    coordinate_rows,
    hide,
    spread,
)


def _finite(lse):
    """Replaces lse by 0 for rows that see nothing: with any finite value their masked scores get
    weight 0, with -inf NaN."""
    return jnp.where(jnp.isneginf(lse), 0.0, lse)


def _dq_kernel(*refs, compute: Scores, carried: bool):
    ranges = TileRanges(*refs[:2])
    q_ref, k_ref, v_ref, dout_ref, lse_row, delta_row, q_rows, kv_rows, *rest = refs[2:]
    carry, (dq_ref, lse_ref, delta_ref, *scratch) = rest[:carried], rest[carried:]
    columns = Columns(q_rows, *scratch)
    row, tile, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(step == 0)
    def _start():
        columns.reset()
        lse_ref[...], delta_ref[...] = column(_finite(lse_row[...]) * LOG2E), column(delta_row[...])
        dq_ref[...] = jnp.zeros_like(dq_ref)

    def differentiate(queries, keys, kind: int):
        scores = exponents = compute.exponents(q_ref[queries], k_ref[keys])
        tokens, kv_coords = scores.shape[1], (kv_rows[0:1, keys], kv_rows[1:2, keys])
        scores = hide(scores, columns.spread(queries, tokens), kv_coords, compute.mask, kind)
        weights = jnp.exp2(scores - spread(lse_ref[queries], tokens))
        dweights = compute.product(dout_ref[queries], v_ref[keys], 1, 1)
        dscores = compute.before_cap(
            weights * (dweights - spread(delta_ref[queries], tokens)), exponents
        )
        dq_ref[queries] += compute.product(dscores.astype(k_ref.dtype), k_ref[keys], 1, 0)

    kind = ranges.kind(row, tile, step, compute.mask, False)

    @pl.when(kind == FULL)
    def _whole():
        for keys in sub_tiles(k_ref.shape[0]):
            differentiate(slice(None), keys, FULL)

    @pl.when(kind == MASKED)
    def _parts():
        tiles = q_ref.shape[0], k_ref.shape[0]
        ranges.for_each_part(row, tile, step, tiles, compute, False, columns, differentiate)

    @pl.when(step == pl.num_programs(3) - 1)
    def _finish():
        dq_ref[...] = dq_ref[...] * compute.scale + (carry[0][...] if carried else 0.0)


class _DqTiles(NamedTuple):
    """The gradient of q, to whose tiles each tile of keys adds; it stays in device memory (HBM).

    A tile passes through one of two buffers, so that it is read while its share is computed and
    written while the next tile's share is computed. It is not read before its previous write has
    finished.

    Attributes:
      dq: [B, Hq, query tiles, query_tile, D].
      buffers: [2, query_tile, D].
      reads, writes: a semaphore per buffer.
      state: for each of the two buffers whether it is being written; the buffer in use; the head
        and the tile in it; whether it is being read.
    """

    dq: Any
    buffers: Any
    reads: Any
    writes: Any
    state: Any

    def reset(self) -> None:
        """Resets the state, before the first tile of a batch row and key head."""
        for i, value in enumerate((0, 0, 0, -1, -1, 0)):
            self.state[i] = value

    def start_read(self, row, head, tile) -> None:
        """Starts to read a tile into the buffer that is not in use."""
        buffer = 1 - self.state[2]
        self._finish_write(buffer)
        pl.when((self.state[3] == head) & (self.state[4] == tile))(
            lambda: self._finish_write(1 - buffer)
        )
        for i, value in enumerate((buffer, head, tile, 1), 2):
            self.state[i] = value
        pltpu.make_async_copy(
            self.dq.at[row, head, tile], self.buffers.at[buffer], self.reads.at[buffer]
        ).start()

    def add(self, queries, share) -> None:
        """Adds to some queries of the tile read last."""
        self._finish_read()
        self.buffers[self.state[2], queries] += share

    def start_write(self, row) -> None:
        """Starts to write the tile read last."""
        self._finish_read()
        buffer, head, tile = (self.state[i] for i in (2, 3, 4))
        pltpu.make_async_copy(
            self.buffers.at[buffer], self.dq.at[row, head, tile], self.writes.at[buffer]
        ).start()
        self.state[buffer] = 1

    def finish(self) -> None:
        """Waits, after the last tile, until everything is written."""
        for buffer in range(2):
            self._finish_write(buffer)

    def _finish_read(self) -> None:
        @pl.when(self.state[5] == 1)
        def _wait():
            buffer = self.state[2]
            pltpu.make_async_copy(
                self.dq.at[0, 0, 0], self.buffers.at[buffer], self.reads.at[buffer]
            ).wait()
            self.state[5] = 0

    def _finish_write(self, buffer) -> None:
        @pl.when(self.state[buffer] == 1)
        def _wait():
            pltpu.make_async_copy(
                self.buffers.at[buffer], self.dq.at[0, 0, 0], self.writes.at[buffer]
            ).wait()
            self.state[buffer] = 0


def _key_tile_kernel(*refs, compute: Scores, fused: bool):
    """Transposes the scores, with keys along the sublanes, so that lse and delta can stay rows."""
    ranges = TileRanges(*refs[:2])
    q_ref, k_ref, v_ref, dout_ref, lse_row, delta_row, q_rows, kv_rows, *rest = refs[2:]
    if fused:
        _, dkv_ref, dq_ref, *scratch = rest
        dq_tiles = _DqTiles(dq_ref, *scratch[3:])
    else:
        dkv_ref, *scratch = rest
    columns = Columns(kv_rows, *scratch[:3])
    row, kv_head, tile, member, step = (pl.program_id(axis) for axis in range(5))
    last = (member == pl.num_programs(3) - 1) & (step == pl.num_programs(4) - 1)

    @pl.when((member == 0) & (step == 0))
    def _start():
        columns.reset()
        dkv_ref[...] = jnp.zeros_like(dkv_ref)

    def differentiate(keys, queries, kind: int):
        """Adds to dk and dv of these keys; returns their share of dq of these queries."""
        scores = exponents = compute.exponents(k_ref[keys], q_ref[queries])
        q_coords = q_rows[0:1, queries], q_rows[1:2, queries]
        scores = hide(scores, q_coords, columns.spread(keys, scores.shape[1]), compute.mask, kind)
        weights = jnp.exp2(scores - _finite(lse_row[:, queries]) * LOG2E)
        dkv_ref[1, keys] += compute.product(weights.astype(dout_ref.dtype), dout_ref[queries], 1, 0)
        dweights = compute.product(v_ref[keys], dout_ref[queries], 1, 1)
        dscores = compute.before_cap(
            weights * (dweights - delta_row[:, queries]), exponents
        ).astype(q_ref.dtype)
        dkv_ref[0, keys] += compute.product(dscores, q_ref[queries], 1, 0)
        return compute.product(dscores, k_ref[keys], 0, 0) if fused else None

    def differentiate_part(keys, queries, kind: int):
        share = differentiate(keys, queries, kind)
        if fused:
            dq_tiles.add(queries, share * compute.scale)

    if fused:
        pl.when((tile == 0) & (member == 0) & (step == 0))(dq_tiles.reset)
    kind = ranges.kind(row, tile, step, compute.mask, True)
    needed = pl.when(kind != SKIP)
    if fused:
        needed(
            lambda: dq_tiles.start_read(
                row, kv_head * pl.num_programs(3) + member, ranges.tile(row, tile, step)
            )
        )

    @pl.when(kind == FULL)
    def _whole():
        shares = [differentiate(keys, slice(None), FULL) for keys in sub_tiles(k_ref.shape[0])]
        if fused:
            dq_tiles.add(slice(None), sum(shares) * compute.scale)

    @pl.when(kind == MASKED)
    def _parts():
        tiles = k_ref.shape[0], q_ref.shape[0]
        ranges.for_each_part(row, tile, step, tiles, compute, True, columns, differentiate_part)

    if fused:
        needed(lambda: dq_tiles.start_write(row))

    @pl.when(last)
    def _finish():
        dkv_ref[0] *= compute.scale

    if fused:
        pl.when(last & (tile == pl.num_programs(2) - 1))(dq_tiles.finish)


def dq(
    carry,
    q,
    kv,
    saved: BackwardInputs,
    q_coords: TokenCoords,
    kv_coords: TokenCoords,
    options: TileOptions,
) -> jax.Array:
    """Returns the gradient of q in float32, [B, Hq, Tq, D], added to `carry`, whose memory it
    reuses.

    Args:
      q: [B, Hq, Tq, D]; kv: two of [B, Hkv, Tk, D], or their stack. The tiles divide the lengths.
      saved: dout [B, Hq, Tq, D], lse and delta [B, Hq, Tq].
    """
    dout, lse, delta = saved
    tiles = QueryTileGrid.create(q, kv, q_coords, kv_coords, options)
    before = () if carry is None else (carry,)
    inputs = (
        *tiles.ranges,
        q,
        *tiles.keys,
        dout,
        lse[:, :, None],
        delta[:, :, None],
        coordinate_rows(q_coords),
        coordinate_rows(kv_coords),
        *before,
    )
    result = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    return pl.pallas_call(
        functools.partial(_dq_kernel, carried=carry is not None, compute=options.scores),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tiles.ranges),
            grid=tiles.grid,
            in_specs=[
                tiles.queries,
                *tiles.key_specs,
                tiles.queries,
                tiles.statistics,
                tiles.statistics,
                tiles.query_rows,
                tiles.key_rows,
                *[tiles.queries] * len(before),
            ],
            out_specs=tiles.queries,
            scratch_shapes=tiles.scratch,
        ),
        out_shape=result,
        input_output_aliases={len(inputs) - 1: 0} if before else {},
        compiler_params=compiler_params(options, "pppa"),
        cost_estimate=cost(
            3,
            q.shape,
            kv[0].shape[2],
            options.mask,
            nbytes(q, *kv, dout, lse, delta, *before, result),
        ),
        interpret=options.interpret,
        name="attention_dq",
    )(*inputs)


def dkv(
    q,
    kv,
    saved: BackwardInputs,
    q_coords: TokenCoords,
    kv_coords: TokenCoords,
    options: TileOptions,
) -> jax.Array:
    """Returns the gradients of k and v in float32, stacked, [2, B, Hkv, Tk, D], summed over the
    query heads that share a key head.

    Arguments as in `dq`.
    """
    return _by_key_tiles(None, q, kv, saved, q_coords, kv_coords, options)[0]


def dq_dkv(
    carry,
    q,
    kv,
    saved: BackwardInputs,
    q_coords: TokenCoords,
    kv_coords: TokenCoords,
    options: TileOptions,
) -> tuple[jax.Array, jax.Array]:
    """Returns the results of `dq` and `dkv` from one kernel that computes scores and weights once.

    Tiles of keys are visited in sequence, because each adds to dq.
    """
    dkv, dq = _by_key_tiles(
        jnp.zeros(q.shape, jnp.float32) if carry is None else carry,
        q,
        kv,
        saved,
        q_coords,
        kv_coords,
        options,
    )
    return dq.reshape(q.shape), dkv


def _by_key_tiles(
    carry,
    q,
    kv,
    saved: BackwardInputs,
    q_coords: TokenCoords,
    kv_coords: TokenCoords,
    options: TileOptions,
) -> list:
    """Returns [dkv], or with a carry [dkv, dq], where dq has a separate dimension for its tiles."""
    (dout, lse, delta), head_dim = saved, q.shape[3]
    tiles = KeyTileGrid.create(q, kv, q_coords, kv_coords, options)
    results = [jax.ShapeDtypeStruct((2, *kv[0].shape), jnp.float32)]
    dkv_block = (2, None, None, options.key_tile, head_dim)
    result_specs = [pl.BlockSpec(dkv_block, lambda b, h, j, *_: (0, b, h, j, 0))]
    scratch, before = [*tiles.scratch], []
    if carry is not None:
        before = [carry.reshape(*q.shape[:2], -1, options.query_tile, head_dim)]
        results.append(jax.ShapeDtypeStruct(before[0].shape, jnp.float32))
        result_specs.append(pl.BlockSpec(memory_space=pl.ANY))
        scratch += [
            pltpu.VMEM((2, options.query_tile, head_dim), jnp.float32),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SMEM((6,), jnp.int32),
        ]
    inputs = (
        *tiles.ranges,
        q,
        *tiles.keys,
        dout,
        lse[:, :, None],
        delta[:, :, None],
        coordinate_rows(q_coords),
        coordinate_rows(kv_coords),
        *before,
    )
    return pl.pallas_call(
        functools.partial(_key_tile_kernel, fused=carry is not None, compute=options.scores),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tiles.ranges),
            grid=tiles.grid,
            in_specs=[
                tiles.queries,
                *tiles.key_specs,
                tiles.queries,
                tiles.statistics,
                tiles.statistics,
                tiles.query_rows,
                tiles.key_rows,
                *[pl.BlockSpec(memory_space=pl.ANY)] * len(before),
            ],
            out_specs=result_specs,
            scratch_shapes=scratch,
        ),
        out_shape=results,
        input_output_aliases={len(inputs) - 1: 1} if before else {},
        compiler_params=compiler_params(options, "ppaaa" if before else "pppaa"),
        cost_estimate=cost(
            5 if before else 4,
            q.shape,
            results[0].shape[3],
            options.mask,
            nbytes(q, *kv, dout, lse, delta, *before, *results),
        ),
        interpret=options.interpret,
        name="attention_backward" if before else "attention_dkv",
    )(*inputs)

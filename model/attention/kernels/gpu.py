"""The kernel for NVIDIA GPUs, in Pallas on Triton: a forward kernel, and backward kernels for dq
and for dk and dv.

The tiling is FlashAttention-2's, by token coordinates. The grid is (tile, batch row, head). A tile
of queries loops over the tiles of keys from the first to the last that it needs, in three ranges:
masked, unmasked (the first run of fully visible tiles), and masked again. Tiles outside are not
loaded, and loops without branches can be pipelined. If a block concatenates several shards, each
shard has its own ranges. Query heads that share a key head read the same keys. Statistics and
accumulators are float32. Arrays are read in their layout, [B, T, H, D], without transposing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ..blocks import BackwardInputs, Gradients, Keys, Queries
from ..choice import HOPPER, Request, require
from ..coords import FULL, SKIP, Mask, TokenCoords, tile_bounds, tile_kind, visible
from ..partial import AttentionPartial
from .device import device_kind
from .kernel import LOG2E, Kernel
from .padding import pad, padded


def _tile_ranges(
    q_bounds, kv_bounds, mask: Mask, transpose: bool = False, shards: int = 1
) -> jax.Array:
    """Returns for each query tile the range of its key tiles in each shard, int32 [B, nq, S, 4]:
    the first, the first full one, one past the last of these, one past the last.

    Args:
      transpose: return for each key tile the range of its query tiles.
      shards: how many shards the keys (with `transpose`, the queries) come from; S is its largest
        divisor that splits at tile boundaries.
    """
    rows, columns = (2, 1) if not transpose else (1, 2)
    kinds = tile_kind(
        jax.tree.map(lambda x: jnp.expand_dims(x, rows), q_bounds),
        jax.tree.map(lambda x: jnp.expand_dims(x, columns), kv_bounds),
        mask,
    )
    shards = math.gcd(shards, kinds.shape[-1])
    kinds = kinds.reshape(*kinds.shape[:2], shards, -1)
    count = kinds.shape[-1]
    number = jnp.arange(count)
    needed, full = kinds != SKIP, kinds == FULL
    first = jnp.argmax(needed, -1)
    last = jnp.where(needed.any(-1), count - jnp.argmax(needed[..., ::-1], -1), first)
    first_full = jnp.where(full.any(-1), jnp.argmax(full, -1), last)
    last_full = jnp.min(jnp.where(~full & (number > first_full[..., None]), number, count), -1)
    edges = jnp.stack([first, first_full, jnp.minimum(last_full, last), last], -1)
    return (edges + count * jnp.arange(shards)[:, None]).astype(jnp.int32)


def _loop(ranges_ref, body, carry):
    """Runs carry = body(i, carry, masked) over a tile's three ranges in each shard."""

    def visit_shard(shard, carry):
        edges = [ranges_ref[shard, i] for i in range(4)]
        for first, last, masked in zip(edges[:3], edges[1:], (True, False, True), strict=True):
            carry = lax.fori_loop(first, last, functools.partial(body, masked=masked), carry)
        return carry

    shards = ranges_ref.shape[0]
    return visit_shard(0, carry) if shards == 1 else lax.fori_loop(0, shards, visit_shard, carry)


def _seen(q_index, q_segment, kv_index, kv_segment, mask: Mask):
    return visible(
        TokenCoords(q_index[None], q_segment[None]),
        TokenCoords(kv_index[None], kv_segment[None]),
        mask,
    )[0]


def _dot(a, b, transpose_b=False):
    """a @ b, accumulated in float32; float32 operands are not rounded."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(
        a, b.T if transpose_b else b, precision=precision, preferred_element_type=jnp.float32
    )


def _forward_kernel(
    ranges_ref,
    q_ref,
    k_ref,
    v_ref,
    qi_ref,
    qs_ref,
    ki_ref,
    ks_ref,
    out_ref,
    lse_ref,
    *,
    key_tile,
    mask,
    scale,
):
    q, q_index, q_segment = q_ref[...], qi_ref[...], qs_ref[...]

    def body(i, carry, masked):
        out, highest, total = carry
        tile = pl.dslice(i * key_tile, key_tile)
        scores = _dot(q, k_ref[tile, :], transpose_b=True) * (scale * LOG2E)
        if masked:
            scores = jnp.where(
                _seen(q_index, q_segment, ki_ref[tile], ks_ref[tile], mask), scores, -jnp.inf
            )
        new_highest = jnp.maximum(highest, scores.max(-1))
        # A row that has seen no key keeps -inf; subtracting 0 instead avoids -inf - -inf.
        finite = jnp.where(new_highest == -jnp.inf, 0.0, new_highest)
        weights = jnp.exp2(scores - finite[:, None])
        shrink = jnp.exp2(highest - finite)
        out = out * shrink[:, None] + _dot(weights.astype(v_ref.dtype), v_ref[tile, :])
        return out, new_highest, total * shrink + weights.sum(-1)

    rows = q.shape[0]
    nothing = (
        jnp.zeros(q.shape, jnp.float32),
        jnp.full((rows,), -jnp.inf),
        jnp.zeros((rows,), jnp.float32),
    )
    out, highest, total = _loop(ranges_ref, body, nothing)
    nonzero = jnp.where(total == 0, 1.0, total)
    out_ref[...] = (out / nonzero[:, None]).astype(out_ref.dtype)
    lse_ref[...] = jnp.where(total == 0, -jnp.inf, (highest + jnp.log2(nonzero)) / LOG2E)


def _dq_kernel(
    ranges_ref,
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    lse_ref,
    delta_ref,
    qi_ref,
    qs_ref,
    ki_ref,
    ks_ref,
    dq_ref,
    *,
    key_tile,
    mask,
    scale,
):
    q, dout, lse, delta = q_ref[...], dout_ref[...], lse_ref[...], delta_ref[...]
    q_index, q_segment = qi_ref[...], qs_ref[...]

    def body(i, dq, masked):
        tile = pl.dslice(i * key_tile, key_tile)
        k = k_ref[tile, :]
        weights = jnp.exp2(_dot(q, k, transpose_b=True) * (scale * LOG2E) - (lse * LOG2E)[:, None])
        if masked:
            weights = jnp.where(
                _seen(q_index, q_segment, ki_ref[tile], ks_ref[tile], mask), weights, 0.0
            )
        dscores = weights * (_dot(dout, v_ref[tile, :], transpose_b=True) - delta[:, None])
        return dq + _dot(dscores.astype(k.dtype), k)

    dq_ref[...] = _loop(ranges_ref, body, jnp.zeros(q.shape, jnp.float32)) * scale


def _dkv_kernel(
    ranges_ref,
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    lse_ref,
    delta_ref,
    qi_ref,
    qs_ref,
    ki_ref,
    ks_ref,
    dk_ref,
    dv_ref,
    *,
    query_tile,
    group,
    mask,
    scale,
):
    k, v, kv_index, kv_segment = k_ref[...], v_ref[...], ki_ref[...], ks_ref[...]

    def body(i, carry, masked, head):
        dk, dv = carry
        tile = pl.dslice(i * query_tile, query_tile)
        q, dout = q_ref[tile, head, :], dout_ref[tile, head, :]
        # Keys by queries, so that weights and dscores are left operands of products, straight from
        # registers.
        weights = jnp.exp2(
            _dot(k, q, transpose_b=True) * (scale * LOG2E) - (lse_ref[head, tile] * LOG2E)[None]
        )
        if masked:
            weights = jnp.where(
                _seen(qi_ref[tile], qs_ref[tile], kv_index, kv_segment, mask).T, weights, 0.0
            )
        dscores = weights * (_dot(v, dout, transpose_b=True) - delta_ref[head, tile][None])
        return dk + _dot(dscores.astype(q.dtype), q), dv + _dot(weights.astype(dout.dtype), dout)

    def add_head(head, carry):
        return _loop(ranges_ref, functools.partial(body, head=head), carry)

    zero = jnp.zeros(k.shape, jnp.float32)
    dk, dv_ref[...] = lax.fori_loop(0, group, add_head, (zero, zero))
    dk_ref[...] = dk * scale


class Tuning(NamedTuple):
    """How a kernel runs.

    Attributes:
      tile: tokens per program: queries in the forward and dq kernels, keys in the dk and dv kernel.
      step: tokens of the other block loaded at a time.
      warps: per program; stages: Triton's num_stages, one more than the loads in flight.
    """

    tile: int
    step: int
    warps: int
    stages: int


# By kernel and head size; docs/notes/kernels.md has the compiler's figures. The first table is for
# 16-bit operands on any GPU: its tiles fit the 99 KiB of shared memory that consumer GPUs have.
ANY = {
    "forward": {64: Tuning(128, 64, 4, 2), 128: Tuning(128, 64, 8, 2), 256: Tuning(64, 32, 8, 2)},
    "dq": {64: Tuning(64, 64, 4, 2), 128: Tuning(64, 64, 8, 2), 256: Tuning(64, 16, 8, 2)},
    "dkv": {64: Tuning(64, 64, 4, 2), 128: Tuning(64, 64, 8, 2), 256: Tuning(32, 32, 4, 2)},
}
# The forward tuning is tokamax's, with 8 warps because ptxas serializes wgmma with 4; head size 256
# has no room for three stages of 128 keys. tokamax's backward, 64 x 64 with 4 warps, is kept where
# nothing spills: dk and dv for 128, and all kernels for 256, need 8 warps.
HOPPER_TILES = {
    "forward": {
        64: Tuning(128, 128, 8, 3),
        128: Tuning(128, 128, 8, 3),
        256: Tuning(128, 64, 8, 2),
    },
    "dq": {64: Tuning(64, 64, 4, 2), 128: Tuning(64, 64, 4, 2), 256: Tuning(128, 32, 8, 2)},
    "dkv": {64: Tuning(64, 64, 4, 2), 128: Tuning(128, 64, 8, 2), 256: Tuning(64, 32, 8, 2)},
}
TUNING = {
    **dict.fromkeys(HOPPER, HOPPER_TILES),
    # With Hopper's tuning dk and dv spill for head size 128, and need more tensor memory than there
    # is for 256.
    "B200": {**HOPPER_TILES, "dkv": ANY["dkv"]},
    # The A100 has 163 KiB of shared memory.
    "A100": {
        **ANY,
        "dq": {**ANY["dq"], 256: Tuning(64, 64, 8, 2)},
        "dkv": {**ANY["dkv"], 256: Tuning(64, 64, 8, 2)},
    },
}
# Float32 operands are not rounded, so the matrix units are not used, and larger tiles spill.
FLOAT32 = {
    "forward": {64: Tuning(64, 32, 8, 2), 128: Tuning(64, 16, 8, 2), 256: Tuning(32, 16, 4, 2)},
    "dq": {64: Tuning(64, 32, 8, 2), 128: Tuning(64, 16, 8, 2), 256: Tuning(32, 16, 4, 2)},
    "dkv": {64: Tuning(64, 32, 8, 2), 128: Tuning(64, 16, 8, 2), 256: Tuning(16, 16, 4, 2)},
}


@dataclasses.dataclass(frozen=True)
class GpuKernel(Kernel):
    """FlashAttention-2 in tiles.

    Attributes:
      query_tile, key_tile: the most tokens per tile, rounded down to a power of two of at least 16,
        and limited by what suits the device, dtype and head size; 0 for that limit.
      query_shards, key_shards: as in `over_shards`.
      interpret: run the same kernels on any platform, for tests.
    """

    query_tile: int = 0
    key_tile: int = 0
    query_shards: int = 1
    key_shards: int = 1
    interpret: bool = False

    def over_shards(self, queries: int, keys: int) -> GpuKernel:
        return dataclasses.replace(
            self, query_shards=self.query_shards * queries, key_shards=self.key_shards * keys
        )

    def tuning(self, kernel: str, operand: jax.Array) -> Tuning:
        """Returns the tuning of kernel "forward", "dq" or "dkv" for such operands [B, T, H, D]."""
        kind = device_kind()
        tables = (
            FLOAT32
            if operand.dtype.itemsize > 2
            else next((TUNING[name] for name in TUNING if name in kind), ANY)
        )
        sizes, head_dim = tables[kernel], operand.shape[-1]
        tuning = sizes[min((size for size in sizes if size >= head_dim), default=max(sizes))]
        tile, step = (
            (self.key_tile, self.query_tile)
            if kernel == "dkv"
            else (self.query_tile, self.key_tile)
        )
        return tuning._replace(tile=_at_most(tile, tuning.tile), step=_at_most(step, tuning.step))

    def _call(self, kernel, name, grid, inputs, specs, outputs, out_specs, tuning):
        params = (
            None
            if self.interpret
            else plgpu.CompilerParams(num_warps=tuning.warps, num_stages=tuning.stages)
        )
        return pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=specs,
            out_specs=out_specs,
            out_shape=outputs,
            name=name,
            compiler_params=params,
            interpret=self.interpret,
        )(*inputs)

    def with_softcap(self, softcap: float | None) -> Kernel:
        """As in Kernel; soft-caps are not supported."""
        require("gpu", Request(softcap=softcap))
        return self

    def forward(
        self, queries: Queries, keys: Keys, *, mask: Mask, scale: float
    ) -> AttentionPartial:
        return self._forward(queries, keys, mask, scale, jnp.float32)

    def rounded_forward(
        self, queries: Queries, keys: Keys, *, mask: Mask, scale: float
    ) -> AttentionPartial:
        return self._forward(queries, keys, mask, scale, queries.q.dtype)

    def _forward(
        self, queries: Queries, keys: Keys, mask: Mask, scale: float, dtype: Any
    ) -> AttentionPartial:
        """Returns attention over these keys, with out in `dtype`."""
        require("gpu", Request(global_tokens=mask.global_tokens))
        (q, q_coords), (k, v, kv_coords) = queries, keys
        length, size = q.shape[1], q.shape[3]
        tuning = self.tuning("forward", q)
        tile, step = tuning.tile, tuning.step
        q, k, v, q_coords, kv_coords = _padded(q, k, v, q_coords, kv_coords, tile, step)
        (batch, q_length, heads, head_dim), (_, kv_length, kv_heads, _) = q.shape, k.shape
        group = heads // kv_heads
        ranges = _tile_ranges(
            tile_bounds(q_coords, tile), tile_bounds(kv_coords, step), mask, shards=self.key_shards
        )
        query, key = _tile(tile, head_dim), _all(kv_length, None, head_dim, group)
        rows, columns = _coords(tile), _coords(None, kv_length)
        out, lse = self._call(
            functools.partial(_forward_kernel, key_tile=step, mask=mask, scale=scale),
            "attention_forward",
            (q_length // tile, batch, heads),
            (ranges, q, k, v, *q_coords[:2], *kv_coords[:2]),
            [_ranges(ranges), query, key, key, rows, rows, columns, columns],
            [
                jax.ShapeDtypeStruct(q.shape, dtype),
                jax.ShapeDtypeStruct((batch, heads, q_length), jnp.float32),
            ],
            [query, pl.BlockSpec((None, None, tile), lambda i, b, h: (b, h, i))],
            tuning,
        )
        return AttentionPartial(out[:, :length, :, :size], lse[:, :, :length])

    def backward(
        self, queries: Queries, keys: Keys, saved: BackwardInputs, *, mask: Mask, scale: float
    ) -> Gradients:
        require("gpu", Request(global_tokens=mask.global_tokens))
        (q, q_coords), (k, v, kv_coords), (dout, lse, delta) = queries, keys, saved
        length, kv_tokens, size = q.shape[1], k.shape[1], q.shape[3]
        dq_tuning, dkv_tuning = (self.tuning(kernel, q) for kernel in ("dq", "dkv"))
        dout = dout.astype(q.dtype)
        # The tiles are powers of two, so the larger one is a multiple of the other.
        query_tile = max(dq_tuning.tile, dkv_tuning.step)
        key_tile = max(dkv_tuning.tile, dq_tuning.step)
        q, k, v, q_coords, kv_coords = _padded(q, k, v, q_coords, kv_coords, query_tile, key_tile)
        dout = pad(pad(dout, query_tile, 1), q.shape[3], 3)
        lse, delta = (
            pad(x, query_tile, 2) for x in (jnp.where(jnp.isneginf(lse), 0.0, lse), delta)
        )
        blocks = Queries(q, q_coords), Keys(k, v, kv_coords), BackwardInputs(dout, lse, delta)
        dq = self._dq(*blocks, mask, scale, dq_tuning)
        dk, dv = self._dkv(*blocks, mask, scale, dkv_tuning)
        return Gradients(
            dq[:, :length, :, :size], dk[:, :kv_tokens, :, :size], dv[:, :kv_tokens, :, :size]
        )

    def _dq(
        self,
        queries: Queries,
        keys: Keys,
        saved: BackwardInputs,
        mask: Mask,
        scale: float,
        tuning: Tuning,
    ) -> jax.Array:
        """Returns dq [B, Tq, Hq, D], float32, of blocks padded to `tuning`'s tiles."""
        (q, q_coords), (k, v, kv_coords) = queries, keys
        (batch, q_length, heads, head_dim), (_, kv_length, kv_heads, _) = q.shape, k.shape
        tile, step = tuning.tile, tuning.step
        ranges = _tile_ranges(
            tile_bounds(q_coords, tile), tile_bounds(kv_coords, step), mask, shards=self.key_shards
        )
        query, all_keys = _tile(tile, head_dim), _all(kv_length, None, head_dim, heads // kv_heads)
        rows, statistic = _coords(tile), pl.BlockSpec((None, None, tile), lambda i, b, h: (b, h, i))
        return self._call(
            functools.partial(_dq_kernel, key_tile=step, mask=mask, scale=scale),
            "attention_dq",
            (q_length // tile, batch, heads),
            (ranges, q, k, v, *saved, *q_coords[:2], *kv_coords[:2]),
            [
                _ranges(ranges),
                query,
                all_keys,
                all_keys,
                query,
                statistic,
                statistic,
                rows,
                rows,
                *[_coords(None, kv_length)] * 2,
            ],
            jax.ShapeDtypeStruct(q.shape, jnp.float32),
            query,
            tuning,
        )

    def _dkv(
        self,
        queries: Queries,
        keys: Keys,
        saved: BackwardInputs,
        mask: Mask,
        scale: float,
        tuning: Tuning,
    ) -> list[jax.Array]:
        """Returns dk and dv [B, Tk, Hkv, D], float32, of blocks padded to `tuning`'s tiles."""
        (q, q_coords), (k, v, kv_coords) = queries, keys
        (batch, q_length, heads, head_dim), (_, kv_length, kv_heads, _) = q.shape, k.shape
        group, tile, step = heads // kv_heads, tuning.tile, tuning.step
        ranges = _tile_ranges(
            tile_bounds(q_coords, step),
            tile_bounds(kv_coords, tile),
            mask,
            transpose=True,
            shards=self.query_shards,
        )
        key, all_queries = _tile(tile, head_dim), _all(q_length, group, head_dim)
        columns = _coords(tile)
        statistics = pl.BlockSpec((None, group, q_length), lambda i, b, h: (b, h, 0))
        return self._call(
            functools.partial(_dkv_kernel, query_tile=step, group=group, mask=mask, scale=scale),
            "attention_dkv",
            (kv_length // tile, batch, kv_heads),
            (ranges, q, k, v, *saved, *q_coords[:2], *kv_coords[:2]),
            [
                _ranges(ranges),
                all_queries,
                key,
                key,
                all_queries,
                statistics,
                statistics,
                *[_coords(None, q_length)] * 2,
                columns,
                columns,
            ],
            [jax.ShapeDtypeStruct(k.shape, jnp.float32)] * 2,
            [key, key],
            tuning,
        )


def _at_most(size: int, limit: int) -> int:
    """Returns the largest power of two from 16 to `limit` that is at most `size`; `limit` for 0."""
    return limit if not size else 1 << min(max(size, 16), limit).bit_length() - 1


def _padded(q, k, v, q_coords, kv_coords, query_tile, key_tile):
    """Pads the lengths to whole tiles and the head size to a power of two, as Triton blocks
    require."""
    head_dim = max(16, pl.next_power_of_2(q.shape[-1]))
    q, k, v = (
        pad(pad(x, tile, 1), head_dim, 3)
        for x, tile in ((q, query_tile), (k, key_tile), (v, key_tile))
    )
    return q, k, v, padded(q_coords, query_tile), padded(kv_coords, key_tile)


# Blocks for the grid (tile, batch row, head). A kernel loads only what it slices, so a block may
# cover the whole length.
def _ranges(ranges: jax.Array):
    """The ranges of a tile."""
    return pl.BlockSpec((None, None, *ranges.shape[2:]), lambda i, b, h: (b, i, 0, 0))


def _tile(tile: int, head_dim: int):
    return pl.BlockSpec((None, tile, None, head_dim), lambda i, b, h: (b, i, h, 0))


def _all(length: int, heads: int | None, head_dim: int, group: int = 1):
    """All tokens: of the head that `group` query heads share, or of `heads` heads at once."""
    return pl.BlockSpec((None, length, heads, head_dim), lambda i, b, h: (b, 0, h // group, 0))


def _coords(tile: int | None, length: int = 0):
    """The coordinates of a tile, or (None) of all tokens."""
    return pl.BlockSpec((None, tile or length), lambda i, b, h: (b, i if tile else 0))

"""The kernel for NVIDIA GPUs: Pallas on Triton, forward, and separate dq and dk/dv backward kernels.

FlashAttention-2's tiling on token coordinates. A query tile loops over the key tiles from the first to the last that it needs,
in three runs: with a mask, without (the first run of tiles that are wholly visible), with a mask again; what lies outside is
never loaded, and a loop without branches is one that the compiler can pipeline. Query heads that share a key head read the
same keys; statistics and accumulators are float32. Arrays are read as they are, [B, T, H, D]: nothing is transposed.
"""
from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ..blocks import Gradients, Keys, Queries, Saved
from ..coords import FULL, SKIP, Mask, TokenCoords, tile_bounds, tile_kind, visible
from ..partial import AttentionPartial
from .kernel import Kernel
from .padding import pad, padded

LOG2E = math.log2(math.e)


def _runs(q_bounds, kv_bounds, mask: Mask, transpose: bool = False) -> jax.Array:
    """For each query tile the key tiles (first, first full, one past the last full, one past the last): int32 [B, nq, 4].

    transpose: for each key tile the query tiles.
    """
    rows, columns = (2, 1) if not transpose else (1, 2)
    kinds = tile_kind(jax.tree.map(lambda x: jnp.expand_dims(x, rows), q_bounds),
                      jax.tree.map(lambda x: jnp.expand_dims(x, columns), kv_bounds), mask)
    count = kinds.shape[-1]
    place = jnp.arange(count)
    needed, full = kinds != SKIP, kinds == FULL
    first = jnp.argmax(needed, -1)
    last = jnp.where(needed.any(-1), count - jnp.argmax(needed[..., ::-1], -1), first)
    first_full = jnp.where(full.any(-1), jnp.argmax(full, -1), last)
    last_full = jnp.min(jnp.where(~full & (place > first_full[..., None]), place, count), -1)
    return jnp.stack([first, first_full, jnp.minimum(last_full, last), last], -1).astype(jnp.int32)


def _loop(runs_ref, body, carry):
    """body(i, carry, masked) over a tile's three runs."""
    edges = [runs_ref[i] for i in range(4)]
    for first, last, masked in zip(edges[:3], edges[1:], (True, False, True), strict=True):
        carry = lax.fori_loop(first, last, functools.partial(body, masked=masked), carry)
    return carry


def _seen(q_index, q_segment, kv_index, kv_segment, mask: Mask):
    return visible(TokenCoords(q_index[None], q_segment[None]), TokenCoords(kv_index[None], kv_segment[None]), mask)[0]


def _dot(a, b, transpose_a=False, transpose_b=False):
    """a @ b, accumulated in float32; float32 operands are not rounded."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    a, b = a.T if transpose_a else a, b.T if transpose_b else b
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def _forward_kernel(runs_ref, q_ref, k_ref, v_ref, qi_ref, qs_ref, ki_ref, ks_ref, out_ref, lse_ref, *, key_tile, mask, scale):
    q, q_index, q_segment = q_ref[...], qi_ref[...], qs_ref[...]

    def body(i, carry, masked):
        out, top, total = carry
        here = pl.dslice(i * key_tile, key_tile)
        scores = _dot(q, k_ref[here, :], transpose_b=True) * (scale * LOG2E)
        if masked:
            scores = jnp.where(_seen(q_index, q_segment, ki_ref[here], ks_ref[here], mask), scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(-1))
        # A row that has seen nothing yet keeps -inf; 0 in its place avoids -inf - -inf.
        safe_top = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        weights = jnp.exp2(scores - safe_top[:, None])
        shrink = jnp.exp2(top - safe_top)
        out = out * shrink[:, None] + _dot(weights.astype(v_ref.dtype), v_ref[here, :])
        return out, new_top, total * shrink + weights.sum(-1)

    rows = q.shape[0]
    start = (jnp.zeros(q.shape, jnp.float32), jnp.full((rows,), -jnp.inf), jnp.zeros((rows,), jnp.float32))
    out, top, total = _loop(runs_ref, body, start)
    safe = jnp.where(total == 0, 1.0, total)
    out_ref[...] = out / safe[:, None]
    lse_ref[...] = jnp.where(total == 0, -jnp.inf, (top + jnp.log2(safe)) / LOG2E)


def _weights(q, k, lse, seen, scale):
    scores = _dot(q, k, transpose_b=True) * (scale * LOG2E)
    weights = jnp.exp2(scores - (lse * LOG2E)[:, None])
    return weights if seen is None else jnp.where(seen, weights, 0.0)


def _dq_kernel(runs_ref, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, qi_ref, qs_ref, ki_ref, ks_ref, dq_ref, *, key_tile,
               mask, scale):
    q, dout, lse, delta = q_ref[...], dout_ref[...], lse_ref[...], delta_ref[...]
    q_index, q_segment = qi_ref[...], qs_ref[...]

    def body(i, dq, masked):
        here = pl.dslice(i * key_tile, key_tile)
        k = k_ref[here, :]
        seen = _seen(q_index, q_segment, ki_ref[here], ks_ref[here], mask) if masked else None
        weights = _weights(q, k, lse, seen, scale)
        dscores = weights * (_dot(dout, v_ref[here, :], transpose_b=True) - delta[:, None]) * scale
        return dq + _dot(dscores.astype(k.dtype), k)

    dq_ref[...] = _loop(runs_ref, body, jnp.zeros(q.shape, jnp.float32))


def _dkv_kernel(runs_ref, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, qi_ref, qs_ref, ki_ref, ks_ref, dk_ref, dv_ref, *,
                query_tile, group, mask, scale):
    k, v, kv_index, kv_segment = k_ref[...], v_ref[...], ki_ref[...], ks_ref[...]

    def body(i, carry, masked, head):
        dk, dv = carry
        here = pl.dslice(i * query_tile, query_tile)
        q, dout = q_ref[here, head, :], dout_ref[here, head, :]
        seen = _seen(qi_ref[here], qs_ref[here], kv_index, kv_segment, mask) if masked else None
        weights = _weights(q, k, lse_ref[head, here], seen, scale)
        dweights = _dot(dout, v, transpose_b=True)
        dscores = weights * (dweights - delta_ref[head, here][:, None]) * scale
        return (dk + _dot(dscores.astype(q.dtype), q, transpose_a=True),
                dv + _dot(weights.astype(dout.dtype), dout, transpose_a=True))

    def one_head(head, carry):
        return _loop(runs_ref, functools.partial(body, head=head), carry)

    zero = jnp.zeros(k.shape, jnp.float32)
    dk_ref[...], dv_ref[...] = lax.fori_loop(0, group, one_head, (zero, zero))


@dataclasses.dataclass(frozen=True)
class GpuKernel(Kernel):
    """The kernel with its tile sizes, in tokens: taken down to a power of two, from 16 to 128.

    Attributes:
      query_tile, key_tile: of the forward; backward_tile: both, of the backward kernels, which hold more at once.
      interpret: runs the kernels' text on any platform, for tests.
    """

    query_tile: int = 128
    key_tile: int = 64
    backward_tile: int = 64
    interpret: bool = False

    def __post_init__(self):
        for name in ("query_tile", "key_tile", "backward_tile"):
            tile = min(max(getattr(self, name), 16), 128)
            object.__setattr__(self, name, 1 << tile.bit_length() - 1)

    def _call(self, kernel, name, grid, inputs, specs, outputs, out_specs, head_dim):
        params = None if self.interpret else plgpu.CompilerParams(num_warps=4 if head_dim <= 64 else 8, num_stages=2)
        return pl.pallas_call(kernel, grid=grid, in_specs=specs, out_specs=out_specs, out_shape=outputs, name=name,
                              compiler_params=params, interpret=self.interpret)(*inputs)

    def _padded(self, q, k, v, q_coords, kv_coords, query_tile, key_tile):
        """Lengths to whole tiles, the head size to a power of two: what a Triton block must be."""
        head_dim = max(16, pl.next_power_of_2(q.shape[-1]))
        q, k, v = (pad(pad(x, tile, 1), head_dim, 3) for x, tile in ((q, query_tile), (k, key_tile), (v, key_tile)))
        return q, k, v, padded(q_coords, query_tile), padded(kv_coords, key_tile)

    def forward(self, queries: Queries, keys: Keys, *, mask: Mask, scale: float) -> AttentionPartial:
        _check(mask)
        (q, q_coords), (k, v, kv_coords) = queries, keys
        length, size = q.shape[1], q.shape[3]
        q, k, v, q_coords, kv_coords = self._padded(q, k, v, q_coords, kv_coords, self.query_tile, self.key_tile)
        (batch, q_length, heads, head_dim), (_, kv_length, kv_heads, _) = q.shape, k.shape
        group, tile = heads // kv_heads, self.query_tile
        runs = _runs(tile_bounds(q_coords, tile), tile_bounds(kv_coords, self.key_tile), mask)
        query, key = _tile(tile, head_dim), _all(kv_length, None, head_dim, group)
        rows, columns = _coords(tile), _coords(None, kv_length)
        out, lse = self._call(
            functools.partial(_forward_kernel, key_tile=self.key_tile, mask=mask, scale=scale), "attention_forward",
            (q_length // tile, batch, heads), (runs, q, k, v, *q_coords[:2], *kv_coords[:2]),
            [RUNS, query, key, key, rows, rows, columns, columns],
            [jax.ShapeDtypeStruct(q.shape, jnp.float32), jax.ShapeDtypeStruct((batch, heads, q_length), jnp.float32)],
            [query, pl.BlockSpec((None, None, tile), lambda i, b, h: (b, h, i))], head_dim)
        return AttentionPartial(out[:, :length, :, :size], lse[:, :, :length])

    def backward(self, queries: Queries, keys: Keys, saved: Saved, *, mask: Mask, scale: float) -> Gradients:
        _check(mask)
        (q, q_coords), (k, v, kv_coords), (dout, lse, delta) = queries, keys, saved
        length, kv_tokens, size, tile = q.shape[1], k.shape[1], q.shape[3], self.backward_tile
        dout = dout.astype(q.dtype)
        q, k, v, q_coords, kv_coords = self._padded(q, k, v, q_coords, kv_coords, tile, tile)
        (batch, q_length, heads, head_dim), (_, kv_length, kv_heads, _) = q.shape, k.shape
        group = heads // kv_heads
        dout = pad(pad(dout, tile, 1), head_dim, 3)
        lse, delta = (pad(x, tile, 2) for x in (jnp.where(jnp.isneginf(lse), 0.0, lse), delta))
        bounds = tile_bounds(q_coords, tile), tile_bounds(kv_coords, tile)
        inputs = (q, k, v, dout, lse, delta, *q_coords[:2], *kv_coords[:2])
        options = {"mask": mask, "scale": scale}

        query, keys = _tile(tile, head_dim), _all(kv_length, None, head_dim, group)
        rows, statistic = _coords(tile), pl.BlockSpec((None, None, tile), lambda i, b, h: (b, h, i))
        dq = self._call(
            functools.partial(_dq_kernel, key_tile=tile, **options), "attention_dq", (q_length // tile, batch, heads),
            (_runs(*bounds, mask), *inputs),
            [RUNS, query, keys, keys, query, statistic, statistic, rows, rows, *[_coords(None, kv_length)] * 2],
            jax.ShapeDtypeStruct(q.shape, jnp.float32), query, head_dim)

        key, queries = _tile(tile, head_dim), _all(q_length, group, head_dim)
        columns, statistics = _coords(tile), pl.BlockSpec((None, group, q_length), lambda i, b, h: (b, h, 0))
        dk, dv = self._call(
            functools.partial(_dkv_kernel, query_tile=tile, group=group, **options), "attention_dkv",
            (kv_length // tile, batch, kv_heads), (_runs(*bounds, mask, transpose=True), *inputs),
            [RUNS, queries, key, key, queries, statistics, statistics, *[_coords(None, q_length)] * 2, columns, columns],
            [jax.ShapeDtypeStruct(k.shape, jnp.float32)] * 2, [key, key], head_dim)
        return Gradients(dq[:, :length, :, :size], dk[:, :kv_tokens, :, :size], dv[:, :kv_tokens, :, :size])


# Blocks of a grid (tile, row of the batch, head). Only what a kernel slices is loaded, so a block may be a whole length.
RUNS = pl.BlockSpec((None, None, 4), lambda i, b, h: (b, i, 0))


def _tile(tile: int, head_dim: int):
    return pl.BlockSpec((None, tile, None, head_dim), lambda i, b, h: (b, i, h, 0))


def _all(length: int, heads: int | None, head_dim: int, group: int = 1):
    """The whole length: of the head that `group` query heads share, or of `heads` heads together."""
    return pl.BlockSpec((None, length, heads, head_dim), lambda i, b, h: (b, 0, h // group, 0))


def _coords(tile: int | None, length: int = 0):
    """A tile's coordinates, or all of them."""
    return pl.BlockSpec((None, tile or length), lambda i, b, h: (b, i if tile else 0))


def _check(mask: Mask) -> None:
    if mask.global_tokens:
        raise ValueError("kernel gpu: global tokens are served by the kernel 'xla'")

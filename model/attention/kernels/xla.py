"""The blockwise kernel in plain XLA: runs everywhere, keeps one tile of scores, and skips hidden tiles.

The memory-efficient attention of Rabe and Staats with the backward pass of FlashAttention: nothing of size Tq x Tk is kept.
Inside, heads come before length and the query heads that share a key head are stacked along the rows, so that every
product is one batched matrix product. Loops run over tiles; the tile rule picks skip, full or masked for each.
"""
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from ..coords import MASKED, SKIP, Mask, TokenCoords, tile_bounds, tile_kind, visible
from ..partial import AttentionPartial


def divisor(length: int, at_most: int) -> int:
    """The largest divisor of `length` that is at most `at_most`: tiles need not be padded then."""
    return next(size for size in range(min(length, at_most), 0, -1) if length % size == 0)


def _query_tiles(x: jax.Array, kv_heads: int, tile: int) -> jax.Array:
    """[B, T, Hq, D] -> [T / tile, B, Hkv, G * tile, D]."""
    batch, length, heads, head_dim = x.shape
    group = heads // kv_heads
    x = x.reshape(batch, length // tile, tile, kv_heads, group, head_dim).transpose(1, 0, 3, 4, 2, 5)
    return x.reshape(length // tile, batch, kv_heads, group * tile, head_dim)


def _from_query_tiles(x: jax.Array, group: int) -> jax.Array:
    count, batch, kv_heads, rows, head_dim = x.shape
    x = x.reshape(count, batch, kv_heads, group, rows // group, head_dim).transpose(1, 0, 4, 2, 3, 5)
    return x.reshape(batch, count * (rows // group), kv_heads * group, head_dim)


def _row_tiles(x: jax.Array, kv_heads: int, tile: int) -> jax.Array:
    """Statistics [B, Hq, T] -> [T / tile, B, Hkv, G * tile, 1]."""
    return _query_tiles(x.swapaxes(1, 2)[..., None], kv_heads, tile)


def _key_tiles(x: jax.Array, tile: int) -> jax.Array:
    """[B, T, Hkv, D] -> [T / tile, B, Hkv, tile, D]."""
    batch, length, heads, head_dim = x.shape
    return x.reshape(batch, length // tile, tile, heads, head_dim).transpose(1, 0, 3, 2, 4)


def _from_key_tiles(x: jax.Array) -> jax.Array:
    count, batch, heads, tile, head_dim = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(batch, count * tile, heads, head_dim)


def _coord_tiles(coords: TokenCoords, tile: int) -> TokenCoords:
    return jax.tree.map(lambda x: x.reshape(x.shape[0], -1, tile).swapaxes(0, 1), coords)


def _kinds(q_coords, kv_coords, query_tile, key_tile, mask) -> jax.Array:
    """What each pair of tiles needs, over the whole batch: int32 [Tq / query_tile, Tk / key_tile]."""
    q_bounds = jax.tree.map(lambda x: x[:, :, None], tile_bounds(q_coords, query_tile))
    kv_bounds = jax.tree.map(lambda x: x[:, None, :], tile_bounds(kv_coords, key_tile))
    kinds = tile_kind(q_bounds, kv_bounds, mask)
    return jnp.where((kinds == kinds[:1]).all(0), kinds[0], MASKED)


def _range(needed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First and one past the last True of a vector: what lies outside is never looped over."""
    size = needed.shape[0]
    return jnp.argmax(needed), jnp.where(needed.any(), size - jnp.argmax(needed[::-1]), 0)


def _product(a: jax.Array, b: jax.Array, transpose_a=False, transpose_b=False) -> jax.Array:
    """Batched matrix product over the last two axes, accumulated in float32."""
    dims = (((a.ndim - 2 if transpose_a else a.ndim - 1,), (b.ndim - 1 if transpose_b else b.ndim - 2,)), ((0, 1), (0, 1)))
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _at(tiles, i):
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), tiles)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The kernel with the tile sizes to aim at; a length that they do not divide gets the next smaller divisor."""

    query_tile: int = 512
    key_tile: int = 512

    def _scores(self, q, k, q_coords, kv_coords, kind, group, mask, scale):
        """One tile of scores [B, Hkv, G * tq, tk], hidden ones -inf. The mask is made only for a MASKED tile."""
        scores = _product(q, k, transpose_b=True) * scale

        def hide(scores):
            seen = visible(q_coords, kv_coords, mask)[:, None, None]
            shape = (*scores.shape[:2], group, -1, scores.shape[-1])
            return jnp.where(seen, scores.reshape(shape), -jnp.inf).reshape(scores.shape)

        return lax.cond(kind == MASKED, hide, lambda scores: scores, scores)

    def forward(self, q, k, v, q_coords, kv_coords, *, mask: Mask, scale: float) -> AttentionPartial:
        """Attention of one block of queries over one block of keys; see the package's docstring for shapes."""
        _, length, heads, _ = q.shape
        kv_heads = k.shape[2]
        group = heads // kv_heads
        query_tile, key_tile = divisor(length, self.query_tile), divisor(k.shape[1], self.key_tile)
        kinds = _kinds(q_coords, kv_coords, query_tile, key_tile, mask)
        queries = (_query_tiles(q, kv_heads, query_tile), _coord_tiles(q_coords, query_tile), kinds)
        keys = (_key_tiles(k, key_tile), _key_tiles(v, key_tile), _coord_tiles(kv_coords, key_tile))

        def one_query_tile(_, tile):
            q_tile, q_at, kinds = tile

            def one_key_tile(j, carry):
                def compute(carry):
                    out, top, total = carry
                    k_tile, v_tile, kv_at = _at(keys, j)
                    scores = self._scores(q_tile, k_tile, q_at, kv_at, kinds[j], group, mask, scale)
                    new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
                    # A row that has seen nothing yet keeps -inf; 0 in its place avoids -inf - -inf.
                    safe_top = jnp.where(jnp.isneginf(new_top), 0.0, new_top)
                    weights = jnp.exp(scores - safe_top)
                    shrink = jnp.exp(top - safe_top)
                    total = total * shrink + weights.sum(-1, keepdims=True)
                    return out * shrink + _product(weights.astype(v_tile.dtype), v_tile), new_top, total

                return lax.cond(kinds[j] == SKIP, lambda carry: carry, compute, carry)

            rows = (*q_tile.shape[:3], 1)
            start = (jnp.zeros(q_tile.shape, jnp.float32), jnp.full(rows, -jnp.inf), jnp.zeros(rows))
            out, top, total = lax.fori_loop(*_range(kinds != SKIP), one_key_tile, start)
            safe = jnp.where(total == 0, 1.0, total)
            return None, (out / safe, jnp.where(total == 0, -jnp.inf, top + jnp.log(safe)))

        _, (out, lse) = lax.scan(one_query_tile, None, queries)
        return AttentionPartial(_from_query_tiles(out, group), _from_query_tiles(lse, group)[..., 0].swapaxes(1, 2))

    def backward(self, q, k, v, dout, lse, delta, q_coords, kv_coords, *, mask: Mask, scale: float):
        """Gradients of q, k and v from the merged `lse` and `delta`: float32, shaped like q, k, v."""
        length, heads = q.shape[1:3]
        kv_heads = k.shape[2]
        group = heads // kv_heads
        query_tile, key_tile = divisor(length, self.query_tile), divisor(k.shape[1], self.key_tile)
        kinds = _kinds(q_coords, kv_coords, query_tile, key_tile, mask)
        lse = jnp.where(jnp.isneginf(lse), 0.0, lse)
        queries = (_query_tiles(q, kv_heads, query_tile), _query_tiles(dout.astype(q.dtype), kv_heads, query_tile),
                   _row_tiles(lse, kv_heads, query_tile), _row_tiles(delta, kv_heads, query_tile),
                   _coord_tiles(q_coords, query_tile))
        keys = (_key_tiles(k, key_tile), _key_tiles(v, key_tile), _coord_tiles(kv_coords, key_tile), kinds.T)

        def one_key_tile(dq, tile):
            k_tile, v_tile, kv_at, kinds = tile

            def one_query_tile(i, carry):
                dq, dk, dv = carry
                dq_tile = _at(dq, i)

                def compute(dq_tile, dk, dv):
                    q_tile, dout_tile, lse_tile, delta_tile, q_at = _at(queries, i)
                    scores = self._scores(q_tile, k_tile, q_at, kv_at, kinds[i], group, mask, scale)
                    weights = jnp.exp(scores - lse_tile)
                    dv = dv + _product(weights.astype(q.dtype), dout_tile, transpose_a=True)
                    dweights = _product(dout_tile, v_tile, transpose_b=True)
                    dscores = (weights * (dweights - delta_tile) * scale).astype(q.dtype)
                    dk = dk + _product(dscores, q_tile, transpose_a=True)
                    return dq_tile + _product(dscores, k_tile), dk, dv

                # The branches see one tile of dq, not all of it: a conditional would copy the whole array each time.
                dq_tile, dk, dv = lax.cond(kinds[i] == SKIP, lambda *c: c, compute, dq_tile, dk, dv)
                return lax.dynamic_update_index_in_dim(dq, dq_tile, i, 0), dk, dv

            zero = jnp.zeros(k_tile.shape, jnp.float32)
            dq, dk, dv = lax.fori_loop(*_range(kinds != SKIP), one_query_tile, (dq, zero, zero))
            return dq, (dk, dv)

        dq, (dk, dv) = lax.scan(one_key_tile, jnp.zeros(queries[0].shape, jnp.float32), keys)
        return _from_query_tiles(dq, group), _from_key_tiles(dk), _from_key_tiles(dv)

"""The XLA kernel: blockwise attention in plain XLA. It runs everywhere, holds one tile of scores at
a time, and skips tiles that the mask hides.

The forward pass is the memory-efficient attention of Rabe and Staats, on which Blockwise Parallel
Transformer and Ring Attention build: an outer loop over tiles of queries, an inner one over tiles
of keys, and a running softmax. The backward pass is FlashAttention-2's (Algorithm 2). Nothing of
size Tq x Tk is stored.

Inside, heads come before tokens, and the G = Hq / Hkv query heads that share a key head are
stacked, so that every product is one batched matrix product. Scores have keys as rows,
[B, Hkv, tk, G * tq]: the weights are then never a transposed left operand, for which the CPU
compiler has no fast matrix product (3 times slower in float32).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ..blocks import BackwardInputs, Gradients, Keys, Queries
from ..coords import FULL, MASKED, SKIP, Mask, TokenCoords, tile_bounds, tile_kind, visible
from ..partial import AttentionPartial
from .kernel import Kernel
from .padding import pad, padded, tile_size
from .softcap import capped, with_slope


def _query_tiles(
    x: Float[Array, "B T Hq D"], kv_heads: int, tile: int
) -> Float[Array, "n B Hkv G*tile D"]:
    batch, length, heads, head_dim = x.shape
    group = heads // kv_heads
    x = x.reshape(batch, length // tile, tile, kv_heads, group, head_dim).transpose(
        1, 0, 3, 4, 2, 5
    )
    return x.reshape(length // tile, batch, kv_heads, group * tile, head_dim)


def _from_query_tiles(x: Float[Array, "n B Hkv D G*tile"], group: int) -> Float[Array, "B T Hq D"]:
    count, batch, kv_heads, head_dim, columns = x.shape
    x = x.reshape(count, batch, kv_heads, head_dim, group, columns // group).transpose(
        1, 0, 5, 2, 4, 3
    )
    return x.reshape(batch, count * (columns // group), kv_heads * group, head_dim)


def _statistic_tiles(
    x: Float[Array, "B Hq T"], kv_heads: int, tile: int
) -> Float[Array, "n B Hkv 1 G*tile"]:
    return _query_tiles(x.swapaxes(1, 2)[..., None], kv_heads, tile).swapaxes(-1, -2)


def _key_tiles(x: Float[Array, "B T Hkv D"], tile: int) -> Float[Array, "n B Hkv tile D"]:
    batch, length, heads, head_dim = x.shape
    return x.reshape(batch, length // tile, tile, heads, head_dim).transpose(1, 0, 3, 2, 4)


def _from_key_tiles(x: Float[Array, "n B Hkv tile D"]) -> Float[Array, "B T Hkv D"]:
    count, batch, heads, tile, head_dim = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(batch, count * tile, heads, head_dim)


def _coord_tiles(coords: TokenCoords, tile: int, group: int = 1) -> TokenCoords:
    """Returns coordinates [n, B, group * tile]: each tile's, repeated per query head of a group."""
    return jax.tree.map(
        lambda x: jnp.tile(x.reshape(x.shape[0], -1, tile).swapaxes(0, 1), group), coords
    )


def _tile_kinds(
    q_coords: TokenCoords, kv_coords: TokenCoords, query_tile: int, key_tile: int, mask: Mask
) -> jax.Array:
    """Returns the kind of each pair of tiles for the whole batch, int32 [Tq / query_tile,
    Tk / key_tile]; MASKED where rows differ."""
    q_bounds = jax.tree.map(lambda x: x[:, :, None], tile_bounds(q_coords, query_tile))
    kv_bounds = jax.tree.map(lambda x: x[:, None, :], tile_bounds(kv_coords, key_tile))
    kinds = tile_kind(q_bounds, kv_bounds, mask)
    return jnp.where((kinds == kinds[:1]).all(0), kinds[0], MASKED)


def _for_visible_tiles(kinds: jax.Array, body, carry):
    """Runs `carry = body(tile, masked, carry)` over the FULL tiles, then over the MASKED ones;
    skips SKIP tiles.

    Two loops rather than one with a conditional, which would copy the tile that it passes on, and
    end fusions.
    """
    order = jnp.argsort(jnp.select([kinds == FULL, kinds == MASKED], [0, 1], 2))
    full, visible_tiles = jnp.sum(kinds == FULL), jnp.sum(kinds != SKIP)
    carry = lax.fori_loop(0, full, lambda i, carry: body(order[i], False, carry), carry)
    return lax.fori_loop(full, visible_tiles, lambda i, carry: body(order[i], True, carry), carry)


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Computes a batched matrix product, accumulated in float32."""
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _tile(tiles, i):
    """Returns tile i of each array in a tree."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), tiles)


@dataclasses.dataclass(frozen=True)
class XlaKernel(Kernel):
    """Blockwise attention in plain XLA.

    Attributes:
      query_tile, key_tile: the largest tile sizes in tokens; a length is padded if no size between
        half of that and all of it divides it.
    """

    query_tile: int = 256
    key_tile: int = 512

    def _padded(self, queries: Queries, keys: Keys) -> tuple[Queries, Keys, int, int]:
        """Returns the blocks padded to whole tiles, and the tile sizes."""
        (q, q_coords), (k, v, kv_coords) = queries, keys
        query_tile = tile_size(q.shape[1], self.query_tile)
        key_tile = tile_size(k.shape[1], self.key_tile)
        q, k, v = pad(q, query_tile, 1), pad(k, key_tile, 1), pad(v, key_tile, 1)
        return (
            Queries(q, padded(q_coords, query_tile)),
            Keys(k, v, padded(kv_coords, key_tile)),
            query_tile,
            key_tile,
        )

    def _scores(self, q, k, q_coords, kv_coords, mask, masked, scale):
        """Returns a tile of scores [B, Hkv, tk, G * tq]; if `masked`, hidden scores are -inf."""
        scores = capped(_product("bhkd,bhqd->bhkq", k, q) * scale, self.softcap)
        if not masked:
            return scores
        return jnp.where(
            visible(q_coords, kv_coords, mask).swapaxes(1, 2)[:, None], scores, -jnp.inf
        )

    def forward(
        self, queries: Queries, keys: Keys, *, mask: Mask, scale: float
    ) -> AttentionPartial:
        _, length, heads, _ = queries.q.shape
        kv_heads = keys.k.shape[2]
        (q, q_coords), (k, v, kv_coords), query_tile, key_tile = self._padded(queries, keys)
        kinds = _tile_kinds(q_coords, kv_coords, query_tile, key_tile, mask)
        query_tiles = (
            _query_tiles(q, kv_heads, query_tile),
            _coord_tiles(q_coords, query_tile, heads // kv_heads),
            kinds,
        )
        key_tiles = (
            _key_tiles(k, key_tile),
            _key_tiles(v, key_tile).swapaxes(-1, -2),
            _coord_tiles(kv_coords, key_tile),
        )

        def query_tile_result(_, tile):
            q_tile, q_tile_coords, kinds = tile
            batch, _, rows, head_dim = q_tile.shape
            row = (batch, kv_heads, 1, rows)
            start = (
                jnp.zeros((batch, kv_heads, head_dim, rows), jnp.float32),
                jnp.full(row, -jnp.inf, jnp.float32),
                jnp.zeros(row, jnp.float32),
            )

            def add_key_tile(j, masked, carry):
                out, highest, total = carry
                k_tile, v_tile, kv_tile_coords = _tile(key_tiles, j)
                scores = self._scores(
                    q_tile, k_tile, q_tile_coords, kv_tile_coords, mask, masked, scale
                )
                new_highest = jnp.maximum(highest, scores.max(-2, keepdims=True))
                # A row that has seen no key keeps -inf; subtracting 0 instead avoids -inf - -inf.
                finite = jnp.where(jnp.isneginf(new_highest), 0.0, new_highest)
                weights = jnp.exp(scores - finite)
                shrink = jnp.exp(highest - finite)
                total = total * shrink + weights.sum(-2, keepdims=True)
                out = out * shrink + _product(
                    "bhdk,bhkq->bhdq", v_tile, weights.astype(v_tile.dtype)
                )
                return out, new_highest, total

            out, highest, total = _for_visible_tiles(kinds, add_key_tile, start)
            nonzero = jnp.where(total == 0, 1.0, total)
            return None, (
                out / nonzero,
                jnp.where(total == 0, -jnp.inf, highest + jnp.log(nonzero)),
            )

        _, (out, lse) = lax.scan(query_tile_result, None, query_tiles)
        out, lse = (_from_query_tiles(x, heads // kv_heads)[:, :length] for x in (out, lse))
        return AttentionPartial(out, lse[..., 0].swapaxes(1, 2))

    def backward(
        self, queries: Queries, keys: Keys, saved: BackwardInputs, *, mask: Mask, scale: float
    ) -> Gradients:
        length, heads = queries.q.shape[1:3]
        kv_length, kv_heads = keys.k.shape[1:3]
        (q, q_coords), (k, v, kv_coords), query_tile, key_tile = self._padded(queries, keys)
        dout, lse, delta = saved
        dout = pad(dout.astype(q.dtype), query_tile, 1)
        lse = pad(lse, query_tile, 2)
        delta = pad(delta, query_tile, 2)
        kinds = _tile_kinds(q_coords, kv_coords, query_tile, key_tile, mask)
        lse = jnp.where(jnp.isneginf(lse), 0.0, lse)
        query_tiles = (
            _query_tiles(q, kv_heads, query_tile),
            _query_tiles(dout, kv_heads, query_tile),
            _statistic_tiles(lse, kv_heads, query_tile),
            _statistic_tiles(delta, kv_heads, query_tile),
            _coord_tiles(q_coords, query_tile, heads // kv_heads),
        )
        key_tiles = (
            _key_tiles(k, key_tile),
            _key_tiles(v, key_tile),
            _coord_tiles(kv_coords, key_tile),
            kinds.T,
        )

        def add_key_tile(dq, tile):
            k_tile, v_tile, kv_tile_coords, kinds = tile
            # Transposed once per tile of keys. If XLA folded the transposition into the product,
            # its CPU backend could not run it in bfloat16 (jaxlib 0.10.2).
            k_transposed = lax.optimization_barrier(k_tile.swapaxes(-1, -2))

            def add_query_tile(i, masked, carry):
                dq, dk, dv = carry
                q_tile, dout_tile, lse_tile, delta_tile, q_tile_coords = _tile(query_tiles, i)
                scores = self._scores(
                    q_tile, k_tile, q_tile_coords, kv_tile_coords, mask, masked, scale
                )
                weights = jnp.exp(scores - lse_tile)
                dv = dv + _product("bhkq,bhqd->bhkd", weights.astype(q.dtype), dout_tile)
                dweights = _product("bhkd,bhqd->bhkq", v_tile, dout_tile)
                dscores = (
                    with_slope(weights * (dweights - delta_tile), scores, self.softcap) * scale
                ).astype(q.dtype)
                dk = dk + _product("bhkq,bhqd->bhkd", dscores, q_tile)
                dq_tile = _tile(dq, i) + _product("bhdk,bhkq->bhdq", k_transposed, dscores)
                return lax.dynamic_update_index_in_dim(dq, dq_tile, i, 0), dk, dv

            zero = jnp.zeros(k_tile.shape, jnp.float32)
            dq, dk, dv = _for_visible_tiles(kinds, add_query_tile, (dq, zero, zero))
            return dq, (dk, dv)

        dq, (dk, dv) = lax.scan(
            add_key_tile, jnp.zeros(query_tiles[0].swapaxes(-1, -2).shape, jnp.float32), key_tiles
        )
        dq = _from_query_tiles(dq, heads // kv_heads)[:, :length]
        return Gradients(dq, *(_from_key_tiles(x)[:, :kv_length] for x in (dk, dv)))

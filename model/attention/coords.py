"""Token coordinates, the mask they imply, and the rule that decides what a tile of scores needs.

A token's coordinates travel with it: `index`, its place in the packed row before any permutation, and
`segment_ids`, the document of the row that it belongs to (0 is padding). Every layout, schedule and packing then
shares one mask, and no kernel needs to know which of them it serves.
"""
from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

SKIP, FULL, MASKED = 0, 1, 2


class TokenCoords(NamedTuple):
    """Where tokens are: int32 arrays [B, T].

    Attributes:
      index: place in the packed row before permutation; may restart with each document (bounds only get looser).
      segment_ids: document number within the row, counted from 1; 0 is padding, which sees and is seen by nothing.
      start: `index` of the first token of the token's document (`document_starts`). Global tokens need it; else it is None.
    """

    index: jax.Array
    segment_ids: jax.Array
    start: jax.Array | None = None


def document_starts(index: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """The least `index` of each token's document, int32 [B, L], of whole rows in any order (not of a shard's part of them)."""
    def one_row(index, segment_ids):
        order = jnp.lexsort((index, segment_ids))
        documents, places = segment_ids[order], jnp.arange(index.size)
        begins = jnp.concatenate([jnp.ones(1, bool), documents[1:] != documents[:-1]])
        first = jax.lax.cummax(jnp.where(begins, places, 0))
        return jnp.zeros_like(index).at[order].set(index[order][first])

    return jax.vmap(one_row)(jnp.asarray(index), jnp.asarray(segment_ids))


@dataclasses.dataclass(frozen=True)
class Mask:
    """Which earlier tokens a query may see, beside "the same document".

    Attributes:
      causal: a query sees itself and earlier tokens only.
      window: with a number w, only keys less than w tokens away.
      global_tokens: leading tokens of each document that every later query of it sees, also beyond the window.

    Raises:
      ValueError: the window is not positive, or global tokens are negative.
    """

    causal: bool = True
    window: int | None = None
    global_tokens: int = 0

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise ValueError(f"Mask.window: found {self.window}; a window is at least 1 token, or None for no window")
        if self.global_tokens < 0:
            raise ValueError(f"Mask.global_tokens: found {self.global_tokens}; a number of tokens is at least 0")

    def reach(self, tokens: int, shards: int) -> int:
        """How many shards away a visible key can be, where each of `shards` holds a run of `tokens`, in their order."""
        if self.window is None or self.global_tokens:
            return shards - 1
        return min(shards - 1, -(-(self.window - 1) // tokens))


def check_starts(starts: jax.Array | None, mask: Mask) -> None:
    """Refuses (ValueError) that the starts of the keys' documents are not known (None) where global tokens need them."""
    if mask.global_tokens and starts is None:
        raise ValueError(f"coords.start: missing, and Mask.global_tokens = {mask.global_tokens} needs it; "
                         "document_starts(index, segment_ids) of whole rows gives it")


def visible(q: TokenCoords, kv: TokenCoords, mask: Mask) -> jax.Array:
    """Which key each query may see: bool [B, Tq, Tk]."""
    q_index, kv_index = q.index[:, :, None], kv.index[:, None, :]
    q_segment, kv_segment = q.segment_ids[:, :, None], kv.segment_ids[:, None, :]
    seen = (q_segment == kv_segment) & (q_segment > 0)
    if mask.causal:
        seen &= q_index >= kv_index
    if mask.window is not None:
        near = jnp.abs(q_index - kv_index) < mask.window
        if mask.global_tokens:
            check_starts(kv.start, mask)
            near |= (q_index >= kv_index) & ((kv.index - kv.start)[:, None, :] < mask.global_tokens)
        seen &= near
    return seen


class TileBounds(NamedTuple):
    """What the tile rule needs of some tiles: int32 arrays of one shape. Padding is left out of all but `padded`.

    `place_min` is the least place of a token within its document, None where documents' starts are not known.
    """

    index_min: jax.Array
    index_max: jax.Array
    segment_min: jax.Array
    segment_max: jax.Array
    padded: jax.Array
    place_min: jax.Array | None = None


def tile_bounds(coords: TokenCoords, tile: int) -> TileBounds:
    """Bounds of each tile of `tile` tokens: arrays [B, T / tile]. A tile of padding alone has minimum > maximum."""
    index, segment, start = jax.tree.map(lambda x: x.reshape(x.shape[0], -1, tile), coords)
    real = segment > 0
    limits = jnp.iinfo(jnp.int32)
    return TileBounds(
        jnp.where(real, index, limits.max).min(-1),
        jnp.where(real, index, limits.min).max(-1),
        jnp.where(real, segment, limits.max).min(-1),
        jnp.where(real, segment, limits.min).max(-1),
        jnp.any(~real, -1).astype(jnp.int32),
        None if start is None else jnp.where(real, index - start, limits.max).min(-1),
    )


def tile_kind(q: TileBounds, kv: TileBounds, mask: Mask) -> jax.Array:
    """SKIP, FULL or MASKED for each pair of tiles (bounds broadcast against each other): int32.

    SKIP is certain (nothing is visible), FULL is certain (everything is); MASKED is every other case.
    """
    empty = (q.segment_min > q.segment_max) | (kv.segment_min > kv.segment_max)
    skip = empty | (q.segment_max < kv.segment_min) | (kv.segment_max < q.segment_min)
    one_document = (q.segment_min == q.segment_max) & (kv.segment_min == kv.segment_max)
    full = one_document & (q.segment_min == kv.segment_min) & (q.padded == 0) & (kv.padded == 0)
    if mask.causal:
        skip |= q.index_max < kv.index_min
        full &= q.index_min >= kv.index_max
    if mask.window is not None:
        # An empty tile's bounds are the integers' own limits: keep differences of those out of the comparison.
        later = jnp.where(empty, 0, q.index_min - kv.index_max)
        earlier = jnp.where(empty, 0, kv.index_min - q.index_max)
        far = later >= mask.window
        if mask.global_tokens:
            check_starts(kv.place_min, mask)
            far &= kv.place_min >= mask.global_tokens
        skip |= far | (earlier >= mask.window)
        full &= (q.index_max - kv.index_min < mask.window) & (kv.index_max - q.index_min < mask.window)
    return jnp.where(skip, SKIP, jnp.where(full, FULL, MASKED)).astype(jnp.int32)

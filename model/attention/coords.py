"""Token coordinates, the mask they imply, and the rule for which tiles of the mask to compute.

Striped Attention decides with GetMask(j, k) (its Algorithm 1 and the procedure after it) which
scores are hidden between the queries of device j and the keys of device k. Here each token's
coordinates travel with it instead: `index`, its index in the row before any permutation, and
`segment_ids`, its document. One rule, `visible`, then gives every such mask, for any layout,
schedule and packing, and kernels need not know which.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

SKIP, FULL, MASKED = 0, 1, 2  # kinds of tiles, see `tile_kind`
MOST_TOKENS = 2**31 - 1  # coordinates are int32


class TokenCoords(NamedTuple):
    """The coordinates of tokens.

    Attributes:
      index: index in the packed row before permutation. Without `shared` it may restart with each
        document (bounds only get looser); with it, causality also compares indices of different
        documents, so it must be the row's.
      segment_ids: the token's document, counted from 1 within the row; 0 is padding, which neither
        sees nor is seen.
      start: `index` of the first token of the token's document (`document_starts`); only global
        tokens need it, else None.
      shared: which tokens a later document also sees: a positive number, rising along the row, for
        the tokens of a shared prefix, minus that number for the document's tokens, 0 for others.
        None if nothing is shared.
    """

    index: Int[Array, "B T"]  # type: ignore[assignment]  # hides tuple.index, which nobody calls
    segment_ids: Int[Array, "B T"]
    start: Int[Array, "B T"] | None = None
    shared: Int[Array, "B T"] | None = None


def own_documents(coords: TokenCoords) -> TokenCoords:
    """The same coordinates without sharing: tokens see only their own document."""
    return coords._replace(shared=None)


def beginnings(q: TokenCoords, kv: TokenCoords) -> tuple[TokenCoords, TokenCoords]:
    """Coordinates with which each query sees only the prefix its document shares, if any; all other
    tokens become padding."""
    assert q.shared is not None and kv.shared is not None
    return (
        q._replace(segment_ids=jnp.maximum(-q.shared, 0), shared=None),
        kv._replace(segment_ids=jnp.maximum(kv.shared, 0), shared=None),
    )


def document_starts(index: Int[Array, "B L"], segment_ids: Int[Array, "B L"]) -> Int[Array, "B L"]:
    """The smallest `index` in each token's document, from whole rows in any order (not from a
    shard)."""

    def row_starts(index, segment_ids):
        order = jnp.lexsort((index, segment_ids))
        documents, positions = segment_ids[order], jnp.arange(index.size)
        begins = jnp.concatenate([jnp.ones(1, bool), documents[1:] != documents[:-1]])
        first = jax.lax.cummax(jnp.where(begins, positions, 0))
        return jnp.zeros_like(index).at[order].set(index[order][first])

    return jax.vmap(row_starts)(jnp.asarray(index), jnp.asarray(segment_ids))


@dataclasses.dataclass(frozen=True)
class Mask:
    """Which tokens of its document a query sees.

    Attributes:
      causal: only itself and earlier tokens.
      window: only keys fewer than this many tokens away (sliding window; DistFlashAttn, Appendix
        D); None for no window.
      global_tokens: leading tokens of each document that all its later queries see even beyond the
        window; without a window they change nothing.

    Raises:
      ValueError: the window is not positive, global tokens are negative, or int32 holds neither.
    """

    causal: bool = True
    window: int | None = None
    global_tokens: int = 0

    def __post_init__(self) -> None:
        if self.window is not None and not 1 <= self.window <= MOST_TOKENS:
            raise ValueError(
                f"Mask.window: found {self.window}; a window is 1 to {MOST_TOKENS} tokens, or None "
                "for no window"
            )
        if not 0 <= self.global_tokens <= MOST_TOKENS:
            raise ValueError(
                f"Mask.global_tokens: found {self.global_tokens}; needs 0 to {MOST_TOKENS} tokens"
            )

    def within(self, window: int | None) -> Mask:
        """This mask also limited to a window; None adds none."""
        windows = [size for size in (self.window, window) if size is not None]
        return dataclasses.replace(self, window=min(windows, default=None))

    def reach(self, tokens: int, shards: int) -> int:
        """How many shards away a key in the window can be, if shards are consecutive runs of
        `tokens` tokens.

        Global tokens can be further away.
        """
        if self.window is None:
            return shards - 1
        return min(shards - 1, -(-(self.window - 1) // tokens))


def check_starts(starts: jax.Array | None, mask: Mask) -> jax.Array:
    """Returns the documents' starts; call it only for masks with global tokens, which need them.

    Raises:
      ValueError: they are missing (None).
    """
    if starts is None:
        raise ValueError(
            f"coords.start: missing, and Mask.global_tokens = {mask.global_tokens} needs it; "
            "document_starts(index, segment_ids) of whole rows gives it"
        )
    return starts


def visible(q: TokenCoords, kv: TokenCoords, mask: Mask) -> Bool[Array, "B Tq Tk"]:
    """Whether each query sees each key."""
    q_index, kv_index = q.index[:, :, None], kv.index[:, None, :]
    q_segment, kv_segment = q.segment_ids[:, :, None], kv.segment_ids[:, None, :]
    seen = (q_segment == kv_segment) & (q_segment > 0)
    if q.shared is not None:
        seen |= visible(*beginnings(q, kv), Mask(causal=False))
    if mask.causal:
        seen &= q_index >= kv_index
    if mask.window is not None:
        near = jnp.abs(q_index - kv_index) < mask.window
        if mask.global_tokens:
            starts = check_starts(kv.start, mask)
            near |= (q_index >= kv_index) & ((kv.index - starts)[:, None, :] < mask.global_tokens)
        seen &= near
    return seen


class TileBounds(NamedTuple):
    """Bounds on the coordinates per tile, int32 arrays of one shape; padding counts only for
    `padded`.

    Attributes:
      index_min, index_max, segment_min, segment_max: of the tile's tokens; minimum > maximum if all
      are padding.
      padded: 1 if the tile has padding.
      offset_min: the smallest offset of a token from its document's start; None if starts are
        unknown.
    """

    index_min: jax.Array
    index_max: jax.Array
    segment_min: jax.Array
    segment_max: jax.Array
    padded: jax.Array
    offset_min: jax.Array | None = None


def tile_bounds(coords: TokenCoords, tile: int) -> TileBounds:
    """The bounds of each tile of `tile` tokens, arrays [B, T / tile]."""
    index, segment, start, _ = jax.tree.map(lambda x: x.reshape(x.shape[0], -1, tile), coords)
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


def one_document(q: TileBounds, kv: TileBounds) -> jax.Array:
    """Whether all tokens of both tiles belong to one document, so that only indices can hide
    keys."""
    same = (q.segment_min == kv.segment_min) & (q.segment_max == kv.segment_max)
    return same & (q.segment_min == q.segment_max) & (q.padded == 0) & (kv.padded == 0)


def tile_kind(q: TileBounds, kv: TileBounds, mask: Mask) -> jax.Array:
    """SKIP, FULL or MASKED for each pair of tiles, whose bounds broadcast against each other.

    SKIP means that certainly no key is visible, so the tile need not be computed (Striped
    Attention, "Tiling"); FULL, that certainly every key is visible to every query, so no mask is
    needed; MASKED is every other case.
    """
    empty = (q.segment_min > q.segment_max) | (kv.segment_min > kv.segment_max)
    skip = empty | (q.segment_max < kv.segment_min) | (kv.segment_max < q.segment_min)
    full = one_document(q, kv)
    if mask.causal:
        skip |= q.index_max < kv.index_min
        full &= q.index_min >= kv.index_max
    if mask.window is not None:
        # The bounds of an empty tile are the limits of int32: the differences of these would
        # overflow.
        later = jnp.where(empty, 0, q.index_min - kv.index_max)
        earlier = jnp.where(empty, 0, kv.index_min - q.index_max)
        far = later >= mask.window
        if mask.global_tokens:
            far &= check_starts(kv.offset_min, mask) >= mask.global_tokens
        skip |= far | (earlier >= mask.window)
        full &= (q.index_max - kv.index_min < mask.window) & (
            kv.index_max - q.index_min < mask.window
        )
    return jnp.where(skip, SKIP, jnp.where(full, FULL, MASKED)).astype(jnp.int32)

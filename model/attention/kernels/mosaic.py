"""The kernel for NVIDIA's Hopper GPUs, in Pallas on Mosaic: warp-specialized, with wgmma and TMA.
Its parts are in mosaic_*.py.

The keys that a query sees are one interval of a block, computed before the kernel (`intervals`): a
tile then needs two integers per row, and no key coordinates. Blocks that concatenate several shards
are first copied into row order. So are blocks that turn out to be out of order, unless the caller
promises that they are not (`with_rows_in_order`). Models promise it for their batches: packing
numbers the documents of a row in sequence and pads after them, and every layout preserves that
order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ..blocks import BackwardInputs, Keys, Queries, StackedKeys
from ..coords import Mask, TokenCoords
from ..partial import AttentionPartial
from . import mosaic_backward, mosaic_forward, mosaic_one_pass
from .intervals import in_row_order, intervals, row_order
from .kernel import AccumulatingKernel
from .mosaic_tiles import HEAD_DIMS, ROWS, WARPGROUPS
from .padding import pad, padded

# Lengths are padded to multiples of it: every tile of queries or keys is this size or half of it.
TILE = ROWS * WARPGROUPS


@dataclasses.dataclass(frozen=True)
class MosaicKernel(AccumulatingKernel):
    """FlashAttention-3's forward, and FlashAttention-2's backward in two kernels or
    FlashAttention-3's in one, within `choice.LIMITS`: bfloat16 or float16 on Hopper GPUs, without
    soft-caps or global tokens.

    Attributes:
      query_shards, key_shards: as in `over_shards`.
      rows_in_order: as in `with_rows_in_order`.
      any_order: whether one kernel computes all gradients, for head sizes up to 128: dq is then
        summed in no fixed order, and its rounding differs from run to run.
      interpret: parameters of Mosaic's interpreter (`InterpretGPUParams`), which runs the same
        kernels anywhere, slowly, for tests; None to compile.
    """

    query_shards: int = 1
    key_shards: int = 1
    rows_in_order: bool = False
    any_order: bool = False
    interpret: Any = None

    def over_shards(self, queries: int, keys: int) -> MosaicKernel:
        return dataclasses.replace(
            self, query_shards=self.query_shards * queries, key_shards=self.key_shards * keys
        )

    def with_rows_in_order(self, promised: bool) -> MosaicKernel:
        return dataclasses.replace(self, rows_in_order=promised)

    def extend(
        self,
        so_far: AttentionPartial | None,
        queries: Queries,
        keys: Keys | StackedKeys,
        *,
        mask: Mask,
        scale: float,
    ) -> AttentionPartial:
        return self._forward(so_far, queries, keys, rounded=False, mask=mask, scale=scale)

    def rounded_forward(
        self, queries: Queries, keys: Keys, *, mask: Mask, scale: float
    ) -> AttentionPartial:
        return self._forward(None, queries, keys, rounded=True, mask=mask, scale=scale)

    def gradients(
        self,
        so_far: Float[Array, "B Tq Hq D"] | None,
        queries: Queries,
        keys: Keys | StackedKeys,
        saved: BackwardInputs,
        *,
        mask: Mask,
        scale: float,
    ) -> tuple[Float[Array, "B Tq Hq D"], Float[Array, "2 B Tk Hkv D"]]:
        return self._call(self._gradients, so_far, queries, keys, saved, mask=mask, scale=scale)

    def _forward(
        self,
        so_far: AttentionPartial | None,
        queries: Queries,
        keys: Keys | StackedKeys,
        *,
        rounded: bool,
        mask: Mask,
        scale: float,
    ) -> AttentionPartial:
        if self.rows_in_order:
            queries = self._checked(queries, keys)
        method = functools.partial(self._extend, rounded)
        return self._call(method, so_far, queries, keys, mask=mask, scale=scale)

    def _call(
        self,
        method: Callable[..., Any],
        so_far: Any,
        queries: Queries,
        keys: Keys | StackedKeys,
        *saved: BackwardInputs,
        mask: Mask,
        scale: float,
    ) -> Any:
        """Calls the method on blocks in row order, sorting them if they are not or may not be."""
        blocks = so_far, queries, keys, *saved
        sides = ((queries.coords, self.query_shards), (keys.coords, self.key_shards))

        def run(sort: bool, *blocks: Any) -> Any:
            pair = [
                _Side.create(coords, queries.q.shape[3], sort or shards > 1)
                for coords, shards in sides
            ]
            return method(*pair, mask, scale, *blocks)

        unknown = [coords for coords, shards in sides if shards == 1]
        if self.rows_in_order or not unknown:
            return run(False, *blocks)
        are_sorted = jnp.array([in_row_order(TokenCoords(*coords[:2])) for coords in unknown]).all()
        return lax.cond(
            are_sorted, functools.partial(run, False), functools.partial(run, True), *blocks
        )

    def _checked(self, queries: Queries, keys: Keys | StackedKeys) -> Queries:
        """Returns the queries, or NaN if the promised order is broken: wrong results must not go
        unnoticed."""
        blocks = ((queries.coords, self.query_shards), (keys.coords, self.key_shards))
        in_order = jnp.array(
            [in_row_order(TokenCoords(*coords[:2])) for coords, shards in blocks if shards == 1]
        ).all()
        return queries._replace(q=jnp.where(in_order, queries.q, jnp.nan))

    def _extend(
        self,
        rounded: bool,
        q_side: _Side,
        kv_side: _Side,
        mask: Mask,
        scale: float,
        so_far: AttentionPartial | None,
        queries: Queries,
        keys: Keys | StackedKeys,
    ) -> AttentionPartial:
        if so_far is not None:
            so_far = AttentionPartial(
                q_side.tokens(so_far.out), q_side.statistics(so_far.lse, float("-inf"))
            )
        seen = intervals(q_side.coords, kv_side.coords, mask)
        out, lse = mosaic_forward.forward(
            so_far,
            q_side.tokens(queries.q),
            kv_side.arrays(keys),
            seen,
            scale=scale,
            rounded=rounded,
            interpret=self.interpret,
        )
        return AttentionPartial(
            q_side.back(out, queries.q.shape), q_side.statistics_back(lse, queries.q.shape[1])
        )

    def _gradients(
        self,
        q_side: _Side,
        kv_side: _Side,
        mask: Mask,
        scale: float,
        so_far: jax.Array | None,
        queries: Queries,
        keys: Keys | StackedKeys,
        saved: BackwardInputs,
    ) -> tuple[jax.Array, jax.Array]:
        q, arrays = q_side.tokens(queries.q), kv_side.arrays(keys)
        # If a query sees nothing, the mask zeroes its weights; a finite lse keeps them from being
        # NaN before that.
        lse = jnp.where(jnp.isneginf(saved.lse), 0.0, saved.lse)
        saved = BackwardInputs(
            q_side.tokens(saved.dout.astype(q.dtype)),
            q_side.statistics(lse),
            q_side.statistics(saved.delta),
        )
        so_far = None if so_far is None else q_side.tokens(so_far)
        options: dict[str, Any] = {"scale": scale, "interpret": self.interpret}
        seeing = intervals(kv_side.coords, q_side.coords, mask, transpose=True)
        if self.any_order:
            dq, dkv = mosaic_one_pass.gradients(so_far, q, arrays, saved, seeing, **options)
        else:
            seen = intervals(q_side.coords, kv_side.coords, mask)
            dq = mosaic_backward.dq_pass(so_far, q, arrays, saved, seen, **options)
            dkv = mosaic_backward.dkv_pass(q, arrays, saved, seeing, **options)
        shape = keys.kv.shape[1:] if isinstance(keys, StackedKeys) else keys.k.shape
        return q_side.back(dq, queries.q.shape), jax.vmap(lambda x: kv_side.back(x, shape))(dkv)


class _Side(NamedTuple):
    """The queries or the keys of a block, and how to sort and pad them for the kernels.

    Attributes:
      coords: in row order, padded.
      order: the permutation into row order; None if the tokens are in row order already.
      head_dim: padded.
    """

    coords: TokenCoords
    order: Int[Array, "B T"] | None
    head_dim: int

    @classmethod
    def create(cls, coords: TokenCoords, head_dim: int, sort: bool) -> _Side:
        """Returns the side of tokens with these coordinates, to be sorted if `sort`."""
        coords = TokenCoords(*coords[:2])
        order = None
        if sort:
            order = row_order(coords)
            coords = TokenCoords(
                *(jnp.take_along_axis(x, order, 1) for x in (coords.index, coords.segment_ids))
            )
        return cls(
            padded(coords, TILE), order, next(size for size in HEAD_DIMS if size >= head_dim)
        )

    def tokens(self, x: Float[Array, "B T H D"]) -> Float[Array, "B Tpadded H Dpadded"]:
        """Returns tokens in row order, padded to whole tiles and to a head size of the kernels."""
        if self.order is not None:
            x = jnp.take_along_axis(x, self.order[:, :, None, None], 1)
        return pad(pad(x, TILE, 1), self.head_dim, 3)

    def statistics(
        self, x: Float[Array, "B H T"], value: float = 0.0
    ) -> Float[Array, "B H Tpadded"]:
        """Does the same for one number per query and head; pads with `value`."""
        if self.order is not None:
            x = jnp.take_along_axis(x, self.order[:, None], 2)
        return pad(x, TILE, 2, value)

    def arrays(self, keys: Keys | StackedKeys) -> tuple[jax.Array, ...]:
        """Returns K and V: still stacked if they need no sorting or padding, else separate."""
        if isinstance(keys, StackedKeys):
            *_, length, _, head_dim = keys.kv.shape
            if self.order is None and length % TILE == 0 and head_dim == self.head_dim:
                return (keys.kv,)
            keys = keys.separate()
        return self.tokens(keys.k), self.tokens(keys.v)

    def back(
        self, x: Float[Array, "B Tpadded H Dpadded"], shape: tuple[int, ...]
    ) -> Float[Array, "B T H D"]:
        """Inverts `tokens`, for results of this shape."""
        x = x[:, : shape[1], :, : shape[3]]
        return (
            x
            if self.order is None
            else jnp.take_along_axis(x, jnp.argsort(self.order, -1)[:, :, None, None], 1)
        )

    def statistics_back(self, x: Float[Array, "B H Tpadded"], length: int) -> Float[Array, "B H T"]:
        """Inverts `statistics`."""
        x = x[:, :, :length]
        return (
            x
            if self.order is None
            else jnp.take_along_axis(x, jnp.argsort(self.order, -1)[:, None], 2)
        )

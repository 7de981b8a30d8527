"""The TPU kernel: Pallas (Mosaic), skipping hidden tiles before they are fetched. Files tpu_*.py hold its three parts."""
from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from ..coords import Mask, TokenCoords
from ..partial import AttentionPartial
from .tpu_tiles import fitting, pad, tile_size


@dataclasses.dataclass(frozen=True)
class Tpu:
    """The kernel with the tile sizes to aim at.

    Attributes:
      query_tile, key_tile: tokens; rounded to multiples of 128, and less where VMEM asks for it. Lengths that they do not
        divide are padded inside with tokens of no document.
      interpret: False on a TPU; True or `pltpu.InterpretParams()` runs the same kernel anywhere, slowly: for tests.
    """

    query_tile: int = 1024
    key_tile: int = 1024
    interpret: object = False

    def _arguments(self, q, k, mask, scale):
        query_tile, key_tile = fitting(self.query_tile, self.key_tile, q.shape[3], q.dtype.itemsize)
        return {"mask": mask, "scale": scale, "interpret": self.interpret,
                "query_tile": tile_size(q.shape[1], query_tile), "key_tile": tile_size(k.shape[1], key_tile)}

    def forward(self, q, k, v, q_coords, kv_coords, *, mask: Mask, scale: float,
                carry: AttentionPartial | None = None) -> AttentionPartial:
        """Attention of one block of queries over one block of keys; see the package's docstring for shapes."""
        from .tpu_forward import forward

        arguments = self._arguments(q, k, mask, scale)
        query_tile, key_tile = arguments["query_tile"], arguments["key_tile"]
        if carry is not None:
            carry = AttentionPartial(_heads_first(carry.out, query_tile), pad(carry.lse, query_tile, 2, -jnp.inf))
        out, lse = forward(
            _heads_first(q, query_tile), _heads_first(k, key_tile), _heads_first(v, key_tile),
            _padded(q_coords, query_tile), _padded(kv_coords, key_tile), carry=carry, **arguments)
        return AttentionPartial(_heads_last(out, q.shape[1]), lse[:, :, :q.shape[1]])

    def backward(self, q, k, v, dout, lse, delta, q_coords, kv_coords, *, mask: Mask, scale: float):
        """Gradients of q, k and v from the merged `lse` and `delta`: float32, shaped like q, k, v."""
        from .tpu_backward import dkv, dq

        arguments = self._arguments(q, k, mask, scale)
        query_tile, key_tile = arguments["query_tile"], arguments["key_tile"]
        # A row that sees nothing has no weight under any lse; a finite one keeps NaN out of its hidden scores.
        lse = jnp.where(jnp.isneginf(lse), 0.0, lse)
        block = (_heads_first(q, query_tile), _heads_first(k, key_tile), _heads_first(v, key_tile),
                 _heads_first(dout.astype(q.dtype), query_tile), pad(lse, query_tile, 2), pad(delta, query_tile, 2),
                 _padded(q_coords, query_tile), _padded(kv_coords, key_tile))
        dk, dv = dkv(*block, **arguments)
        return tuple(_heads_last(x, length.shape[1]) for x, length in ((dq(*block, **arguments), q), (dk, k), (dv, v)))


def _heads_first(x, tile: int):
    """[B, T, H, D] -> [B, H, T, D], T filled up to whole tiles."""
    return pad(x.swapaxes(1, 2), tile, 2)


def _heads_last(x, length: int):
    return x[:, :, :length].swapaxes(1, 2)


def _padded(coords: TokenCoords, tile: int) -> TokenCoords:
    """Coordinates filled up with padding: segment 0 sees nothing and is seen by nothing."""
    return TokenCoords(pad(coords.index, tile, 1), pad(coords.segment_ids, tile, 1))

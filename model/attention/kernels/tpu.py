"""The TPU kernel, in Pallas (Mosaic): tiles hidden by the mask are not even fetched. Its parts are
in tpu_*.py."""

from __future__ import annotations

import dataclasses

import jax

from ..blocks import BackwardInputs, Keys, Queries, StackedKeys
from ..choice import Request, require
from ..coords import Mask, TokenCoords
from ..partial import AttentionPartial
from . import tpu_backward, tpu_forward
from .kernel import AccumulatingKernel
from .padding import pad, padded, tile_size
from .tpu_options import DEFAULT_VMEM, LANES, VMEM, TileOptions, tiles_that_fit

V3 = "TPU v3"


@dataclasses.dataclass(frozen=True)
class TpuKernel(AccumulatingKernel):
    """FlashAttention-2 in tiles. On v3, whose matrix units accept no bfloat16 from a kernel, tiles
    are cast to float32 first.

    Attributes:
      query_tile, key_tile: the largest tile sizes in tokens; rounded to multiples of 128, and
        reduced until the tiles fit into VMEM. Lengths that they do not divide are padded with
        tokens of no document.
      fused: whether one kernel computes dq, dk and dv with five products per tile, instead of one
        for dq and one for dk and dv with seven. None: if the device supports it; see `_fused`.
      interpret: False on a TPU; True or `pltpu.InterpretParams()` runs the same kernel anywhere,
        slowly, for tests.
    """

    query_tile: int = 1024
    key_tile: int = 1024
    fused: bool | None = None
    interpret: object = False

    def extend(
        self,
        so_far: AttentionPartial | None,
        queries: Queries,
        keys: Keys | StackedKeys,
        *,
        mask: Mask,
        scale: float,
    ) -> AttentionPartial:
        q, kv = queries.q, _kv(keys)
        options = self._options(q, kv, mask, scale)
        q_tile, kv_tile = options.query_tile, options.key_tile
        if so_far is not None:
            so_far = AttentionPartial(
                _heads_first(so_far.out, q_tile), pad(so_far.lse, q_tile, 2, float("-inf"))
            )
        out, lse = tpu_forward.forward(
            so_far,
            _heads_first(q, q_tile),
            _keys(kv, kv_tile),
            _coords(queries.coords, q_tile),
            _coords(keys.coords, kv_tile),
            options,
        )
        return AttentionPartial(_heads_last(out, q.shape[1]), lse[:, :, : q.shape[1]])

    def gradients(
        self,
        so_far,
        queries: Queries,
        keys: Keys | StackedKeys,
        saved: BackwardInputs,
        *,
        mask: Mask,
        scale: float,
    ):
        q, kv, (dout, lse, delta) = queries.q, _kv(keys), saved
        options = self._options(q, kv, mask, scale)
        q_tile, kv_tile = options.query_tile, options.key_tile
        q_first, kv_first = _heads_first(q, q_tile), _keys(kv, kv_tile)
        saved = BackwardInputs(
            _heads_first(dout.astype(q.dtype), q_tile), pad(lse, q_tile, 2), pad(delta, q_tile, 2)
        )
        block = (
            q_first,
            kv_first,
            saved,
            _coords(queries.coords, q_tile),
            _coords(keys.coords, kv_tile),
            options,
        )
        so_far = None if so_far is None else _heads_first(so_far, q_tile)
        if _fused(q.shape[0] * kv[0].shape[2]) if self.fused is None else self.fused:
            dq, dkv = tpu_backward.dq_dkv(so_far, *block)
        else:
            dkv = tpu_backward.dkv(*block)
            dq = tpu_backward.dq(so_far, *block)
        return _heads_last(dq, q.shape[1]), _heads_last(dkv, kv[0].shape[1])

    def _options(self, q, kv, mask: Mask, scale: float) -> TileOptions:
        require("tpu", Request(global_tokens=mask.global_tokens))
        float32_operands = _device_kind() == V3
        vmem = VMEM.get(_device_kind(), DEFAULT_VMEM)
        itemsize = 4 if float32_operands else q.dtype.itemsize
        query_tile, key_tile = tiles_that_fit(
            self.query_tile, self.key_tile, q.shape[3], itemsize, vmem
        )
        q_tile = tile_size(q.shape[1], query_tile, LANES)
        kv_tile = tile_size(kv[0].shape[1], key_tile, LANES)
        return TileOptions(
            mask, scale, q_tile, kv_tile, float32_operands, self.interpret, self.softcap, vmem
        )


def _device_kind() -> str:
    """Returns the device kind the program is traced for; "" without a mesh of devices."""
    return getattr(jax.sharding.get_abstract_mesh().abstract_device, "device_kind", "")


def _fused(rows_and_heads: int) -> bool:
    """Returns whether the fused backward kernel is faster, for this many pairs of a batch row and a
    key head.

    It adds to dq one tile of keys after the other, so the cores of a chip (two on v4 and v5p) can
    only divide the pairs: with an odd number of pairs one core would wait. v3's compiler rejects
    its tile copies.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (
        device is not None
        and device.device_kind != V3
        and rows_and_heads % (device.num_cores or 1) == 0
    )


def _kv(keys: Keys | StackedKeys):
    """Returns K and V: a pair, or stacked."""
    return keys.kv if isinstance(keys, StackedKeys) else (keys.k, keys.v)


def _heads_first(x, tile: int):
    """Transposes [..., T, H, D] -> [..., H, T, D] and pads to whole tiles. The compiler chooses a
    layout of x that makes the transposition free."""
    return pad(x.swapaxes(-3, -2), tile, -2)


def _heads_last(x, length: int):
    return x[..., :length, :].swapaxes(-3, -2)


def _keys(kv, tile: int):
    return (
        tuple(_heads_first(x, tile) for x in kv)
        if isinstance(kv, tuple)
        else _heads_first(kv, tile)
    )


def _coords(coords: TokenCoords, tile: int) -> TokenCoords:
    """Pads coordinates to whole tiles, and drops the documents' starts, which only global tokens
    need."""
    return padded(TokenCoords(*coords[:2]), tile)

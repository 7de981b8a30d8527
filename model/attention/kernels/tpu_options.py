"""Options of the TPU kernels: tile sizes and memory, how scores are computed, and compiler
parameters."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..coords import Mask
from .kernel import LOG2E

LANES = 128
# Keys whose scores are computed at once; also the queries and keys in a part of a masked tile.
SUB_TILE = 512
# Bytes of VMEM that the compiler gives a kernel by default: all that a core of v3 or v4 has.
DEFAULT_VMEM = 16 * 2**20
# Bytes that a kernel requests on later chips, out of 128, 64, 128 and 64 MiB (jax's TpuInfo):
# enough for the largest tiles. The compiler keeps the rest for data it moves during the kernel.
VMEM = dict.fromkeys(("TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"), 32 * 2**20)


def tiles_that_fit(
    query_tile: int, key_tile: int, head_dim: int, itemsize: int, vmem: int = DEFAULT_VMEM
) -> tuple[int, int]:
    """Returns these tile sizes, or smaller ones that fit into this many bytes of VMEM along with
    1 MiB of coordinates.

    Counts the kernel that needs the most: q, dout, k, v and two float32 results or carries, all
    double-buffered, the statistics of the query tile, and two tiles of scores.
    """
    head_dim = -(-head_dim // LANES) * LANES

    def footprint():
        operands = 4 * itemsize * head_dim * (query_tile + key_tile)
        return (
            operands
            + 16 * head_dim * max(query_tile, key_tile)
            + 16 * LANES * query_tile
            + 8 * query_tile * key_tile
        )

    while footprint() > vmem - 2**20 and max(query_tile, key_tile) > LANES:
        if key_tile > query_tile:
            key_tile //= 2
        else:
            query_tile //= 2
    return query_tile, key_tile


class Scores(NamedTuple):
    """How a kernel computes the scores of a tile: as exponents of 2, which the hardware supports.

    Attributes:
      mask, scale, softcap: as in Kernel.
      float32_operands: tiles are cast to float32 before they are multiplied, as on v3.
    """

    mask: Mask
    scale: float
    softcap: float | None
    float32_operands: bool

    def part(self, tile: int) -> int:
        """Returns the tokens per part of a masked tile; divides the tile. v3's scalar memory has no
        room for the bounds of smaller parts."""
        return tile if tile % SUB_TILE or self.float32_operands else SUB_TILE

    def product(self, a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
        """Returns the product of two matrices over these axes, accumulated in float32."""
        a, b = (x.astype(jnp.float32) for x in (a, b)) if self.float32_operands else (a, b)
        return lax.dot_general(
            a, b, (((a_axis,), (b_axis,)), ((), ())), preferred_element_type=jnp.float32
        )

    def exponents(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Returns the scores of rows of a and rows of b in units of log 2, not yet masked."""
        if self.softcap is None:
            return self.product(a, b, 1, 1) * (self.scale * LOG2E)
        return (
            self.softcap * LOG2E * jnp.tanh(self.product(a, b, 1, 1) * (self.scale / self.softcap))
        )

    def before_cap(self, dscores: jax.Array, exponents: jax.Array) -> jax.Array:
        """Returns the gradient of scores before the soft-cap, from that of the capped scores and
        their `exponents`."""
        if self.softcap is None:
            return dscores
        return dscores * (1.0 - jnp.square(exponents * (1.0 / (self.softcap * LOG2E))))


def sub_tiles(tile: int) -> list[slice]:
    """Returns the parts in which a kernel processes a tile of keys, so that the scores of one
    overlap with the sums of another."""
    return [slice(start, min(start + SUB_TILE, tile)) for start in range(0, tile, SUB_TILE)]


@dataclasses.dataclass(frozen=True)
class TileOptions:
    """What the kernels are compiled for.

    Attributes:
      mask, scale, softcap: as in Kernel.
      query_tile, key_tile: tokens per tile; they divide the (padded) lengths.
      float32_operands: tiles are cast to float32 before they are multiplied.
      interpret: as in TpuKernel.
      vmem: bytes of VMEM that a kernel requests.
    """

    mask: Mask
    scale: float
    query_tile: int
    key_tile: int
    float32_operands: bool = False
    interpret: Any = False
    softcap: float | None = None
    vmem: int = DEFAULT_VMEM

    @property
    def scores(self) -> Scores:
        """How a kernel computes its scores."""
        return Scores(self.mask, self.scale, self.softcap, self.float32_operands)


def compiler_params(options: TileOptions, dimensions: str) -> pltpu.CompilerParams:
    """Returns the parameters of a kernel whose grid dimensions are "parallel" (p) or "arbitrary"
    (a), one letter each."""
    semantics: Any = tuple({"p": "parallel", "a": "arbitrary"}[letter] for letter in dimensions)
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=options.vmem)


def cost(products: int, q_shape, kv_length: int, mask: Mask, bytes_accessed: int):
    """Returns the estimate by which the compiler's scheduler decides what to overlap with the
    kernel; causal work counts half."""
    batch, heads, length, head_dim = q_shape
    pairs = batch * heads * length * kv_length // (2 if mask.causal else 1)
    return pl.CostEstimate(
        flops=2 * products * pairs * head_dim, transcendentals=pairs, bytes_accessed=bytes_accessed
    )


def nbytes(*arrays) -> int:
    """Returns the bytes of these arrays or shapes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)

"""Kernels: attention of one block of queries over one block of keys (the contract is in
`kernel.py`), and their names."""

from __future__ import annotations

import functools

from ..choice import BACKWARDS, KERNELS, LIMITS, require_order
from .chosen import KINDS, ChosenKernel
from .cudnn import CudnnKernel
from .gpu import GpuKernel
from .kernel import Kernel
from .mosaic import MosaicKernel
from .reference import ReferenceKernel
from .tpu import TpuKernel
from .xla import XlaKernel

__all__ = [
    "KERNELS",
    "ChosenKernel",
    "CudnnKernel",
    "GpuKernel",
    "Kernel",
    "MosaicKernel",
    "ReferenceKernel",
    "TpuKernel",
    "XlaKernel",
    "get_kernel",
]


@functools.cache
def get_kernel(
    name: str = "auto",
    *,
    query_tile: int = 0,
    key_tile: int = 0,
    backward: str = "repeatable",
) -> Kernel:
    """Returns the kernel of this name; equal arguments return the same object, so that nothing is
    compiled twice.

    Args:
      name: one of KERNELS. `auto` chooses a kernel for each call by `choice.AUTO`; `mosaic` and
        `cudnn` fall back to `auto` for calls that they do not support.
      query_tile, key_tile: tokens per tile; 0 leaves the choice to the kernel.
      backward: one of BACKWARDS. With `any_order`, the backward pass of `mosaic` computes fewer
        matrix products, and the rounding of dq varies from run to run.

    Raises:
      ValueError: an unknown name; a tile size for `mosaic` or `cudnn`, which choose their own, or
        for `reference`, which has none; `any_order` for a kernel whose order is fixed.
    """
    if name not in KERNELS:
        raise ValueError(f"kernel: found {name!r}; known: {', '.join(KERNELS)}")
    if backward not in BACKWARDS:
        raise ValueError(f"backward: found {backward!r}; known: {', '.join(BACKWARDS)}")
    require_order(name, backward)
    tiles = {
        option: size
        for option, size in (("query_tile", query_tile), ("key_tile", key_tile))
        if size
    }
    if tiles and name in LIMITS and (own_tiles := LIMITS[name].own_tiles):
        raise ValueError(f"kernel: {name!r}: {own_tiles}, found {tiles}; leave them 0")
    if name in ("auto", "mosaic", "cudnn"):
        return ChosenKernel(name, tuple(tiles.items()), backward == "any_order")
    return KINDS[name](**tiles)

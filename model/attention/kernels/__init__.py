"""Kernels: attention of one block of queries over one block of keys (the contract is `kernel.py`),
and their names."""

from __future__ import annotations

import functools

from ..choice import KERNELS, LIMITS
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
def get_kernel(name: str = "auto", *, query_tile: int = 0, key_tile: int = 0) -> Kernel:
    """The kernel of this name; the same arguments give the same object, so that nothing is compiled
    twice.

    Args:
      name: one of KERNELS. `auto` is the kernel that `choice.AUTO` names for each call; others
        serve what `mosaic` and `cudnn` do not.
      query_tile, key_tile: tokens in a tile; 0 leaves the choice to the kernel. `reference` has no
        tiles and reads neither.

    Raises:
      ValueError: an unknown name; a tile's size for `mosaic` or `cudnn`, which have their own.
    """
    if name not in KERNELS:
        raise ValueError(f"kernel: found {name!r}; known: {', '.join(KERNELS)}")
    tiles = {
        option: size
        for option, size in (("query_tile", query_tile), ("key_tile", key_tile))
        if size
    }
    if name == "auto":
        return ChosenKernel(name, tuple(tiles.items()))
    if name in ("mosaic", "cudnn"):
        if tiles:
            raise ValueError(
                f"kernel: {name!r}: {LIMITS[name].own_tiles}, found {tiles}; leave them 0"
            )
        return ChosenKernel(name)
    return KINDS[name](**({} if LIMITS[name].own_tiles else tiles))

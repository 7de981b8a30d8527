"""Kernels: attention of one block of queries over one block of keys (the contract is `kernel.py`), and their names."""
from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from ..blocks import BackwardInputs, Gradients, Keys, Queries, StackedKeys
from ..coords import Mask
from ..names import KERNELS
from ..partial import AttentionPartial
from .gpu import GpuKernel
from .kernel import Kernel
from .mosaic import MosaicKernel
from .reference import ReferenceKernel
from .tpu import TpuKernel
from .xla import XlaKernel

__all__ = ["KERNELS", "GpuKernel", "Kernel", "MosaicKernel", "PlatformKernel", "ReferenceKernel", "TpuKernel", "XlaKernel",
           "get_kernel"]
MAX_HEAD_DIM = 256  # of the kernels for accelerators


@dataclasses.dataclass(frozen=True)
class PlatformKernel(Kernel):
    """`tpu` where a program is lowered for TPUs, `gpu` for NVIDIA GPUs; `other` elsewhere, and for masks and head sizes that
    they do not serve.

    All three are traced, and the choice is made when the program is lowered, because only then is the platform known: a CPU
    host may compile for a described TPU topology, and inside `shard_map` there is no mesh of real devices to look at.
    """

    tpu: Kernel
    gpu: Kernel
    other: Kernel

    def over_shards(self, queries: int, keys: int) -> PlatformKernel:
        kernels = (kernel.over_shards(queries, keys) for kernel in (self.tpu, self.gpu, self.other))
        return PlatformKernel(*kernels, softcap=self.softcap)

    def with_rows_in_order(self, promised: bool) -> PlatformKernel:
        return dataclasses.replace(self, gpu=self.gpu.with_rows_in_order(promised))

    def with_softcap(self, softcap: float | None) -> Kernel:
        """As of Kernel. NVIDIA GPUs are served by `other` then, which a warning says."""
        if softcap is None:
            return self
        if jax.default_backend() == "gpu":
            warnings.warn("attention kernel: soft-caps of scores are served by xla, not by gpu", stacklevel=2)
        tpu, other = (kernel.with_softcap(softcap) for kernel in (self.tpu, self.other))
        return PlatformKernel(tpu, other, other, softcap=softcap)

    def forward(self, queries: Queries, keys: Keys, *, mask: Mask, scale: float) -> AttentionPartial:
        return self._call("forward", queries, keys, mask=mask, scale=scale)

    def backward(self, queries: Queries, keys: Keys, saved: BackwardInputs, *, mask: Mask, scale: float) -> Gradients:
        return self._call("backward", queries, keys, saved, mask=mask, scale=scale)

    def extend(self, so_far: AttentionPartial | None, queries: Queries, keys: Keys | StackedKeys, *, mask: Mask,
               scale: float) -> AttentionPartial:
        return self._call("extend", so_far, queries, keys, mask=mask, scale=scale)

    def gradients(self, so_far, queries: Queries, keys: Keys | StackedKeys, saved: BackwardInputs, *, mask: Mask, scale: float):
        return self._call("gradients", so_far, queries, keys, saved, mask=mask, scale=scale)

    def _call(self, method: str, *blocks: Any, mask: Mask, scale: float) -> Any:
        def of(kernel):
            return _traced_once(kernel, method, mask, scale)

        # The refusal is the same on every platform; the warning matters only where a faster kernel would have run.
        refused = "global tokens" if mask.global_tokens else _refused_head_dim(blocks)
        if refused:
            if jax.default_backend() in ("tpu", "gpu"):
                warnings.warn(f"attention kernel: {refused} are served by xla, not by {jax.default_backend()}", stacklevel=2)
            return of(self.other)(*blocks)
        return lax.platform_dependent(*blocks, tpu=of(self.tpu), cuda=of(self.gpu), default=of(self.other))


@functools.cache
def _traced_once(kernel: Kernel, method: str, mask: Mask, scale: float) -> Callable[..., Any]:
    """A kernel's method that is traced once for each shape: a ring pass calls it up to three times in each direction, and
    tracing it is most of what tracing a small training step takes."""
    return jax.jit(functools.partial(getattr(kernel, method), mask=mask, scale=scale), inline=True)


def _refused_head_dim(blocks) -> str:
    """The head size as a warning names it, where it is too large for an accelerator's kernel; else ""."""
    head_dim = next(block.q.shape[-1] for block in blocks if isinstance(block, Queries))
    return f"heads of {head_dim} ({MAX_HEAD_DIM} at most)" if head_dim > MAX_HEAD_DIM else ""


@functools.cache
def get_kernel(name: str = "auto", *, query_tile: int = 0, key_tile: int = 0) -> Kernel:
    """The kernel of this name; the same arguments give the same object, so that nothing is compiled twice.

    Args:
      name: `auto` is `tpu` on TPUs, `mosaic` on Hopper GPUs for operands of 16 bits, `gpu` on NVIDIA GPUs otherwise, where a
        tile's size is given and with JAX 0.12 (`mosaic.SLOW_SINCE`), and `xla` elsewhere and for global tokens.
      query_tile, key_tile: tokens in a tile; 0 leaves the choice to the kernel. `reference` has no tiles and reads neither.

    Raises:
      ValueError: an unknown name; a tile's size for `mosaic`, whose tiles follow from the head size.
    """
    tiles: dict[str, Any] = {option: size for option, size in (("query_tile", query_tile), ("key_tile", key_tile)) if size}
    if name == "reference":
        return ReferenceKernel()
    if name == "xla":
        return XlaKernel(**tiles)
    if name == "tpu":
        return TpuKernel(**tiles)
    if name == "gpu":
        return GpuKernel(**tiles)
    if name == "mosaic":
        if tiles:
            raise ValueError(f"kernel: 'mosaic' chooses its tiles by the head size, found {tiles}; leave them 0")
        return MosaicKernel(get_kernel("auto"))
    if name == "auto":
        tpu, gpu, xla = (get_kernel(platform, **tiles) for platform in ("tpu", "gpu", "xla"))
        return PlatformKernel(tpu, gpu if tiles else MosaicKernel(gpu, asked_for=False), xla)
    raise ValueError(f"kernel: found {name!r}; known: {', '.join(KERNELS)}")

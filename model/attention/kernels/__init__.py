"""Kernels: one block of queries against one block of keys, forward and backward.

    forward (q, k, v, q_coords, kv_coords, *, mask, scale)                   -> AttentionPartial(out, lse)
    backward(q, k, v, dout, lse, delta, q_coords, kv_coords, *, mask, scale) -> dq, dk, dv

`q [B, Tq, Hq, D]`, `k, v [B, Tk, Hkv, D]`, Hq a multiple of Hkv: query head h meets key head h // (Hq / Hkv), and K/V are
never expanded. Results are float32. `lse` and `delta = sum(dout * out) [B, Hq, Tq]` of the backward are the *merged* ones.

A schedule of many rounds calls `Kernel.extend` and `Kernel.gradients` instead: a round goes on from what the rounds before have
found. Any kernel can do it; one that brings functions of its own for it spares a pass over the results in every round.
"""
from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from ..coords import Mask
from ..partial import AttentionPartial, merge
from . import reference, xla
from .gpu import Gpu
from .tpu import Tpu


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A pair of functions on the contract above, hashable, so that it can be static in a compiled step.

    Attributes:
      in_place: an object whose methods `extend` and `gradients` stand for the ones below; None: they are made from the pair.
    """

    name: str
    forward: Callable
    backward: Callable
    in_place: object = None

    def extend(self, carry: AttentionPartial | None, q, kv, q_coords, kv_coords, *, mask: Mask, scale: float):
        """Attention over one more block of keys: an AttentionPartial over it and over what `carry` has seen (None: nothing).

        kv: a pair (k, v), or both stacked [2, B, Tk, Hkv, D], as they travel.
        """
        if self.in_place is not None:
            return self.in_place.extend(carry, q, kv, q_coords, kv_coords, mask=mask, scale=scale)
        here = self.forward(q, *kv, q_coords, kv_coords, mask=mask, scale=scale)
        return here if carry is None else merge(carry, here)

    def gradients(self, carry: jax.Array | None, q, kv, dout, lse, delta, q_coords, kv_coords, *, mask: Mask, scale: float):
        """dq of this block, added to `carry` (None: nothing), and its dk and dv stacked: float32 [2, B, Tk, Hkv, D]."""
        block = (q_coords, kv_coords)
        if self.in_place is not None:
            return self.in_place.gradients(carry, q, kv, dout, lse, delta, *block, mask=mask, scale=scale)
        dq, dk, dv = self.backward(q, *kv, dout, lse, delta, *block, mask=mask, scale=scale)
        return dq if carry is None else carry + dq, jnp.stack([dk, dv])


@dataclasses.dataclass(frozen=True)
class PerPlatform:
    """`tpu` and `gpu` where a program is lowered for those, `other` elsewhere and for masks that they do not serve.

    All are traced and the choice is made at lowering: only then is it known for sure. The process's own devices say nothing of
    a described topology, for which a CPU host compiles, and inside `shard_map` there is no mesh of real devices to ask.
    """

    tpu: Kernel
    gpu: Kernel
    other: Kernel

    def _choose(self, method: str, *arrays, mask: Mask, scale: float):
        def call(kernel):
            return lambda *arrays: getattr(kernel, method)(*arrays, mask=mask, scale=scale)

        # Which mask or head size is refused does not depend on the platform; that it costs speed does.
        refused = "global tokens" if mask.global_tokens else _too_wide(arrays)
        if refused:
            if jax.default_backend() in ("tpu", "gpu"):
                warnings.warn(f"attention kernel: {refused} are served by xla, not by {jax.default_backend()}", stacklevel=2)
            return call(self.other)(*arrays)
        return lax.platform_dependent(*arrays, tpu=call(self.tpu), cuda=call(self.gpu),
                                      default=call(self.other))

    def forward(self, *block, **options) -> AttentionPartial:
        return self._choose("forward", *block, **options)

    def backward(self, *block, **options):
        return self._choose("backward", *block, **options)

    def extend(self, *block, **options) -> AttentionPartial:
        return self._choose("extend", *block, **options)

    def gradients(self, *block, **options):
        return self._choose("gradients", *block, **options)


def _too_wide(arrays) -> str:
    widest = max(x.shape[-1] for x in jax.tree.leaves(arrays) if x.ndim == 4)
    return f"heads of {widest} (256 at most)" if widest > WIDEST_HEAD else ""


WIDEST_HEAD = 256
KERNELS = ("auto", "tpu", "gpu", "xla", "reference")


@functools.cache
def get_kernel(name: str = "auto", *, query_tile: int = 0, key_tile: int = 0) -> Kernel:
    """The kernel of this name; `auto` is `tpu` on TPUs, `gpu` on NVIDIA's GPUs, `xla` elsewhere and for global tokens.

    query_tile, key_tile: tokens in a tile; 0 leaves it to the kernel. Asked again it is the same object: static arguments are
    compared, and another would be compiled anew.

    Raises:
      ValueError: an unknown name.
    """
    tiles = {name: size for name, size in (("query_tile", query_tile), ("key_tile", key_tile)) if size}
    if name == "reference":
        return Kernel("reference", reference.forward, reference.backward)
    if name == "xla":
        blockwise = xla.Tiles(**tiles)
        return Kernel("xla", blockwise.forward, blockwise.backward)
    if name == "tpu":
        pallas = Tpu(**tiles)
        return Kernel("tpu", pallas.forward, pallas.backward, pallas)
    if name == "gpu":
        triton = Gpu(**tiles)
        return Kernel("gpu", triton.forward, triton.backward)
    if name == "auto":
        either = PerPlatform(*(get_kernel(one, **tiles) for one in ("tpu", "gpu", "xla")))
        return Kernel("auto", either.forward, either.backward, either)
    raise ValueError(f"kernel: found {name!r}; known: {', '.join(KERNELS)}")

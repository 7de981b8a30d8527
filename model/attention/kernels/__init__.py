"""Kernels: one block of queries against one block of keys, forward and backward.

    forward (q, k, v, q_coords, kv_coords, *, mask, scale)                   -> AttentionPartial(out, lse)
    backward(q, k, v, dout, lse, delta, q_coords, kv_coords, *, mask, scale) -> dq, dk, dv

`q [B, Tq, Hq, D]`, `k, v [B, Tk, Hkv, D]`, Hq a multiple of Hkv: query head h meets key head h // (Hq / Hkv), and K/V are
never expanded. Results are float32. `lse` and `delta = sum(dout * out) [B, Hq, Tq]` of the backward are the *merged* ones.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

from . import reference, xla


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A pair of functions on the contract above, hashable, so that it can be static in a compiled step."""

    name: str
    forward: Callable
    backward: Callable


KERNELS = ("auto", "xla", "reference")


def get_kernel(name: str = "auto", *, query_tile: int = 512, key_tile: int = 512) -> Kernel:
    """The kernel of this name; `auto` is the fastest that this version has for every platform (`xla`).

    Raises:
      ValueError: an unknown name.
    """
    if name == "reference":
        return Kernel("reference", reference.forward, reference.backward)
    if name in ("auto", "xla"):
        tiles = xla.Tiles(query_tile, key_tile)
        return Kernel("xla", tiles.forward, tiles.backward)
    raise ValueError(f"kernel: found {name!r}; known: {', '.join(KERNELS)}")

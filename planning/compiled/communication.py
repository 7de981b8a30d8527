"""What a compiled step sends, in a few figures: bytes by kind of collective, and how many of them run beside compute."""
from __future__ import annotations

import jax

from . import GIB
from .overlap import Crossing, crossings
from .transfers import received, transfers


def communication(compiled, devices: int) -> dict[str, dict[str, float]] | None:
    """Kind of collective -> its figures, for one step and the device that receives most.

    Returns:
      for each kind `times` that one runs, `received_gib`, and `hidden`: the share of their results' bytes that arrive while a
      kernel or a matrix product runs. None where the compiled text cannot be had: jaxlib 0.10 does not read all that
      libtpu writes for v5p and v6e (0.12 does).
    """
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError:
        return None
    moved, under_way = transfers(text, devices), crossings(text)
    return {kind: {"times": sum(one.times for one in moved if one.kind == kind),
                   "received_gib": float(received(moved, kind).max()) / GIB,
                   "hidden": _hidden([one for one in under_way if one.kind == kind])}
            for kind in sorted({one.kind for one in moved})}


def _hidden(found: list[Crossing]) -> float:
    behind = sum(one.nbytes * one.times for one in found if one.kernels or one.products)
    return behind / max(1.0, sum(one.nbytes * one.times for one in found))

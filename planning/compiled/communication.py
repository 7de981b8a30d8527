"""What a compiled step sends, in a few figures: bytes by kind of collective, and the share that arrives beside compute."""
from __future__ import annotations

import jax

from . import GIB
from .overlap import Crossing, crossings
from .transfers import received, transfers


def communication(compiled: jax.stages.Compiled, devices: int) -> dict[str, dict[str, float]] | None:
    """The figures of each kind of collective, for one step and the device that receives most.

    Returns:
      kind -> `times` that a collective of this kind runs, `received_gib`, and `hidden`: the share of the results' bytes that
      arrive while a kernel or a matrix product runs. None where the text cannot be had: jaxlib 0.10 does not read all that
      libtpu writes for v5p and v6e (0.12 does).
    """
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError:
        return None
    if text is None:
        return None
    moved, under_way = transfers(text, devices), crossings(text)
    return {kind: {"times": sum(transfer.times for transfer in moved if transfer.kind == kind),
                   "received_gib": float(received(moved, kind).max()) / GIB,
                   "hidden": _hidden_share([crossing for crossing in under_way if crossing.kind == kind])}
            for kind in sorted({transfer.kind for transfer in moved})}


def _hidden_share(crossings: list[Crossing]) -> float:
    """The share of the results' bytes that arrive behind a kernel or a matrix product; 0 where nothing arrives."""
    hidden = sum(crossing.nbytes * crossing.times for crossing in crossings if crossing.kernels or crossing.products)
    return hidden / max(1.0, sum(crossing.nbytes * crossing.times for crossing in crossings))

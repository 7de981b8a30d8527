"""What a compiled step sends, in a few figures: bytes by kind of collective, and the share that arrives beside compute."""

from __future__ import annotations

from . import GIB
from .overlap import Crossing, crossings
from .transfers import received, transfers


def communication(text: str, devices: int) -> dict[str, dict[str, float]]:
    """The figures of each kind of collective, for one step and the device that receives most.

    Args:
      text: the compiled step, as `compiled.as_text()` gives it.

    Returns:
      kind -> `times` that a collective of this kind runs, `received_gib`, and `hidden`: the share of the results' bytes that
      arrive while a kernel or a matrix product runs.
    """
    moved, under_way = transfers(text, devices), crossings(text)
    return {
        kind: {
            "times": sum(transfer.times for transfer in moved if transfer.kind == kind),
            "received_gib": float(received(moved, kind).max()) / GIB,
            "hidden": _hidden_share([crossing for crossing in under_way if crossing.kind == kind]),
        }
        for kind in sorted({transfer.kind for transfer in moved})
    }


def _hidden_share(crossings: list[Crossing]) -> float:
    """The share of the results' bytes that arrive behind a kernel or a matrix product; 0 where nothing arrives."""
    hidden = sum(
        crossing.nbytes * crossing.times
        for crossing in crossings
        if crossing.kernels or crossing.products
    )
    return hidden / max(1.0, sum(crossing.nbytes * crossing.times for crossing in crossings))

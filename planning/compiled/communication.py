"""Summarizes what a compiled step sends: bytes by collective, and the share hidden by compute."""

from __future__ import annotations

from . import GIB
from .overlap import Crossing, crossings
from .transfers import received, transfers


def communication(text: str, devices: int) -> dict[str, dict[str, float]]:
    """Figures of each kind of collective, for one step on the device that receives most.

    Args:
      text: of the compiled step, `compiled.as_text()`.

    Returns:
      kind -> `times` it runs, `received_gib`, and `hidden`: the share of the received bytes that
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
    """The share of received bytes that a kernel or a matrix product hides; 0 if there are none."""
    hidden = sum(
        crossing.nbytes * crossing.times
        for crossing in crossings
        if crossing.kernels or crossing.products
    )
    return hidden / max(1.0, sum(crossing.nbytes * crossing.times for crossing in crossings))

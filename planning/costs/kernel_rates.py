"""The rates of this project's TPU kernels, from the bundles that the TPU's compiler makes of a tile.

The table beside this file is written by `python -m scripts.benchmarks.kernel_cycles`. A bundle takes one cycle where nothing
waits; a tile takes at least as many cycles as its products keep the matrix units busy.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

TABLE = Path(__file__).with_name("kernel_cycles.json")
# Matrix products of a tile. Two backward kernels both compute scores and dP again: three products for dQ, four for dK and dV.
# One for all, as FlashAttention-2's in the papers' systems and ours on most TPUs, has five.
FORWARD_PRODUCTS, TWO_BACKWARD_KERNELS, ONE_BACKWARD_KERNEL = 2, 7, 5
PRODUCTS = {"forward": FORWARD_PRODUCTS, "backward": ONE_BACKWARD_KERNEL}


@dataclasses.dataclass(frozen=True)
class MatrixUnits:
    """The matrix units of a TPU's core.

    Attributes:
      count: how many.
      size: rows and columns of each, which heads of fewer numbers fill in part.
      rows: rows of bfloat16 that each takes in a cycle.
    """

    count: int
    size: int
    rows: int = 1

    def filled(self, head_dim: int) -> float:
        """The share of a unit that an attention kernel's products use: all have the head size on one side."""
        return min(1.0, head_dim / self.size)

    def cycles(self, flops: float, head_dim: int) -> float:
        """Cycles in which so many FLOPs of an attention kernel keep all units busy."""
        return flops / (2 * self.rows * self.count * self.size**2 * self.filled(head_dim))


@functools.cache
def _table() -> dict:
    return json.loads(TABLE.read_text())


def kernel_rates(generation: str, units: MatrixUnits) -> tuple[float, float] | None:
    """The shares of the matrix units' time that our forward and backward kernels use on a tile without a mask.

    What waits for memory or for other units is not counted, nor is the work between tiles: upper bounds. None for a generation
    whose bundles are not in the table.
    """
    table = _table()
    if generation not in table["bundles"]:
        return None

    def rate(direction: str) -> float:
        flops = PRODUCTS[direction] * 2 * table["tile"] ** 2 * table["head_dim"]
        busy = units.cycles(flops, table["head_dim"])
        return busy / max(busy, table["bundles"][generation][direction])

    return rate("forward"), rate("backward")

"""The rates of this project's TPU kernels, from the compiler's bundles per tile.

`python -m scripts.benchmarks.kernel_cycles` writes the table next to this file. A bundle takes one
cycle if nothing waits; a tile takes at least as many cycles as its products keep the matrix units
busy.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

TABLE = Path(__file__).with_name("kernel_cycles.json")
# Matrix products of a tile. Two backward kernels both recompute scores and dP: three products for
# dQ, four for dK and dV. A single one, as in FlashAttention-2 (the papers' systems) and ours on
# most TPUs, has five.
FORWARD_PRODUCTS, TWO_BACKWARD_KERNELS, ONE_BACKWARD_KERNEL = 2, 7, 5
PRODUCTS = {"forward": FORWARD_PRODUCTS, "backward": ONE_BACKWARD_KERNEL}


@dataclasses.dataclass(frozen=True)
class MatrixUnits:
    """The matrix units of a TPU's core.

    Attributes:
      count: how many.
      size: rows and columns of each; smaller heads fill it in part.
      rows: bfloat16 rows that each takes per cycle.
    """

    count: int
    size: int
    rows: int = 1

    def filled(self, head_dim: int) -> float:
        """The share of a unit that attention's products use; the head size is one side of all."""
        return min(1.0, head_dim / self.size)

    def cycles(self, flops: float, head_dim: int) -> float:
        """The cycles for which `flops` of an attention kernel keep all units busy."""
        return flops / (2 * self.rows * self.count * self.size**2 * self.filled(head_dim))


@functools.cache
def _table() -> dict:
    return json.loads(TABLE.read_text())


def kernel_rates(generation: str, units: MatrixUnits) -> tuple[float, float] | None:
    """The matrix units' utilization by our forward and backward kernels on an unmasked tile.

    Upper bounds: waits for memory and other units, and the work between tiles, are not counted.
    None for a generation that the table lacks.
    """
    table = _table()
    if generation not in table["bundles"]:
        return None

    def rate(direction: str) -> float:
        flops = PRODUCTS[direction] * 2 * table["tile"] ** 2 * table["head_dim"]
        busy = units.cycles(flops, table["head_dim"])
        return busy / max(busy, table["bundles"][generation][direction])

    return rate("forward"), rate("backward")

"""Predicts every row of the papers with the cost model, planning.costs.

Rows that depend on a constant set after they had been seen name it (`Row.afterwards`). Misses are
printed with their size and likely reason.
"""

from __future__ import annotations

import dataclasses
import functools

from scripts.benchmarks.papers.attention2d import attention2d
from scripts.benchmarks.papers.distflashattn import distflashattn
from scripts.benchmarks.papers.ring_attention import ring_attention
from scripts.benchmarks.papers.row import Row
from scripts.benchmarks.papers.striped_attention import striped_attention

# Rows of DistFlashAttn without a job of `_distflash`: counts, or only another system.
_WITHOUT_PARTIALS = ("Appendix C", "Equation 2", "Section 3.3")


@functools.cache
def every_row() -> tuple[Row, ...]:
    """Returns the rows of all papers."""
    rows = (*ring_attention(), *striped_attention(), *distflashattn(), *attention2d())
    return tuple(dataclasses.replace(row, afterwards=_set_afterwards(row)) for row in rows)


def _set_afterwards(row: Row) -> str:
    """Returns the constants that affect a row and were set after it had been seen, or ""."""
    if row.source == "Attention2D":
        return "flow and uplink of both Ethernets (planning/costs/hardware.py)"
    if (
        row.source != "DistFlashAttn"
        or row.table in _WITHOUT_PARTIALS
        or "expected speed-up" in row.label
    ):
        return ""
    partials = "partial results in float16"
    if row.table == "Table 3" and "DistFlashAttn" not in row.label:
        return "SCORE_PASSES" if "Ring Self-Attention" in row.label else f"SCORE_PASSES; {partials}"
    return "" if row.label.startswith(("Megatron-LM", "DeepSpeed-Ulysses")) else partials

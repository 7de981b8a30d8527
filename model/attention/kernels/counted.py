"""The XLA kernel, reporting each tile that it computes while the program runs: for measuring how
balanced the work is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
from jax import lax

from .kernel import Kernel
from .xla import XlaKernel


@dataclasses.dataclass(frozen=True)
class CountedKernel(XlaKernel):
    """Calls `report(rank, query, key)` on the host for each tile that is computed, forward or
    backward.

    rank is the index on the mesh axis `axis`; query and key are the coordinate `index` of the
    tile's first query and first key in the first row of the batch. A skipped tile is never
    reported, because the call stands where the scores are computed.
    """

    report: Callable[..., None] | None = None
    axis: str = "sequence"

    def _scores(self, q, k, q_coords, kv_coords, *options):
        assert self.report is not None
        jax.debug.callback(
            self.report, lax.axis_index(self.axis), q_coords.index[0, 0], kv_coords.index[0, 0]
        )
        return super()._scores(q, k, q_coords, kv_coords, *options)


def counted_kernel(report: Callable[..., None], query_tile: int, key_tile: int) -> Kernel:
    """The kernel that calls `report` for each tile; see CountedKernel."""
    return CountedKernel(query_tile, key_tile, report)

"""Local attention: nothing travels, one round. Vanilla, memory-efficient or blockwise attention, as the kernel is."""
from __future__ import annotations

import dataclasses

from ..coords import Mask
from . import plan
from .schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Local(Schedule):
    """All keys are here already (sequence axis of 1)."""

    def forward(self, kernel, q, k, v, q_coords, kv_coords, *, ranks, mask, scale):
        del ranks
        return kernel.forward(q, k, v, q_coords, kv_coords, mask=mask, scale=scale)

    def backward(self, kernel, q, k, v, dout, lse, delta, q_coords, kv_coords, *, ranks, mask, scale):
        del ranks
        return kernel.backward(q, k, v, dout, lse, delta, q_coords, kv_coords, mask=mask, scale=scale)

    def check(self, size: int) -> None:
        if size > 1:
            raise ValueError(f"schedule: 'local' serves 1 rank, found {size}, and would leave out the others' keys; 'ring' and "
                             "'all_gather' serve any")

    def plan(self, size: int, block: plan.Block, mask: Mask = Mask()) -> plan.Plan:
        del block, mask
        alone = (plan.Round(tuple(plan.Task(rank, (rank,), (rank,)) for rank in range(size))),)
        return plan.Plan(alone, alone)

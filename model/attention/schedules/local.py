"""Local attention on a single rank: nothing travels."""

from __future__ import annotations

import dataclasses

from ..blocks import BackwardInputs, Gradients, Keys, Queries
from ..coords import Mask
from ..kernels.kernel import Kernel
from ..partial import AttentionPartial
from . import plan
from .schedule import Context, Schedule


@dataclasses.dataclass(frozen=True)
class Local(Schedule):
    """One call of the kernel: vanilla, memory-efficient or blockwise attention, depending on the
    kernel."""

    def forward(
        self, kernel: Kernel, queries: Queries, keys: Keys, context: Context
    ) -> AttentionPartial:
        forward = kernel.rounded_forward if context.rounded else kernel.forward
        return forward(queries, keys, **context.scores)

    def backward(
        self, kernel: Kernel, queries: Queries, keys: Keys, saved: BackwardInputs, context: Context
    ) -> Gradients:
        return kernel.backward(queries, keys, saved, **context.scores)

    def check(self, size: int) -> None:
        if size > 1:
            raise ValueError(
                f"schedule: 'local' serves 1 rank, found {size}; it would ignore the others' "
                "keys; 'ring' and 'all_gather' serve any"
            )

    def plan(self, size: int, block: plan.Block, mask: Mask = Mask()) -> plan.Plan:
        del block, mask
        own_blocks = (plan.Round(tuple(plan.Task(rank, (rank,), (rank,)) for rank in range(size))),)
        return plan.Plan(own_blocks, own_blocks)

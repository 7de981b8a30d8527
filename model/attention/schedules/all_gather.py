"""All-gather attention (Llama 3, section 3.3.2; Megatron's all-gather context parallelism): one
round with all keys.

Forward: each rank receives K and V of the P - 1 others, 2 (P - 1) T Hkv D numbers, and their
coordinates, 2 (P - 1) T numbers, then calls the kernel once over all P T keys. Backward: the same
gather again, because the gathered K and V are not kept, and after the kernel one reduce-scatter of
dK and dV in float32, 2 (P - 1) T Hkv D numbers.

The bytes equal a ring's, but no kernel hides the transfers, and each device holds K and V of the
whole sequence. With few key heads that is little, which makes this a strong simple baseline.
"""

from __future__ import annotations

import dataclasses

from ..blocks import BackwardInputs, Gradients, Keys, Queries, StackedKeys
from ..coords import Mask
from ..kernels.kernel import Kernel
from ..partial import AttentionPartial
from . import plan
from .ranks import Ranks
from .schedule import Context, Schedule


@dataclasses.dataclass(frozen=True)
class AllGather(Schedule):
    """Gathers the K and V of all ranks on each rank, once per pass."""

    def forward(
        self, kernel: Kernel, queries: Queries, keys: Keys, context: Context
    ) -> AttentionPartial:
        kernel = kernel.over_shards(1, context.ranks.size)
        return kernel.extend(None, queries, _gather(keys, context.ranks), **context.scores)

    def backward(
        self, kernel: Kernel, queries: Queries, keys: Keys, saved: BackwardInputs, context: Context
    ) -> Gradients:
        kernel = kernel.over_shards(1, context.ranks.size)
        dq, dkv = kernel.gradients(
            None, queries, _gather(keys, context.ranks), saved, **context.scores
        )
        # dK and dV separately: for a stack the TPU compiler emits an all-reduce, which moves twice
        # the bytes.
        return Gradients(dq, *context.ranks.reduce_scatter(tuple(dkv), 1))

    def plan(self, size: int, block: plan.Block, mask: Mask = Mask()) -> plan.Plan:
        del mask
        pairs = plan.everyone([range(size)])
        gather = plan.Round(
            (),
            (
                plan.Send("K, V", plan.GATHER, block.keys, pairs),
                plan.Send("coordinates", plan.GATHER, block.coords, pairs),
            ),
        )
        tasks = tuple(plan.Task(rank, (rank,), tuple(range(size))) for rank in range(size))
        scatter = plan.Send("dK, dV", plan.SCATTER, block.key_gradients, pairs)
        return plan.Plan((gather, plan.Round(tasks)), (gather, plan.Round(tasks, (scatter,))))


def _gather(keys: Keys, ranks: Ranks) -> StackedKeys:
    """The keys of all ranks, in the order of the ranks."""
    kv, coords = keys.stacked()
    return StackedKeys(ranks.gather(kv, 2), ranks.gather(coords, 1))

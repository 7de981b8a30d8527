"""All keys at once (Llama 3, section 3.3.2; Megatron's all-gather context parallelism): one round, one kernel.

Forward: each shard receives the K and V of the P - 1 others, 2 (P - 1) T Hkv D numbers, and their 2 (P - 1) T
coordinates, and computes once over all P T keys. Backward: the same gather again (the whole K and V are not kept), then
one reduce-scatter of the float32 dK and dV, 2 (P - 1) T Hkv D numbers. As many bytes as the ring, in one transfer that no
kernel hides, and K and V of the whole sequence lie on each device: little with grouped heads, which makes this the strong
simple baseline.
"""
from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from ..coords import Mask
from . import plan
from .schedule import Schedule


def _gathered(k, v, coords, ranks):
    """K and V stacked [2, B, P T, Hkv, D] and coordinates [B, P T] of all shards, in the order of their ranks."""
    return ranks.gather(jnp.stack([k, v]), 2), ranks.gather(coords, 1)


@dataclasses.dataclass(frozen=True)
class AllGather(Schedule):
    """K/V of all shards on each, once per pass."""

    def forward(self, kernel, q, k, v, q_coords, kv_coords, *, ranks, mask, scale):
        kv, kv_coords = _gathered(k, v, kv_coords, ranks)
        return kernel.extend(None, q, kv, q_coords, kv_coords, mask=mask, scale=scale)

    def backward(self, kernel, q, k, v, dout, lse, delta, q_coords, kv_coords, *, ranks, mask, scale):
        kv, kv_coords = _gathered(k, v, kv_coords, ranks)
        dq, dkv = kernel.gradients(None, q, kv, dout, lse, delta, q_coords, kv_coords, mask=mask, scale=scale)
        # Apart, not stacked: of a stack the TPU's compiler makes an all-reduce, twice the bytes.
        return dq, *ranks.add_scatter(tuple(dkv), 1)

    def plan(self, size: int, block: plan.Block, mask: Mask = Mask()) -> plan.Plan:
        del mask
        pairs = plan.everyone([range(size)])
        gather = plan.Round((), (plan.Send("K, V", plan.GATHER, block.keys, pairs),
                                 plan.Send("coordinates", plan.GATHER, block.coords, pairs)))
        tasks = tuple(plan.Task(rank, (rank,), tuple(range(size))) for rank in range(size))
        back = plan.Send("dK, dV", plan.SCATTER, block.key_gradients, pairs)
        return plan.Plan((gather, plan.Round(tasks)), (gather, plan.Round(tasks, (back,))))

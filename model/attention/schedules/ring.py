"""Ring attention (Ring Attention, section 3): K, V and their coordinates go round, P - 1 hops in P rounds.

Forward: each shard receives 2 T Hkv D numbers and 2 T coordinates a hop, P - 1 times. Backward: the same, and the float32
dK, dV follow one hop behind, P - 1 times, with one more hop home. With the layout `striped` this is Striped Attention.

Every round sends *before* it computes, so the transfer overlaps the kernel, and the last round sends nothing. dK/dV of a
block leave for the next shard while that shard's kernel runs, and are added to its result afterwards: no transfer waits
for the kernel that has just started. The first and the last round are peeled, the others are a scan, so that the
compiled text does not grow with P.
"""
from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax

from ..partial import merge
from . import plan


@dataclasses.dataclass(frozen=True)
class Ring:
    """K/V round the ring, one direction."""

    def forward(self, kernel, q, k, v, q_coords, kv_coords, *, ranks, mask, scale):
        def attend(block):
            (k, v), coords = block
            return kernel.forward(q, k, v, q_coords, coords, mask=mask, scale=scale)

        block = (jnp.stack([k, v]), kv_coords)
        incoming = ranks.shift(block)
        partial = attend(block)

        def one_round(carry, _):
            partial, block = carry
            incoming = ranks.shift(block)
            return (merge(partial, attend(block)), incoming), None

        (partial, block), _ = lax.scan(one_round, (partial, incoming), None, length=ranks.size - 2)
        return merge(partial, attend(block))

    def backward(self, kernel, q, k, v, dout, lse, delta, q_coords, kv_coords, *, ranks, mask, scale):
        def gradients(block):
            (k, v), coords = block
            dq, dk, dv = kernel.backward(q, k, v, dout, lse, delta, q_coords, coords, mask=mask, scale=scale)
            return dq, jnp.stack([dk, dv])

        block = (jnp.stack([k, v]), kv_coords)
        incoming = ranks.shift(block)
        dq, dkv = gradients(block)

        def one_round(carry, _):
            dq, dkv, block = carry
            incoming = ranks.shift(block)
            arriving = ranks.shift(dkv)
            dq_here, dkv_here = gradients(block)
            return (dq + dq_here, arriving + dkv_here, incoming), None

        (dq, dkv, block), _ = lax.scan(one_round, (dq, dkv, incoming), None, length=ranks.size - 2)
        arriving = ranks.shift(dkv)
        dq_here, dkv_here = gradients(block)
        dk, dv = ranks.shift(arriving + dkv_here)
        return dq + dq_here, dk, dv

    def plan(self, size: int, block: plan.Block) -> plan.Plan:
        on = plan.shift(size)
        keys = (plan.Send("K, V", plan.PERMUTE, block.keys, on), plan.Send("coordinates", plan.PERMUTE, block.coords, on))
        gradients = plan.Send("dK, dV", plan.PERMUTE, block.key_gradients, on)
        forward, backward = [], []
        for hop in range(size):
            tasks = tuple(plan.Task(rank, (rank,), ((rank - hop) % size,)) for rank in range(size))
            sends = keys if hop < size - 1 else ()
            forward.append(plan.Round(tasks, sends))
            backward.append(plan.Round(tasks, (*sends, gradients) if hop else sends))
        home = plan.Round((), (gradients._replace(what="dK, dV home"),))
        return plan.Plan(tuple(forward), (*backward, home))

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


@dataclasses.dataclass(frozen=True)
class Ring:
    """K/V round the ring, one direction."""

    def forward(self, kernel, q, k, v, q_coords, kv_coords, *, ranks, mask, scale):
        def attend(partial, block):
            kv, coords = block
            return kernel.extend(partial, q, kv, q_coords, coords, mask=mask, scale=scale)

        block = (jnp.stack([k, v]), kv_coords)
        incoming = ranks.shift(block)
        partial = attend(None, block)

        def one_round(carry, _):
            partial, block = carry
            incoming = ranks.shift(block)
            return (attend(partial, block), incoming), None

        (partial, block), _ = lax.scan(one_round, (partial, incoming), None, length=ranks.size - 2)
        return attend(partial, block)

    def backward(self, kernel, q, k, v, dout, lse, delta, q_coords, kv_coords, *, ranks, mask, scale):
        def gradients(dq, block):
            kv, coords = block
            return kernel.gradients(dq, q, kv, dout, lse, delta, q_coords, coords, mask=mask, scale=scale)

        block = (jnp.stack([k, v]), kv_coords)
        incoming = ranks.shift(block)
        dq, dkv = gradients(None, block)

        def one_round(carry, _):
            dq, dkv, block = carry
            incoming = ranks.shift(block)
            arriving = ranks.shift(dkv)
            dq, dkv_here = gradients(dq, block)
            return (dq, arriving + dkv_here, incoming), None

        (dq, dkv, block), _ = lax.scan(one_round, (dq, dkv, incoming), None, length=ranks.size - 2)
        arriving = ranks.shift(dkv)
        dq, dkv_here = gradients(dq, block)
        dk, dv = ranks.shift(arriving + dkv_here)
        return dq, dk, dv

"""The dense kernel: all scores at once, in float32. Slow and plain; the judge of the others."""
from __future__ import annotations

import jax
import jax.numpy as jnp

from ..coords import Mask, TokenCoords, visible
from ..partial import AttentionPartial


def _grouped(x: jax.Array, kv_heads: int) -> jax.Array:
    """[B, T, Hq, D] -> float32 [B, Hkv, G, T, D]."""
    batch, length, heads, head_dim = x.shape
    x = x.astype(jnp.float32).reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    return x.transpose(0, 2, 3, 1, 4)


def _ungrouped(x: jax.Array) -> jax.Array:
    batch, kv_heads, group, length, head_dim = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(batch, length, kv_heads * group, head_dim)


def _scores(q, k, q_coords, kv_coords, mask, scale):
    seen = visible(q_coords, kv_coords, mask)[:, None, None]
    scores = jnp.einsum("bhgqd,bkhd->bhgqk", q, k.astype(jnp.float32), precision="highest") * scale
    return jnp.where(seen, scores, -jnp.inf)


def forward(q, k, v, q_coords: TokenCoords, kv_coords: TokenCoords, *, mask: Mask, scale: float) -> AttentionPartial:
    """Attention of one block of queries over one block of keys; see the package's docstring for shapes."""
    batch, length, heads, _ = q.shape
    scores = _scores(_grouped(q, k.shape[2]), k, q_coords, kv_coords, mask, scale)
    top = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(top), 0.0, top))
    total = weights.sum(-1, keepdims=True)
    safe = jnp.where(total == 0, 1.0, total)
    out = jnp.einsum("bhgqk,bkhd->bhgqd", weights / safe, v.astype(jnp.float32), precision="highest")
    lse = jnp.where(total == 0, -jnp.inf, top + jnp.log(safe))
    return AttentionPartial(_ungrouped(out), lse.reshape(batch, heads, length))


def backward(q, k, v, dout, lse, delta, q_coords, kv_coords, *, mask: Mask, scale: float):
    """Gradients of q, k and v from the merged `lse` and `delta`: float32, shaped like q, k, v."""
    batch, length, heads, _ = q.shape
    kv_heads = k.shape[2]
    q_, dout_ = _grouped(q, kv_heads), _grouped(dout, kv_heads)
    lse, delta = (x.reshape(batch, kv_heads, heads // kv_heads, length, 1) for x in (lse, delta))
    scores = _scores(q_, k, q_coords, kv_coords, mask, scale)
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(lse), 0.0, lse))
    dweights = jnp.einsum("bhgqd,bkhd->bhgqk", dout_, v.astype(jnp.float32), precision="highest")
    dscores = weights * (dweights - delta) * scale
    dq = jnp.einsum("bhgqk,bkhd->bhgqd", dscores, k.astype(jnp.float32), precision="highest")
    dk = jnp.einsum("bhgqk,bhgqd->bkhd", dscores, q_, precision="highest")
    dv = jnp.einsum("bhgqk,bhgqd->bkhd", weights, dout_, precision="highest")
    return _ungrouped(dq), dk, dv

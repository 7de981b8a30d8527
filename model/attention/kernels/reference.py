"""The reference kernel: dense attention that materializes all scores. The other kernels are tested
against it.

    S = scale Q K^T, masked scores = -inf          dV = P^T dO
    P = exp(S - lse)                               dP = dO V^T
    O = P V                                        dS = P * (dP - delta)
                                                   dQ = scale dS K,  dK = scale dS^T Q

All in float32, with the G = Hq / Hkv query heads that share a key head along a separate axis.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..blocks import BackwardInputs, Gradients, Keys, Queries
from ..coords import Mask, visible
from ..partial import AttentionPartial
from .kernel import Kernel
from .softcap import capped, with_slope


@dataclasses.dataclass(frozen=True)
class ReferenceKernel(Kernel):
    """Dense attention in float32."""

    def forward(
        self, queries: Queries, keys: Keys, *, mask: Mask, scale: float
    ) -> AttentionPartial:
        batch, length, heads, _ = queries.q.shape
        scores = self._scores(group_heads(queries.q, keys.k.shape[2]), queries, keys, mask, scale)
        highest = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - jnp.where(jnp.isneginf(highest), 0.0, highest))
        total = weights.sum(-1, keepdims=True)
        nonzero = jnp.where(total == 0, 1.0, total)
        out = jnp.einsum(
            "bhgqk,bkhd->bhgqd", weights / nonzero, keys.v.astype(jnp.float32), precision="highest"
        )
        lse = jnp.where(total == 0, -jnp.inf, highest + jnp.log(nonzero))
        return AttentionPartial(_ungroup_heads(out), lse.reshape(batch, heads, length))

    def backward(
        self, queries: Queries, keys: Keys, saved: BackwardInputs, *, mask: Mask, scale: float
    ) -> Gradients:
        batch, length, heads, _ = queries.q.shape
        kv_heads = keys.k.shape[2]
        q, dout = group_heads(queries.q, kv_heads), group_heads(saved.dout, kv_heads)
        lse, delta = (
            x.reshape(batch, kv_heads, heads // kv_heads, length, 1)
            for x in (saved.lse, saved.delta)
        )
        scores = self._scores(q, queries, keys, mask, scale)
        weights = jnp.exp(scores - jnp.where(jnp.isneginf(lse), 0.0, lse))
        dweights = jnp.einsum(
            "bhgqd,bkhd->bhgqk", dout, keys.v.astype(jnp.float32), precision="highest"
        )
        dscores = with_slope(weights * (dweights - delta), scores, self.softcap) * scale
        dq = jnp.einsum(
            "bhgqk,bkhd->bhgqd", dscores, keys.k.astype(jnp.float32), precision="highest"
        )
        dk = jnp.einsum("bhgqk,bhgqd->bkhd", dscores, q, precision="highest")
        dv = jnp.einsum("bhgqk,bhgqd->bkhd", weights, dout, precision="highest")
        return Gradients(_ungroup_heads(dq), dk, dv)

    def _scores(
        self,
        q: Float[Array, "B Hkv G Tq D"],
        queries: Queries,
        keys: Keys,
        mask: Mask,
        scale: float,
    ) -> Float[Array, "B Hkv G Tq Tk"]:
        """Returns the scaled scores of the grouped queries `q`; -inf where the query does not see
        the key."""
        seen = visible(queries.coords, keys.coords, mask)[:, None, None]
        k = keys.k.astype(jnp.float32)
        # Decoding one token: this product reads the keys in place; the other transposes them.
        if q.shape[3] == 1:
            scores = (
                jnp.einsum("bkhd,bhgqd->bhkgq", k, q, precision="highest").transpose(0, 1, 3, 4, 2)
                * scale
            )
        else:
            scores = jnp.einsum("bhgqd,bkhd->bhgqk", q, k, precision="highest") * scale
        return jnp.where(seen, capped(scores, self.softcap), -jnp.inf)


def group_heads(x: Float[Array, "B T Hq D"], kv_heads: int) -> Float[Array, "B Hkv G T D"]:
    """Groups the heads that share a key head, in float32; the groups come before the tokens."""
    batch, length, heads, head_dim = x.shape
    x = x.astype(jnp.float32).reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    return x.transpose(0, 2, 3, 1, 4)


def _ungroup_heads(x: Float[Array, "B Hkv G T D"]) -> Float[Array, "B T Hq D"]:
    batch, kv_heads, group, length, head_dim = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(batch, length, kv_heads * group, head_dim)

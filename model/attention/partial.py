"""Partial attention: attention over some of the keys, and the merge of two such results
(Attention2D, section 3.1)."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class AttentionPartial(NamedTuple):
    """Attention of queries over some of the keys.

    Attributes:
      out: float32, normalised over these keys; 0 for a query that sees none of them.
      lse: float32, natural logarithm of the sum of exponentiated scores; -inf for a query that sees
        none.
    """

    out: Float[Array, "B T Hq D"]
    lse: Float[Array, "B Hq T"]


def merge(a: AttentionPartial, b: AttentionPartial) -> AttentionPartial:
    """Attention over the keys of both; associative and commutative up to rounding.

    The larger lse is subtracted before exponentiating, because exp(b - a) may overflow; and where
    both are -inf, 0 is subtracted, because -inf - -inf is NaN.
    """
    highest = jnp.maximum(a.lse, b.lse)
    highest = jnp.where(jnp.isneginf(highest), 0.0, highest)
    weight_a, weight_b = jnp.exp(a.lse - highest), jnp.exp(b.lse - highest)
    total = weight_a + weight_b
    nonzero = jnp.where(total == 0, 1.0, total)
    out = a.out * per_row(weight_a / nonzero) + b.out * per_row(weight_b / nonzero)
    return AttentionPartial(out, jnp.where(total == 0, -jnp.inf, highest + jnp.log(nonzero)))


def per_row(x: Float[Array, "B H T"]) -> Float[Array, "B T H 1"]:
    """Statistics of rows of scores, in a shape that multiplies outputs."""
    return x.swapaxes(1, 2)[..., None]

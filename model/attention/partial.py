"""Partial attention: attention over some of the keys, the merge of two such results (Attention2D,
section 3.1), and attention sinks."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class AttentionPartial(NamedTuple):
    """Attention of queries over some of the keys.

    Attributes:
      out: normalised over these keys; 0 for a query that sees none. float32, unless it is complete
        and already rounded to the dtype of the queries.
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


def with_sinks(partial: AttentionPartial, sinks: Float[Array, " Hq"] | None) -> AttentionPartial:
    """Returns attention with a learnt score per head in the softmax denominators; unchanged without
    sinks.

    A sink is one more key, with value 0: lse counts it, and out shrinks accordingly. The gradients
    of q, k and v follow from this out and lse as usual. A query that sees no key keeps its lse of
    -inf.
    """
    if sinks is None:
        return partial
    left = jax.nn.sigmoid(partial.lse - sinks[:, None])
    lse = jnp.logaddexp(partial.lse, sinks[:, None])
    return AttentionPartial(
        partial.out * per_row(left), jnp.where(jnp.isneginf(partial.lse), -jnp.inf, lse)
    )


def per_row(x: Float[Array, "B H T"]) -> Float[Array, "B T H 1"]:
    """Statistics of rows of scores, in a shape that multiplies outputs."""
    return x.swapaxes(1, 2)[..., None]

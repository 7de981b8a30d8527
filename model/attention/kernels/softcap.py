"""The soft-cap of scores (Gemma 2): cap * tanh(score / cap), so that no score is beyond the cap."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def capped(scores: jax.Array, cap: float | None) -> jax.Array:
    """The scores within -cap .. cap; themselves without a cap."""
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def with_slope(dscores: jax.Array, scores: jax.Array, cap: float | None) -> jax.Array:
    """The gradient of the scores before the cap, from that of the capped ones.

    Args:
      scores: capped; those that a mask hides may be -inf, where `dscores` is 0 and stays so.
    """
    return (
        dscores
        if cap is None
        else dscores * jnp.where(jnp.isneginf(scores), 0.0, 1.0 - jnp.square(scores / cap))
    )

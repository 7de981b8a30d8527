"""The soft-cap of scores (Gemma 2): cap * tanh(score / cap), which keeps them within the cap."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def capped(scores: jax.Array, cap: float | None) -> jax.Array:
    """Returns the scores capped to -cap .. cap; unchanged if `cap` is None."""
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def with_slope(dscores: jax.Array, scores: jax.Array, cap: float | None) -> jax.Array:
    """Returns the gradient of the scores before the cap, from that of the capped scores.

    Args:
      scores: capped; masked scores may be -inf, where `dscores` is 0 and stays 0.
    """
    return (
        dscores
        if cap is None
        else dscores * jnp.where(jnp.isneginf(scores), 0.0, 1.0 - jnp.square(scores / cap))
    )

"""Cross-entropy of one chunk of tokens, with the vocabulary split over the tensor axis."""
from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .sharding import Parallel


def token_losses(logits: jax.Array, targets: jax.Array, parallel: Parallel) -> jax.Array:
    """-log p(target), float32 [B, c].

    Args:
      logits: [B, c, V], or this tensor rank's part of the vocabulary [B, c, V / tensor].
      targets: int32 [B, c], ids in the whole vocabulary.
    """
    logits = logits.astype(jnp.float32)
    split = parallel.tensor > 1
    top = lax.stop_gradient(logits.max(-1))
    if split:
        # pmax has no derivative, and needs none: the maximum cancels. Stop it before and after.
        top = lax.stop_gradient(_maximum_over_tensor(top))
        targets = targets - parallel.rank() * logits.shape[-1]
    total = parallel.sum(jnp.exp(logits - top[..., None]).sum(-1), "vocab")
    here = (targets >= 0) & (targets < logits.shape[-1])
    chosen = jnp.take_along_axis(logits, jnp.where(here, targets, 0)[..., None], -1)[..., 0]
    chosen = parallel.sum(jnp.where(here, chosen, 0.0), "vocab")
    return top + jnp.log(total) - chosen


@jax.custom_vjp
def _maximum_over_tensor(x):
    return lax.pmax(x, "tensor")


_maximum_over_tensor.defvjp(lambda x: (_maximum_over_tensor(x), None), lambda _, dy: (jnp.zeros_like(dy),))

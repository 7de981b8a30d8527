"""Attention over a part of the keys, and how two parts become one."""
from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class AttentionPartial(NamedTuple):
    """Attention of queries over some of their keys.

    Attributes:
      out: float32 [B, T, Hq, D], normalised over the keys seen so far; 0 where none was seen.
      lse: float32 [B, Hq, T], natural logarithm of the sum of exponentiated scores; -inf where no key was seen.
    """

    out: jax.Array
    lse: jax.Array


def empty(batch: int, length: int, heads: int, head_dim: int) -> AttentionPartial:
    """Attention over no keys: merging it changes nothing."""
    return AttentionPartial(
        jnp.zeros((batch, length, heads, head_dim), jnp.float32),
        jnp.full((batch, heads, length), -jnp.inf, jnp.float32),
    )


def merge(a: AttentionPartial, b: AttentionPartial) -> AttentionPartial:
    """Attention over the keys of both: associative and commutative to rounding; two empty parts stay empty.

    The larger lse is subtracted before exponentiating (log(1 + exp(b - a)) overflows), and an lse of -inf on both sides
    is replaced by 0 before subtracting (else -inf - -inf is NaN).
    """
    top = jnp.maximum(a.lse, b.lse)
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    weight_a, weight_b = jnp.exp(a.lse - top), jnp.exp(b.lse - top)
    total = weight_a + weight_b
    safe = jnp.where(total == 0, 1.0, total)
    out = a.out * per_row(weight_a / safe) + b.out * per_row(weight_b / safe)
    return AttentionPartial(out, jnp.where(total == 0, -jnp.inf, top + jnp.log(safe)))


def per_row(x: jax.Array) -> jax.Array:
    """[B, H, T] -> [B, T, H, 1]: statistics of rows, to be multiplied with outputs."""
    return x.swapaxes(1, 2)[..., None]

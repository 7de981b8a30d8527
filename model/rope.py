"""Rotary position embedding: Hugging Face's half-rotation, with the rules `default` and `llama3`."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Angle per position of each pair of channels: float32 [head_dim / 2], fastest first.

    Follows transformers' modeling_rope_utils operation by operation in float32. That matters: at position 131071 one
    unit in the last place of the fastest frequency is 0.008 radians: a more exact table would be a *different* model.
    Raises ValueError for an odd head_dim.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim: {head_dim} is odd; rotary embedding turns halves, so it must be even")
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # The power is taken in float64 and rounded once: float32 pow differs between libraries in the last place.
    power = np.power(np.float64(rope.theta), exponent.astype(np.float64)).astype(np.float32)
    frequencies = (np.float32(1.0) / power).astype(np.float32)
    if rope.rule == "default":
        return frequencies
    # llama3: slow channels (long wavelengths) are slowed by `factor`, fast ones kept, those between blended.
    factor, low, high = (np.float32(x) for x in (rope.factor, rope.low_freq_factor, rope.high_freq_factor))
    original = np.float32(rope.original_max_position_embeddings)
    wavelength = (np.float32(2 * math.pi) / frequencies).astype(np.float32)
    slowed = np.where(wavelength > np.float32(original / low), frequencies / factor, frequencies)
    smooth = (original / wavelength - low) / np.float32(high - low)
    blended = (np.float32(1) - smooth) * slowed / factor + smooth * slowed
    between = ~(wavelength < np.float32(original / high)) & ~(wavelength > np.float32(original / low))
    return np.where(between, blended, slowed).astype(np.float32)


def apply_rope(x: jax.Array, positions: jax.Array, inverse_frequencies: np.ndarray | jax.Array) -> jax.Array:
    """Turns each head's channel pairs (c, c + D/2) by position times frequency.

    x [B, T, H, D] of any float dtype, positions int32 [B, T], inverse_frequencies float32 [D/2]; gives x's shape and
    dtype. Angles, cosines and the products are float32, and the result is rounded once: bfloat16 cosines would lose the
    fine differences between far positions.
    """
    angles = positions.astype(jnp.float32)[..., None] * jnp.asarray(inverse_frequencies, jnp.float32)  # [B, T, D/2]
    cos, sin = jnp.cos(angles)[:, :, None, :], jnp.sin(angles)[:, :, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)

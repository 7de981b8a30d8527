"""Rotary position embedding: Hugging Face's half-rotation, with the rules default, linear, dynamic,
yarn, llama3 and longrope."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from model.rope_config import RopeConfig

# The longest row that gets transformers' float32 angles, bit for bit: other implementations run
# LLaMAs up to this length.
FLOAT32_LENGTH = 1 << 17


def inverse_frequencies(rope: RopeConfig, head_dim: int, length: int | None = None) -> np.ndarray:
    """Returns the angle per position of each pair of channels, in radians: float32 [head_dim / 2],
    fastest first.

    Follows transformers' modeling_rope_utils operation by operation in float32. That matters: at
    position 131071 one unit in the last place of the fastest frequency is 0.008 radians, so a more
    exact table would be a *different* model. (In long rows the product of position and frequency
    is more exact than transformers'; see `angles`.)

    Args:
      length: tokens in the whole row; only used by the rules `dynamic` and `longrope`. Beyond the
        original length the base grows with it, or the long factors replace the short ones, once for
        the whole row, as in one forward of transformers over `length` positions. It is equal for
        every row, document and shard, so that packing and mesh do not change the embedding.
    """
    theta = _dynamic_theta(rope, head_dim, length) if rope.rule == "dynamic" else rope.theta
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # The power is taken in float64 and rounded once: float32 pow differs between libraries in the
    # last place.
    power = np.power(np.float64(np.float32(theta)), exponent.astype(np.float64)).astype(np.float32)
    frequencies = (np.float32(1.0) / power).astype(np.float32)
    if rope.rule == "linear":
        return frequencies / np.float32(rope.factor)
    if rope.rule == "yarn":
        return _yarn(rope, head_dim, power, frequencies)
    if rope.rule == "llama3":
        return _llama3(rope, frequencies)
    if rope.rule == "longrope":
        beyond = length is not None and length > _number(rope.original_max_position_embeddings)
        factors = np.asarray(rope.long_factor if beyond else rope.short_factor, np.float32)
        return (np.float32(1.0) / (factors * power)).astype(np.float32)
    return frequencies


def attention_scaling(rope: RopeConfig) -> float:
    """Returns the factor of cosine and sine for both queries and keys: the temperature of yarn and
    longrope; 1 for the other rules."""
    if rope.rule not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    factor = _number(rope.factor)
    if rope.rule == "longrope":
        original = _number(rope.original_max_position_embeddings)
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def _number(value: float | None) -> float:
    """A number that the rule needs; no TransformerConfig lacks it."""
    assert value is not None
    return value


def _dynamic_theta(rope: RopeConfig, head_dim: int, length: int | None) -> np.float32:
    """The base of the rule `dynamic` (NTK): a greater one stretches the slowest channels to
    `length` and keeps the fastest."""
    original = _number(rope.original_max_position_embeddings)
    if length is None or length <= original:
        return np.float32(rope.theta)
    factor = _number(rope.factor)
    extension = np.float32(factor) * np.float32(length) / np.float32(original) - np.float32(
        factor - 1
    )
    exponent = np.float64(np.float32(head_dim / (head_dim - 2)))
    return np.float32(rope.theta) * np.power(np.float64(extension), exponent).astype(np.float32)


def _yarn(
    rope: RopeConfig, head_dim: int, power: np.ndarray, frequencies: np.ndarray
) -> np.ndarray:
    """Keeps channels that rotate often within the original length, and slows by `factor` those that
    hardly rotate."""
    original = _number(rope.original_max_position_embeddings)

    def channel(rotations: float) -> float:
        """The channel, as a fraction, that rotates this often within the original length."""
        return (
            head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    low, high = channel(_number(rope.beta_fast)), channel(_number(rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    kept_share = np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))
    slowed = (np.float32(1) / (np.float32(_number(rope.factor)) * power)).astype(np.float32)
    return (slowed * (np.float32(1) - kept_share) + frequencies * kept_share).astype(np.float32)


def _llama3(rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:
    """Slows slow channels (long wavelengths) by `factor`, keeps fast ones, and blends those
    between."""
    factor, low, high = (
        np.float32(_number(x)) for x in (rope.factor, rope.low_freq_factor, rope.high_freq_factor)
    )
    original = np.float32(_number(rope.original_max_position_embeddings))
    wavelength = (np.float32(2 * math.pi) / frequencies).astype(np.float32)
    slowed = np.where(wavelength > np.float32(original / low), frequencies / factor, frequencies)
    smooth = (original / wavelength - low) / np.float32(high - low)
    blended = (np.float32(1) - smooth) * slowed / factor + smooth * slowed
    between = ~(wavelength < np.float32(original / high)) & ~(
        wavelength > np.float32(original / low)
    )
    return np.where(between, blended, slowed).astype(np.float32)


def angles(
    positions: Int[Array, "B T"], inverse_frequencies: np.ndarray, length: int | None = None
) -> Float[Array, "B T D2"]:
    """Returns position times frequency, up to full turns, in float32 radians; D2 is D / 2.

    A float32 product is off by half a unit in its own last place: 0.004 radians at 2^17 tokens, 0.5
    at 2^24, and beyond that neighbours share a position. Up to FLOAT32_LENGTH it is used anyway,
    bit for bit as in transformers. In longer rows a frequency is split into an integer number of
    2^-32 turns and a remainder: the int32 product with the integer drops full turns by wrapping,
    and is exact; the product with the remainder is at most a tenth of a radian at 2^27 tokens. The
    sum is off by at most 8e-7 radians.

    Args:
      length: tokens in the whole row.
    """
    frequencies = np.asarray(inverse_frequencies, np.float32)
    float_positions = positions.astype(jnp.float32)[..., None]
    if length is None or length <= FLOAT32_LENGTH:
        return float_positions * frequencies
    unit = 2 * math.pi / 2**32
    integer = np.round(frequencies.astype(np.float64) / unit)
    remainder = (frequencies - integer * unit).astype(np.float32)
    steps = integer.astype(np.int64).astype(np.int32)  # modulo a turn
    return (positions[..., None] * steps).astype(jnp.float32) * np.float32(
        unit
    ) + float_positions * remainder


def query_factors(positions: Int[Array, "B T"], beta: float, original: int) -> Float[Array, "B T"]:
    """Returns the factors of queries that sharpen attention beyond the original length: 1 + beta *
    log(1 + floor(position / original)), as Llama 4 and Ministral 3 have them."""
    return 1 + beta * jnp.log(1 + (positions // original).astype(jnp.float32))


def apply_rope(
    x: Float[Array, "B T H D"],
    positions: Int[Array, "B T"],
    inverse_frequencies: np.ndarray,
    scaling: float = 1.0,
    length: int | None = None,
    *,
    interleaved: bool = False,
) -> Float[Array, "B T H D"]:
    """Returns x with pairs of each head's first R channels rotated by position times frequency, and
    multiplied by `scaling`; the other channels pass unchanged.

    The pairs are (c, c + R/2) or, if `interleaved`, (2c, 2c + 1).

    Angles, cosines and the products are float32, and the result is rounded once to x's dtype:
    bfloat16 cosines would lose the fine differences between far positions.

    Args:
      inverse_frequencies: float32 [R / 2]; length: tokens in the whole row.
    """
    radians = angles(positions, inverse_frequencies, length)
    cos, sin = (jnp.float32(scaling) * fn(radians)[:, :, None, :] for fn in (jnp.cos, jnp.sin))
    half = cos.shape[-1]
    channels = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if interleaved
        else (slice(half), slice(half, 2 * half))
    )
    first, second = (x[..., of_pair].astype(jnp.float32) for of_pair in channels)
    turned = [first * cos - second * sin, second * cos + first * sin]
    if interleaved:
        rotated = jnp.stack(turned, axis=-1).reshape(*x.shape[:-1], 2 * half).astype(x.dtype)
    else:
        rotated = jnp.concatenate(turned, axis=-1).astype(x.dtype)
    return (
        rotated
        if x.shape[-1] == 2 * half
        else jnp.concatenate([rotated, x[..., 2 * half :]], axis=-1)
    )

"""Stochastic rounding of weights to bfloat16, and moments in 8 bits.

A number is rounded up with the probability of its position between its two neighbours, so that
steps too small to change a weight still move it on average. The random bits are a hash of the step,
the array's name and the number's index: the same on any mesh and after a resume.

Moments in 8 bits are floats with three bits of mantissa: signed with four bits of exponent (the
first moment), or unsigned with five (the second), times a float32 scale for each BLOCK numbers of
the last axis. Unlike a table of 256 levels such as bitsandbytes', looked up number by number, they
are made by shifting a float32's bits, identically on any device. Stochastic rounding keeps slow
averages moving: rounded to the nearest level, a second moment that decays by less than 3% a step
would never change.
"""

from __future__ import annotations

import zlib

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Bool, Float, Int, UInt8, UInt32

BLOCK = 128
# A block's largest number becomes 1.75, the value of the largest code; it would be 1.875 if zero
# did not take a code.
_LARGEST = 1.75
_DROPPED = 20  # of float32's 23 bits of mantissa
# The code 1 is the least positive number: 2**-15 of the block's power of two, or 2**-31.
_SIGNED_OFFSET, _UNSIGNED_OFFSET = ((127 - exponent << 3) - 1 for exponent in (15, 31))


def random_bits(shape: tuple[int, ...], step: Int[Array, ""], name: str) -> UInt32[Array, ...]:
    """Returns 32 random bits for each element of an array: a hash of step, name and index."""
    element = jnp.full(shape, zlib.crc32(name.encode()), jnp.uint32)
    for axis in range(len(shape)):
        # A different odd factor per axis, so that padding an array changes no element's bits.
        factor = zlib.crc32(f"axis {axis}".encode()) | 1
        element += lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(factor)
    return _mixed(_mixed(element) ^ _mixed(step.astype(jnp.uint32) + jnp.uint32(0x9E3779B9)))


def _mixed(x: UInt32[Array, ...]) -> UInt32[Array, ...]:
    """MurmurHash3's finalizer: each bit of the result depends on every bit of x."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def to_bfloat16(x: Float[Array, "*S"], random: UInt32[Array, "*S"]) -> BFloat16[Array, "*S"]:
    """Returns x in bfloat16, up or down at random, so that its expectation is x."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    rounded = (bits + (random >> 16)) & jnp.uint32(0xFFFF0000)
    rounded = jnp.where(jnp.isfinite(x), rounded, bits)
    return lax.bitcast_convert_type(rounded, jnp.float32).astype(jnp.bfloat16)


def encode(
    x: Float[Array, "*S"], random: UInt32[Array, "*S"], signed: bool
) -> tuple[UInt8[Array, "*S"], Float[Array, ...]]:
    """Returns 8-bit codes of moments, rounded at random, and their blocks' scales.

    Args:
      x: float32 moments; not negative unless `signed`.
      random: random bits.
    """
    largest = jnp.max(_blocks(jnp.abs(x)), -1)
    scales = largest / _LARGEST
    ratio = jnp.abs(x) / jnp.maximum(_spread(scales, x.shape), jnp.finfo(jnp.float32).tiny)
    offset = _SIGNED_OFFSET if signed else _UNSIGNED_OFFSET
    bits = lax.bitcast_convert_type(ratio, jnp.uint32)
    codes = ((bits + (random >> (32 - _DROPPED))) >> _DROPPED).astype(jnp.int32) - offset
    least = _least(offset)
    if signed:
        # Below the smallest level there is only zero.
        up = random.astype(jnp.float32) * 2.0**-32 < ratio / least
        codes = jnp.where(ratio < least, up.astype(jnp.int32), jnp.minimum(codes, 127))
        codes = jnp.where(x < 0, codes | 128, codes)
    else:
        # A second moment of zero would allow a step of any size.
        codes = jnp.where(x > 0, jnp.clip(codes, 1, 255), 0)
    return codes.astype(jnp.uint8), scales


def decode(
    codes: UInt8[Array, "*S"], scales: Float[Array, ...], signed: bool
) -> Float[Array, "*S"]:
    """Returns the float32 moments that codes and scales stand for."""
    offset = _SIGNED_OFFSET if signed else _UNSIGNED_OFFSET
    number = codes.astype(jnp.uint32)
    size = number & 127 if signed else number
    ratio = lax.bitcast_convert_type((size + jnp.uint32(offset)) << _DROPPED, jnp.float32)
    value = jnp.where(size > 0, ratio, 0.0) * _spread(scales, codes.shape)
    negative: Bool[Array, ...] = number >= 128
    return jnp.where(negative, -value, value) if signed else value


def _least(offset: int) -> float:
    """The value of code 1, without its scale."""
    return 2.0 ** ((offset + 1 >> 3) - 127)


def _blocks(x: Float[Array, ...]) -> Float[Array, ...]:
    """x with its last axis in blocks, the last one zero-padded."""
    blocks = -(-x.shape[-1] // BLOCK)
    missing = blocks * BLOCK - x.shape[-1]
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x
    return padded.reshape(*x.shape[:-1], blocks, BLOCK)


def _spread(scales: Float[Array, ...], shape: tuple[int, ...]) -> Float[Array, ...]:
    """Each block's scale for each of its numbers."""
    return jnp.repeat(scales, BLOCK, axis=-1)[..., : shape[-1]]

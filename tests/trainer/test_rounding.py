"""Stochastic rounding against levels written out by hand, and the mean of its results against the
inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.model.build import mesh_of
from trainer.rounding import BLOCK, decode, encode, random_bits, to_bfloat16

MANY = 1 << 15


def bits(shape, step=3, name="w"):
    return random_bits(shape, jnp.int32(step), name)


@pytest.mark.parametrize("x", [1 + 2**-10, -1 - 2**-9, 3.0e-38, 1e30, 0.1])
def test_rounding_to_bfloat16_is_unbiased(x):
    """The lower 16 bits of float32 set the probability; the observed frequency is within four
    standard deviations of it."""
    x = np.float32(x)
    below = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    above = ((x.view(np.uint32) & np.uint32(0xFFFF0000)) + np.uint32(0x10000)).view(np.float32)
    rounded = np.asarray(to_bfloat16(jnp.full(MANY, x), bits((MANY,)))).astype(np.float32)
    assert set(np.unique(rounded)) == {below, above}
    chance = (np.float64(x) - below) / (np.float64(above) - below)
    assert np.mean(rounded == above) == pytest.approx(
        chance, abs=4 * np.sqrt(chance * (1 - chance) / MANY)
    )


def test_numbers_that_bfloat16_represents_stay():
    x = jnp.array([0.0, -0.0, 1.5, -(2.0**-120), jnp.inf, -jnp.inf, jnp.nan], jnp.float32)
    for step in range(5):
        np.testing.assert_array_equal(to_bfloat16(x, bits(x.shape, step)).astype(jnp.float32), x)


def test_random_bits_depend_only_on_the_position_in_the_whole_array():
    """Neither the mesh nor padding changes the random bits; another step or name does. All bits are
    uniform."""
    shape, mesh = (4, 6, 8), mesh_of({"fsdp": 2, "tensor": 2, "sequence": 2})
    alone = np.asarray(bits(shape))
    sharded = jax.jit(
        lambda step: random_bits(shape, step, "w"),
        out_shardings=NamedSharding(mesh, PartitionSpec("fsdp", "tensor", "sequence")),
    )(jnp.int32(3))
    np.testing.assert_array_equal(sharded, alone)
    np.testing.assert_array_equal(np.asarray(bits((4, 9, 16)))[:, :6, :8], alone)
    for other in (bits(shape, step=4), bits(shape, name="v")):
        assert np.mean(np.asarray(other) == alone) < 0.01
    many = np.asarray(bits((MANY,)))
    assert len(np.unique(many)) > 0.99 * MANY
    ones = [np.mean(many >> bit & 1) for bit in range(32)]
    np.testing.assert_allclose(ones, 0.5, atol=4 * 0.5 / np.sqrt(MANY))


def test_the_8_bit_levels():
    """Levels are (1 + m / 8) * 2**e, unsigned down to 2**-31 and signed down to 2**-15, written out
    by hand."""
    codes = jnp.arange(256, dtype=jnp.uint8).reshape(2, BLOCK)
    ones = jnp.ones((2, 1), jnp.float32)

    def level(number, lowest):
        exponent, mantissa = divmod(number - 1, 8)
        return (1 + mantissa / 8) * 2.0 ** (lowest + exponent) if number else 0.0

    unsigned = [level(number, -31) for number in range(256)]
    signed = [level(number % 128, -15) * (-1 if number >= 128 else 1) for number in range(256)]
    np.testing.assert_array_equal(decode(codes, ones, False).ravel(), unsigned)
    np.testing.assert_array_equal(decode(codes, ones, True).ravel(), signed)
    assert unsigned[255] == signed[127] == 1.75


@pytest.mark.parametrize("signed", [True, False])
def test_moments_round_without_bias_to_neighbouring_levels(signed):
    """Blocks of different sizes, one block of zeros, and a last axis that is not a multiple of the
    block."""
    random = np.random.default_rng(0)
    x = random.normal(size=(3, 200)).astype(np.float32) * np.float32([[1], [1e-20], [0]])
    x = x if signed else x * x * np.float32(1e15)
    encoded = jax.jit(lambda x, step: encode(x, random_bits(x.shape, step, "m"), signed))
    rounds = []
    for step in range(400):
        codes, scales = encoded(x, jnp.int32(step))
        assert codes.dtype == jnp.uint8 and codes.shape == x.shape and scales.shape == (3, 2)
        rounds.append(np.asarray(decode(codes, scales, signed), np.float64))
    error = np.abs(rounds[0] - x)
    largest = np.stack([np.abs(x[:, :BLOCK]).max(1), np.abs(x[:, BLOCK:]).max(1)], 1)
    least = np.repeat(largest / 1.75 * 2.0 ** (-15 if signed else -31), BLOCK, 1)[:, :200]
    assert np.all(error <= np.maximum(np.abs(x) / 8, least) * (1 + 1e-5))
    # One level is an eighth of a power of two, so the mean of 400 draws is within 4 * 1/8/2/20.
    mean = np.mean(rounds, 0)
    assert np.all(np.abs(mean - x) <= np.maximum(np.abs(x) / 80, 0.2 * least))
    assert np.all((rounds[0] > 0) == (x > 0)) if not signed else np.all(rounds[0] * x >= 0)


@pytest.mark.parametrize("share", [0.125, 0.5, 0.875])
def test_signed_moments_below_the_smallest_level_round_without_bias(share):
    """They become zero or the smallest level, 2**-15 of a scale of 1, which is that of the block's
    largest moment, 1.75; the frequency is within four standard deviations of the share."""
    x = jnp.full((MANY // BLOCK, BLOCK), -share * 2.0**-15).at[:, 0].set(1.75)
    codes, scales = encode(x, bits(x.shape), True)
    found = np.asarray(decode(codes, scales, True))[:, 1:]
    assert set(np.unique(found)) == {0.0, -(2.0**-15)}
    deviation = np.sqrt(share * (1 - share) / found.size)
    assert np.mean(found != 0) == pytest.approx(share, abs=4 * deviation)


@pytest.mark.parametrize("shape", [(300,), (2, 1, 300)])
@pytest.mark.parametrize("signed", [True, False])
def test_blocks_lie_along_the_last_axis(shape, signed):
    rows = np.random.default_rng(0).random((int(np.prod(shape)) // 300, 300), np.float32)
    random = np.asarray(bits(rows.shape))
    expected = encode(rows, random, signed)
    found = encode(rows.reshape(shape), random.reshape(shape), signed)
    for ours, of_rows in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours.reshape(of_rows.shape), of_rows)
    np.testing.assert_array_equal(
        decode(*found, signed).reshape(rows.shape), decode(*expected, signed)
    )


def test_a_slow_average_keeps_moving():
    """A second moment whose gradients have become zero decays by 0.1% per step, to e**-1 after
    1,000 steps; with rounding to the nearest level it would never move."""
    x = jnp.full((8, BLOCK), 1.0)

    def step(i, state):
        moments = 0.999 * decode(*state, False)
        # One number of each block keeps its size, and therefore the block its scale.
        return encode(moments.at[:, 0].set(1.0), random_bits(x.shape, i, "v"), False)

    codes, scales = jax.lax.fori_loop(0, 1000, step, encode(x, bits(x.shape), False))
    moved = np.asarray(decode(codes, scales, False))[:, 1:]
    assert moved.mean() == pytest.approx(0.999**1000, rel=0.05)

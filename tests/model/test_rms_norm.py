"""RMS normalization against its definition in float64, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.norms import rms_norm

EPSILON = 1e-5


def dense(
    x: np.ndarray, weight: np.ndarray, dy: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the result, dx and dw in float64, from the full Jacobian."""
    inverse = 1 / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPSILON)
    normed = x * inverse
    jacobian = inverse[..., None] * (
        np.eye(x.shape[-1]) - normed[..., :, None] * normed[..., None, :] / x.shape[-1]
    )
    return (
        normed * weight,
        np.einsum("...i,...ij->...j", dy * weight, jacobian),
        np.sum(dy * normed, tuple(range(x.ndim - 1))),
    )


@pytest.mark.parametrize(
    ("shape", "scale"), [((2, 5, 16), 1e-4), ((1, 7, 3, 8), 1.0), ((4, 2), 1e3)], ids=str
)
def test_result_and_gradients_match_float64(shape, scale):
    rng = np.random.default_rng(0)
    x = scale * rng.standard_normal(shape)
    dy = rng.standard_normal(shape)
    weight = rng.standard_normal(shape[-1])
    y, pullback = jax.vjp(
        lambda x, w: rms_norm(x, w, EPSILON),
        jnp.asarray(x, jnp.float32),
        jnp.asarray(weight, jnp.float32),
    )
    for computed, expected in zip(
        (y, *pullback(jnp.asarray(dy, jnp.float32))), dense(x, weight, dy), strict=True
    ):
        assert computed.shape == expected.shape
        np.testing.assert_allclose(
            computed, expected, rtol=2e-5, atol=2e-6 * np.abs(expected).max()
        )


def test_bfloat16_is_computed_in_float32_and_rounded_once():
    rng = np.random.default_rng(1)
    x, dy = (jnp.asarray(rng.standard_normal((3, 64)), jnp.bfloat16) for _ in range(2))
    weight = jnp.asarray(rng.standard_normal(64), jnp.float32)
    y, pullback = jax.vjp(lambda x, w: rms_norm(x, w, EPSILON), x, weight)
    exact = dense(*(np.asarray(array, np.float64) for array in (x, weight, dy)))
    for computed, expected, dtype in zip(
        (y, *pullback(dy)), exact, (jnp.bfloat16, jnp.bfloat16, jnp.float32), strict=True
    ):
        assert computed.dtype == dtype
        rounding = 2.0**-8 if dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(
            np.asarray(computed, np.float64), expected, rtol=rounding, atol=1e-5
        )
